"""The training loop: steps, and the callbacks between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.train.callbacks.averaging import WeightAverage
from megatron_ext.train.callbacks.callback import Callback, Decision
from megatron_ext.train.callbacks.early_stopping import EarlyStopping
from megatron_ext.train.callbacks.evaluation import Evaluation
from megatron_ext.train.callbacks.garbage import GarbageCollection
from megatron_ext.train.callbacks.invariants import Invariants
from megatron_ext.train.callbacks.profiler import StepProfiler
from megatron_ext.train.callbacks.stopping import StopConditions
from megatron_ext.train.metrics import IntervalMetrics
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult


def train(run: Run) -> int | None:
    """Train until the last iteration, or until a callback ends the run.

    Returns:
        None after the last iteration, else the exit code of the run that has ended early.
    """
    early_stopping = EarlyStopping(run)
    if early_stopping.exhausted:
        reason = early_stopping.exhausted
        run.reporters.say(f"nothing to do at iteration {run.progress.iteration} ({reason})")
        return 0
    callbacks = _callbacks(run, early_stopping)
    metrics = IntervalMetrics(run)
    saves = _Saves(run, metrics)
    for callback in callbacks:
        callback.on_train_start()
    decision = Decision()
    while run.progress.iteration < run.num_iterations and decision.stop is None:
        if run.batch_size.update(run.progress.consumed_train_samples):
            saves.save()
        for callback in callbacks:
            callback.before_step()
        result = take_step(run, metrics)
        for callback in callbacks:
            callback.after_update(result)
        metrics.report_if_due()
        started = time.perf_counter()
        for callback in callbacks:
            callback.after_step()
        decision = Decision()
        for callback in callbacks:
            callback.decide(decision)
        if decision.save or decision.stop is not None:
            saves.save(decision.superseded)
        metrics.pause(time.perf_counter() - started)
    if decision.stop is not None:
        run.reporters.say(f"exiting at iteration {run.progress.iteration} ({decision.stop})")
    for callback in callbacks:
        callback.on_train_end()
    saves.save()
    return None if decision.stop is None else decision.exit_code


def _callbacks(run: Run, early_stopping: EarlyStopping) -> list[Callback]:
    """Build the callbacks of a run, in the order in which they are called."""
    callbacks: list[Callback] = []
    callbacks += [WeightAverage(run), StepProfiler(run), Invariants(run)]
    callbacks.append(Evaluation(run, callbacks))
    callbacks += [build(run) for build in run.task.callbacks]
    callbacks += [GarbageCollection(run), StopConditions(run), early_stopping]
    return callbacks


def take_step(run: Run, metrics: IntervalMetrics) -> StepResult:
    """Train one step, and count it."""
    num_microbatches = run.train_source.num_microbatches(run.batch_size.num_microbatches)
    stats = run.task.step_stats(run, num_microbatches)
    batches = run.train_source.next_step(num_microbatches)
    result = run.runner.train(
        batches,
        num_microbatches,
        run.progress.consumed_train_samples,
        run.batch_size.global_batch_size,
    )
    if result.flops is not None:
        stats = replace(stats, flops=result.flops)
    run.parameter_gather.switch_on()
    plan = run.train_source.plan
    run.progress.advance(stats, None if plan is None else plan.steps_per_epoch)
    metrics.add(result, stats)
    return result


class _Saves:
    """Saves checkpoints of a run, each iteration once."""

    def __init__(self, run: Run, metrics: IntervalMetrics) -> None:
        self._run, self._metrics = run, metrics
        self._saved_at = run.progress.iteration

    def save(self, superseded: Sequence[int] = ()) -> None:
        """Save a checkpoint of this iteration, unless that has been done."""
        if self._saved_at != self._run.progress.iteration:
            self._metrics.settle()
            self._run.save(superseded)
            self._saved_at = self._run.progress.iteration
