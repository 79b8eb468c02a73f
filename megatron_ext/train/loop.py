"""The training loop: steps, the callbacks between them, and the metrics of an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from torch import Tensor

from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.callbacks.callback import (
    Callback,
    Decision,
    GarbageCollection,
    StepProfiler,
    StopConditions,
    WeightAverage,
)
from megatron_ext.train.callbacks.evaluation import EarlyStopping, Evaluation
from megatron_ext.train.callbacks.invariants import Invariants
from megatron_ext.train.callbacks.non_finite import NonFinite
from megatron_ext.train.callbacks.rerun import Rerun
from megatron_ext.train.callbacks.resting_state import RestingState
from megatron_ext.train.callbacks.snapshots import Snapshots
from megatron_ext.train.callbacks.spikes import Spikes
from megatron_ext.train.generation import RestartReport
from megatron_ext.train.reporting.records import IterationRecord
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.step_losses import means_of


def train(run: Run) -> int | None:
    """Train to the last iteration and return None, or the exit code if the run ends early."""
    metrics = IntervalMetrics(run)

    def save(superseded: Sequence[int] = (), *, is_last: bool = False) -> None:
        if run.saved_at != run.progress.iteration:
            metrics.settle()
            if run.save(superseded, is_last=is_last):
                run.saved_at = run.progress.iteration

    early_stopping = EarlyStopping(run)
    if early_stopping.exhausted:
        reason = early_stopping.exhausted
        run.reporters.say(f"nothing to do at iteration {run.progress.iteration} ({reason})")
        save(is_last=True)
        return 0
    callbacks: list[Callback] = [RestartReport(run), WeightAverage(run), StepProfiler(run)]
    callbacks += [Invariants(run), NonFinite(run), Rerun(run), Spikes(run), RestingState(run)]
    callbacks.append(Evaluation(run, callbacks))
    callbacks += [build(run) for build in run.task.callbacks]
    callbacks += [GarbageCollection(run), StopConditions(run), early_stopping]
    snapshots = Snapshots(run, metrics.settle)
    snapshots.start()
    for callback in callbacks:
        callback.on_train_start()
    if _has_lost_a_save(run):
        save()
    decision = Decision()
    while run.progress.iteration < run.num_iterations and decision.stop is None:
        if run.batch_size.update(run.progress.consumed_train_samples):
            save()
        for callback in callbacks:
            callback.before_step()
        result = take_step(run, metrics)
        for callback in callbacks:
            callback.after_update(result)
        metrics.report_if_due()
        started = time.perf_counter()
        for callback in callbacks:
            callback.after_step()
        run.saves.look()
        decision = Decision()
        for callback in callbacks:
            callback.decide(decision)
        if run.saves.must_repeat() or decision.save or decision.stop is not None:
            save(decision.superseded)
        snapshots.take_if_due()
        metrics.pause(time.perf_counter() - started)
    if decision.stop is not None:
        run.reporters.reason = decision.stop
        run.reporters.say(f"exiting at iteration {run.progress.iteration} ({decision.stop})")
    for callback in callbacks:
        callback.on_train_end()
    save(is_last=True)
    snapshots.end()
    return None if decision.stop is None else decision.exit_code


def _has_lost_a_save(run: Run) -> bool:
    """Return whether a run goes on from snapshots after a fault that has ended a save under way."""
    interval = run.config.checkpoint.save_interval
    return interval is not None and run.saved_at // interval < run.progress.iteration // interval


def take_step(run: Run, metrics: IntervalMetrics) -> StepResult:
    """Train one step, count it in the progress and ``metrics``, and return its result."""
    recorder = run.context.recorder
    recorder.step(run.progress.iteration + 1)
    with recorder.phase("data"):
        num_microbatches = run.train_source.num_microbatches(run.batch_size.num_microbatches)
        stats = run.task.step_stats(run, num_microbatches)
        run.runner.seq_length = run.seq_length
        if run.train_source.seq_length_of is not None and run.seq_length is not None:
            run.train_source.expect(run.seq_length)
        batches = run.train_source.next_step(num_microbatches)
    consumed, num_samples = run.progress.consumed_train_samples, run.batch_size.global_batch_size
    result = run.runner.train(batches, num_microbatches, consumed, num_samples)
    if result.flops is not None:
        stats = replace(stats, flops=result.flops)
    run.parameter_gather.switch_on()
    plan = run.train_source.plan
    run.progress.advance(stats, None if plan is None else plan.steps_per_epoch)
    metrics.add(result, stats)
    return result


class IntervalMetrics:
    """Sums of losses, samples, tokens and time over the steps between two reports."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unsettled: tuple[int, StepResult] | None = None
        self._reset()

    def _reset(self) -> None:
        self._losses: dict[str, Tensor] = {}
        self._steps = self._skipped = self._nans = self._samples = self._tokens = 0
        self._flops = self._pause = 0.0
        self._last: StepResult | None = None
        self._last_samples = 0
        self._start = time.perf_counter()

    def add(self, result: StepResult, stats: StepStats) -> None:
        """Add one step's losses and statistics to the sums."""
        self._count_last()
        self._last, self._last_samples = result, stats.samples
        self._steps += 1
        self._samples += stats.samples
        self._tokens += stats.tokens
        self._flops += stats.flops
        for name, loss in result.losses.items():
            counted = torch.stack([loss, (result.counts[name] > 0).to(loss)])
            counted = torch.where(result.update.flag, counted, 0.0)
            self._losses[name] = self._losses.get(name, torch.zeros_like(counted)) + counted
        self._unsettled = self._run.progress.iteration, result
        if self._run.runner.settled:
            self._count_last()

    def settle(self) -> None:
        """Wait for the last update; advance the learning rate, or count the step as skipped."""
        self._run.runner.settle()
        self._count_last()

    def _count_last(self) -> None:
        """If the last step was skipped, announce and count it, and count its loss if not finite."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None or unsettled[1].update.applied:
            return
        iteration, result = unsettled
        nan = any(not math.isfinite(float(loss)) for loss in result.losses.values())
        self._skipped += 1
        self._nans += nan
        self._run.progress.skipped_iterations += 1
        self._run.progress.nan_iterations += nan
        self._run.reporters.say(
            f"iteration {iteration} was skipped: its gradient norm is {result.update.grad_norm} "
            f"({self._run.progress.skipped_iterations} skipped so far)"
        )

    def pause(self, seconds: float) -> None:
        """Exclude seconds that were not spent on steps from the step time."""
        self._pause += seconds

    def report_if_due(self) -> None:
        """Report every ``--log-interval`` steps, and after the first step of a run.

        As in Megatron-LM, the first step counts again in the first full interval.
        """
        iteration = self._run.progress.iteration
        if iteration == 1 or iteration % self._run.config.logging.log_interval == 0:
            self.report(keep=iteration == 1)

    def report(self, *, keep: bool = False) -> None:
        """Report the steps since the last report, and reset the sums unless ``keep`` is set."""
        self.settle()
        run, last = self._run, self._last
        assert last is not None and run.optimizer is not None
        losses = means_of(self._losses)
        if self._skipped == self._steps:
            # Finite where only the gradients were not, as after an overflow of a loss scale.
            losses = {name: float(loss) for name, loss in last.losses.items()}
        elapsed = time.perf_counter() - self._start - self._pause
        memory = {}
        if run.device.type == "cuda":
            memory["allocated"] = float(torch.cuda.memory_allocated(run.device))
            memory["reserved"] = float(torch.cuda.memory_reserved(run.device))
        rate = get_canonical_lr_for_logging(run.optimizer.param_groups) or 0.0
        record = IterationRecord(
            iteration=run.progress.iteration,
            num_iterations=run.num_iterations,
            consumed_samples=run.progress.consumed_train_samples,
            seconds=max(elapsed, 1e-9) / self._steps,
            # Megatron-LM's learning rate goes through a float32 tensor.
            learning_rate=float(np.float32(rate)),
            global_batch_size=self._last_samples,
            losses=losses,
            loss_scale=float(run.optimizer.get_loss_scale()),
            grad_norm=last.update.grad_norm,
            samples=self._samples / self._steps,
            sample_name=run.task.sample_name,
            tokens=self._tokens / self._steps,
            flops=self._flops / self._steps,
            world_size=run.context.layout.world_size,
            skipped=self._skipped,
            nans=self._nans,
            total_skipped=run.progress.skipped_iterations,
            num_zeros=last.update.num_zeros,
            params_norm=run.params_norm() if run.config.logging.log_params_norm else None,
            peak_flops=run.peak_flops,
            memory=memory,
            epoch=run.progress.epoch,
            failed_saves=run.saves.num_failed,
        )
        run.reporters.on_iteration(record)
        if not keep:
            self._reset()
