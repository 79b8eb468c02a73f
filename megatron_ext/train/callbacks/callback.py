"""The base class of callbacks, which run between the steps of a run, and several short ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.disk.writing import cleared
from megatron_ext.errors import EXIT_CODE_NOT_SAVED
from megatron_ext.train.exit_codes import EXIT_CODE_RESIZED, EXIT_CODE_SIGNAL
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult

Losses = Sequence[Mapping[str, float]]
"""For each validation set, its losses by name; {} on ranks without the last pipeline stage."""


@dataclass
class Decision:
    """The actions that follow a step; callbacks request them in `Callback.decide`.

    Attributes:
        save: whether to save a checkpoint of this iteration. The last iteration is always saved.
        stop: why the run ends; None if it continues.
        exit_code: exit code of the process if ``stop`` is set.
        superseded: iterations whose checkpoints may be deleted once this iteration is saved.
    """

    save: bool = False
    stop: str | None = None
    exit_code: int = 0
    superseded: tuple[int, ...] = ()


class Callback:
    """An action between steps; a subclass overrides the methods that it needs.

    All ranks call each method together. Methods that a subclass does not override are never called.
    `loop.callbacks_of` lists the callbacks of a run in their order; `Task.callbacks` adds those of
    a task.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_start(self) -> None:
        """Run once before the first step."""

    def before_step(self) -> None:
        """Run before each step; ``run.progress.iteration`` counts the steps done."""

    def after_update(self, result: StepResult) -> None:
        """Run right after each update of the parameters, within the measured time of the step."""

    def after_step(self) -> None:
        """Run after each step and its report, outside of the measured time of the step."""

    def before_evaluation(self) -> None:
        """Run before the validation split is evaluated between steps."""

    def after_evaluation(self, losses: Losses) -> None:
        """Run after the validation split has been evaluated between steps."""

    def decide(self, decision: Decision) -> None:
        """Run after all `after_step` calls; may request a save or a stop in ``decision``."""

    def after_save(self) -> None:
        """Run at the end of each step; if the step saves a checkpoint, after that."""

    def on_train_end(self) -> None:
        """Run once after the last step, even if the run ends early."""


def due(iteration: int, interval: int | None) -> bool:
    """Return whether ``iteration`` is a multiple of ``interval``; False for None or 0."""
    return interval is not None and interval > 0 and iteration % interval == 0


def overridden(callbacks: Sequence[Callback], name: str) -> list[Callable[..., None]]:
    """Return the bound method ``name`` of each callback whose class overrides it."""
    default = getattr(Callback, name)
    return [getattr(each, name) for each in callbacks if getattr(type(each), name) is not default]


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


EXIT_INTERVAL = "exit interval"
"""The value of `Decision.stop` for ``--exit-interval``; any other reason to stop replaces it."""


class StopConditions(Callback):
    """Saves at ``--save-interval``; ends a run at a signal, a time limit or ``--exit-interval``."""

    @staticmethod
    def apply(run: Run) -> bool:
        """Return whether a flag of the run sets a save interval or a condition to stop."""
        interval = run.config.checkpoint.save_interval or run.config.training.exit_interval
        return bool(interval) or run.stop_requests.watches

    def decide(self, decision: Decision) -> None:
        run = self.run
        config = self.run.config
        request = run.stop_requests.check(run.device)
        if request is not None:
            decision.stop = request
            saves = config.checkpoint.save is not None
            codes = {
                "signal": EXIT_CODE_SIGNAL if saves else EXIT_CODE_NOT_SAVED,
                "resize": EXIT_CODE_RESIZED,
            }
            decision.exit_code = codes.get(request, 0)
        elif due(run.progress.iteration, config.training.exit_interval):
            decision.stop = decision.stop or EXIT_INTERVAL
        decision.save |= due(run.progress.iteration, config.checkpoint.save_interval)


class SaveWatch(Callback):
    """Reports the outcome of background saves; requests another save if the newest one failed."""

    def after_step(self) -> None:
        self.run.saves.look()

    def decide(self, decision: Decision) -> None:
        decision.save |= self.run.saves.must_repeat()
