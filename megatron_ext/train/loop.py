"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.train.callbacks.early_stopping import Verdict, check_watched, exhausted, judge
from megatron_ext.train.callbacks.invariants import check_replicas
from megatron_ext.train.callbacks.profiling import StepProfiler
from megatron_ext.train.callbacks.stopping import EXIT_CODE_SIGNAL
from megatron_ext.train.evaluate import evaluate
from megatron_ext.train.metrics import IntervalMetrics, StepStats
from megatron_ext.train.reporting.records import AVERAGED, EvaluationRecord

if TYPE_CHECKING:
    from megatron_ext.data.loader import BatchSource
    from megatron_ext.optim.update import UpdateResult
    from megatron_ext.train.run import Run


def train(run: Run) -> int | None:
    """Train until the last iteration or an early stop.

    Returns:
        None after the last iteration, else the exit code of the early stop.
    """
    check_watched(run)
    over = exhausted(run)
    if over is not None:
        run.reporters.say(f"nothing to do at iteration {run.progress.iteration} ({over})")
        return 0
    collect_garbage = _garbage_collector(run)
    window = IntervalMetrics(run)
    profiler = StepProfiler(run.config, run.context.rank)
    after_step = None if run.task.after_step is None else run.task.after_step(run)
    saved_at = run.progress.iteration
    while run.progress.iteration < run.num_iterations:
        grown = run.batch_size.update(run.progress.consumed_train_samples)
        if grown and saved_at != run.progress.iteration:
            window.settle()
            run.save()
            saved_at = run.progress.iteration
        profiler.before_step(run.progress.iteration)
        _step(run, window)
        iteration = run.progress.iteration
        profiler.after_step(iteration)
        if iteration == 1:
            window.report(keep=True)
        elif iteration % run.config.logging.log_interval == 0:
            window.report()
        started = time.perf_counter()
        _check_invariants(run)
        losses = None
        if _due(iteration, run.config.training.eval_interval) and run.evaluates:
            with _collected(run):
                losses = evaluate_split(run, "validation")
        if after_step is not None:
            after_step()
        collect_garbage(iteration)
        stop = run.stop_requests.check(run.device)
        leave = stop is not None or _due(iteration, run.config.training.exit_interval)
        due = leave or _due(iteration, run.config.checkpoint.save_interval)
        verdict = Verdict()
        if losses is not None:
            verdict = judge(run, losses, regular=due or iteration == run.num_iterations)
        if (due or verdict.save or verdict.stop) and saved_at != iteration:
            window.settle()
            run.save(verdict.outdone)
            saved_at = iteration
        window.pause(time.perf_counter() - started)
        if leave or verdict.stop:
            reason = stop or verdict.stop or "exit interval"
            run.reporters.say(f"exiting at iteration {iteration} ({reason})")
            return EXIT_CODE_SIGNAL if stop == "signal" else 0
    profiler.stop()
    window.settle()
    if saved_at != run.progress.iteration:
        run.save()
    return None


def _step(run: Run, window: IntervalMetrics) -> None:
    """One training step, counted."""
    num_microbatches = run.train_source.num_microbatches(run.batch_size.num_microbatches)
    size = run.task.step_stats(run, num_microbatches)
    batches = run.train_source.next_step(num_microbatches)
    coming = run.progress.iteration + 1
    checked = _due(coming, run.config.training.check_invariants)
    run.runner.check_zeroed_at = coming if checked else None
    result = run.runner.train(
        batches,
        num_microbatches,
        run.progress.consumed_train_samples,
        run.batch_size.global_batch_size,
    )
    if result.flops is not None:
        size = replace(size, flops=result.flops)
    run.parameter_gather.switch_on()
    advance(run, size)
    window.add(result, size)
    average(run, result.model_update)


def evaluate_at_end(run: Run) -> None:
    """Evaluate both splits after the last iteration.

    The checkpoint of that iteration is saved already. Where it turns out to be among the best, it
    is saved anew, so that a run that goes on from it knows.
    """
    losses = evaluate_split(run, "validation", final=True)
    iteration = run.progress.iteration
    judged = _due(iteration, run.config.training.eval_interval)
    judged = judged or any(entry.iteration == iteration for entry in run.progress.best_checkpoints)
    if not run.config.training.skip_train and not judged:
        check_watched(run)
        verdict = judge(run, losses, regular=True)
        if verdict.save:
            run.save(verdict.outdone)
    evaluate_split(run, "test", final=True)


def evaluate_split(run: Run, name: str, *, final: bool = False) -> list[dict[str, float]]:
    """Evaluate the validation or test split and report it.

    Returns:
        The losses of each set by name, empty but on the last pipeline stage.
    """
    sources = run.valid_sources if name == "validation" else run.test_sources
    with run.parameter_gather.paused():
        found = _evaluate_sources(run, name, sources, final=final)
        if run.ema is not None and name in run.ema_sources:
            with run.ema.swapped_in(run.chunks):
                _evaluate_sources(run, name, run.ema_sources[name], final=final, mark=AVERAGED)
    if name == "validation":
        run.progress.consumed_valid_samples += sum(map(run.evaluation_samples, sources))
    return found


def _evaluate_sources(
    run: Run, name: str, sources: list[BatchSource], *, final: bool, mark: str = ""
) -> list[dict[str, float]]:
    """Evaluate and report each set of a split, whose name in the report ends with ``mark``."""
    found = []
    process = run.task.process_non_loss_data
    # All ranks take part in what only one of them hands over.
    collects = process is not None and bool(run.config.logging.tensorboard_dir) and not mark
    for index, source in enumerate(sources):
        steps = -(-run.evaluation_samples(source) // run.evaluation_batch_size)
        losses, collected = evaluate(
            run.runner, source, steps, run.evaluation_microbatches, collects=collects
        )
        if process is not None and collects and run.reporters.writer is not None:
            process(collected, run.progress.iteration, run.reporters.writer)
        label = name if len(sources) == 1 else f"{name} set {index}"
        run.reporters.on_evaluation(
            EvaluationRecord(
                split=label + mark,
                iteration=run.progress.iteration,
                losses=losses,
                consumed_samples=run.progress.consumed_train_samples,
                final=final,
                perplexity=run.task.perplexity,
            )
        )
        found.append(losses)
    return found


def advance(run: Run, size: StepStats) -> None:
    """Count a step, applied or not."""
    progress = run.progress
    progress.iteration += 1
    progress.consumed_train_samples += size.samples
    progress.floating_point_operations += size.flops
    plan = run.train_source.plan
    if plan is not None:
        progress.epoch = progress.iteration / plan.steps_per_epoch


def average(run: Run, update: UpdateResult | None) -> None:
    """Let the average follow an update of the model of the run."""
    if run.ema is None or update is None:
        return
    flags, step = run.config.ema, run.progress.iteration
    rests = run.runner.model_steps(step) % flags.ema_update_every > 0
    if rests and step >= run.ema.start:
        return
    if not update.known:
        run.ema.update(step, update.flag)
    elif update.applied:
        run.ema.update(step)


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0


def _check_invariants(run: Run) -> None:
    """Compare what ranks must share, every --check-invariants steps."""
    if _due(run.progress.iteration, run.config.training.check_invariants):
        with run.parameter_gather.paused():
            check_replicas(run.runner.trained_chunks, run.context, run.progress.iteration)


@contextmanager
def _collected(run: Run) -> Iterator[None]:
    """Collect garbage before an evaluation, and after it what the evaluation has left."""
    collects = run.config.training.manual_gc and run.config.training.manual_gc_eval
    if collects:
        gc.collect()
    yield
    if collects:
        gc.collect(generation=0)


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
