"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_ext.training.evaluate import evaluate
from megatron_ext.training.invariants import check_replicas
from megatron_ext.training.profiling import StepProfiler
from megatron_ext.training.reporting import EvaluationRecord
from megatron_ext.training.signals import EXIT_CODE_SIGNAL
from megatron_ext.training.step import StepResult
from megatron_ext.training.window import LogWindow

if TYPE_CHECKING:
    from megatron_ext.training.setup import Run


def train(run: Run) -> int | None:
    """Train until the last iteration or an early stop.

    Returns:
        None after the last iteration, else the exit code of the early stop.
    """
    collect_garbage = _garbage_collector(run)
    window = LogWindow(run)
    profiler = StepProfiler(run.config, run.context.rank)
    saved_at = run.progress.iteration
    while run.progress.iteration < run.num_iterations:
        grown = run.batch_size.update(run.progress.consumed_train_samples)
        if grown and saved_at != run.progress.iteration:
            run.save()
            saved_at = run.progress.iteration
        profiler.before_step(run.progress.iteration)
        num_microbatches = run.train_source.num_microbatches(run.batch_size.num_microbatches)
        batches = run.train_source.next_step(num_microbatches)
        coming = run.progress.iteration + 1
        checked = _due(coming, run.config.training.check_invariants)
        run.runner.check_zeroed_at = coming if checked else None
        result = run.runner.train(batches, num_microbatches, run.progress.consumed_train_samples)
        run.parameter_gather.switch_on()
        nan = _advance(run, result)
        iteration = run.progress.iteration
        profiler.after_step(iteration)
        window.add(result, nan=nan)
        if iteration == 1:
            window.report(keep=True)
        elif iteration % run.config.logging.log_interval == 0:
            window.report()
        started = time.perf_counter()
        _check_invariants(run)
        if _due(iteration, run.config.training.eval_interval) and run.evaluates:
            evaluate_split(run, "validation")
        collect_garbage(iteration)
        stop = run.stop_requests.check(run.device)
        due = _due(iteration, run.config.checkpoint.save_interval)
        leave = stop is not None or _due(iteration, run.config.training.exit_interval)
        if (due or leave) and saved_at != iteration:
            run.save()
            saved_at = iteration
        window.pause(time.perf_counter() - started)
        if leave:
            run.reporters.say(f"exiting at iteration {iteration} ({stop or 'exit interval'})")
            return EXIT_CODE_SIGNAL if stop == "signal" else 0
    profiler.stop()
    if saved_at != run.progress.iteration:
        run.save()
    return None


def evaluate_split(run: Run, name: str, *, final: bool = False) -> None:
    """Evaluate the validation or test split and report it."""
    sources = run.valid_sources if name == "validation" else run.test_sources
    for index, source in enumerate(sources):
        steps = run.evaluation_steps(source)
        with run.parameter_gather.paused():
            losses = evaluate(run.runner, source, steps, run.evaluation_microbatches)
        label = name if len(sources) == 1 else f"{name} set {index}"
        if name == "validation":
            run.progress.consumed_valid_samples += steps * run.evaluation_batch_size
        run.reporters.on_evaluation(
            EvaluationRecord(
                split=label,
                iteration=run.progress.iteration,
                losses=losses,
                consumed_samples=run.progress.consumed_train_samples,
                final=final,
            )
        )


def _advance(run: Run, result: StepResult) -> bool:
    """Count the step; returns whether it was skipped with a loss that is not finite."""
    progress = run.progress
    progress.iteration += 1
    progress.consumed_train_samples += run.batch_size.global_batch_size
    progress.floating_point_operations += run.flops_per_sample * run.batch_size.global_batch_size
    if result.update.applied:
        return False
    progress.skipped_iterations += 1
    nan = any(not math.isfinite(float(loss)) for loss in result.losses.values())
    progress.nan_iterations += nan
    return nan


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0


def _check_invariants(run: Run) -> None:
    """Compare what ranks must share, every --check-invariants steps."""
    if _due(run.progress.iteration, run.config.training.check_invariants):
        with run.parameter_gather.paused():
            check_replicas(run.chunks, run.context, run.progress.iteration)


def _garbage_collector(run: Run) -> Callable[[int], None]:
    """Collects at the same steps on all ranks where asked for (--manual-gc), else does nothing."""
    if not run.config.training.manual_gc:
        return lambda iteration: None
    gc.disable()
    gc.collect()
    interval = run.config.training.manual_gc_interval

    def collect(iteration: int) -> None:
        if _due(iteration, interval):
            gc.collect()

    return collect
