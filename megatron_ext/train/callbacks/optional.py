"""Short callbacks that flags ask for: averaged weights, garbage collection, profiling and saves."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from megatron_ext.disk.writing import cleared
from megatron_ext.train.callbacks.callback import Callback, Decision, Losses, due
from megatron_ext.train.run import Run
from megatron_ext.train.saves import Saves
from megatron_ext.train.step import StepResult


class WeightAverage(Callback):
    """Updates the averaged weights after a training step.

    Before iteration ``--ema-start`` every step sets them to the new weights; from then on they are
    averaged with the weights every ``--ema-update-every`` steps.
    """

    def after_update(self, result: StepResult) -> None:
        run = self.run
        update = result.model_update
        assert run.ema is not None
        if update is None:
            return
        progress = run.progress
        step = progress.iteration
        earlier = progress.average_updates
        if step >= run.ema.start:
            if run.runner.model_steps(step) % run.config.ema.ema_update_every:
                return
            progress.count_average(run.ema.decay_after(earlier))
        if not update.is_read:
            run.ema.update(step, update.flag, earlier=earlier)
        elif update.applied:
            run.ema.update(step, earlier=earlier)


class GarbageCollection(Callback):
    """Collects garbage at the start, and later only when the ``--manual-gc`` flags ask for it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        training = run.config.training
        self._interval = training.manual_gc_interval
        self._around_evaluations = training.manual_gc_eval

    def on_train_start(self) -> None:
        gc.disable()
        gc.collect()

    def after_step(self) -> None:
        if due(self.run.progress.iteration, self._interval):
            gc.collect()

    def before_evaluation(self) -> None:
        if self._around_evaluations:
            gc.collect()

    def after_evaluation(self, losses: Losses) -> None:
        if self._around_evaluations:
            gc.collect(generation=0)


class StepProfiler(Callback):
    """Profiles the steps from ``--profile-step-start`` to the one before ``--profile-step-end``.

    torch's trace (for chrome://tracing or Perfetto) is written to ``profile_rank<r>.json`` in the
    TensorBoard folder, or else in the save folder, or else in the working folder.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        config = run.config
        rank = run.context.rank
        self._training = config.training
        folder = config.logging.tensorboard_dir or config.checkpoint.save or "."
        self._path = Path(folder) / f"profile_rank{rank}.json"
        self._profiler: torch.profiler.profile | None = None

    def on_train_start(self) -> None:
        start = self._training.profile_step_start
        iteration = self.run.progress.iteration
        if iteration > start:
            print(
                f"> --profile records nothing: the run goes on at step {iteration}, after "
                f"--profile-step-start ({start})",
                flush=True,
            )

    def before_step(self) -> None:
        if self.run.progress.iteration == self._training.profile_step_start:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def after_update(self, result: StepResult) -> None:
        if self.run.progress.iteration >= self._training.profile_step_end:
            self.on_train_end()

    def on_train_end(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(cleared(self._path)))
            self._profiler = None
            first = self._training.profile_step_start + 1
            last = self.run.progress.iteration
            print(f"> the profile of steps {first} to {last} is in {self._path}", flush=True)


class SaveWatch(Callback):
    """Reports the outcome of background saves; requests another save if the newest one failed."""

    def __init__(self, run: Run, saves: Saves) -> None:
        super().__init__(run)
        self._saves = saves

    def after_step(self) -> None:
        self._saves.look()

    def decide(self, decision: Decision) -> None:
        decision.save |= self._saves.must_repeat()
