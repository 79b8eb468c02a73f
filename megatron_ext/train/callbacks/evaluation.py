"""Evaluation between steps and at the end: the mean loss of a split, equal on every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_ext.data.loader import BatchSource
from megatron_ext.train.callbacks.callback import Callback, Decision, due
from megatron_ext.train.callbacks.early_stopping import EarlyStopping
from megatron_ext.train.reporting.records import AVERAGED, EvaluationRecord
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepRunner
from megatron_ext.train.totals import mean_of, reduce_reports


class Evaluation(Callback):
    """Evaluates the validation split every ``--eval-interval`` steps, and tells all callbacks.

    Args:
        run: the run.
        callbacks: all callbacks of the run, also those that are added later.
    """

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        super().__init__(run)
        self._callbacks = callbacks

    def after_step(self) -> None:
        """Evaluate after each multiple of the interval."""
        run = self.run
        if not (run.evaluates and due(run.progress.iteration, run.config.training.eval_interval)):
            return
        for callback in self._callbacks:
            callback.before_evaluation()
        losses = evaluate_split(run, "validation")
        for callback in self._callbacks:
            callback.after_evaluation(losses)


def evaluate_at_end(run: Run) -> None:
    """Evaluate both splits after the last iteration.

    The checkpoint of that iteration is saved already. Where it turns out to be among the best, it
    is saved anew, so that a run that goes on from it knows.
    """
    losses = evaluate_split(run, "validation", final=True)
    iteration, training = run.progress.iteration, run.config.training
    judged = due(iteration, training.eval_interval)
    judged = judged or any(entry.iteration == iteration for entry in run.progress.best_checkpoints)
    if not training.skip_train and not judged:
        decision = Decision(save=True)
        if EarlyStopping(run).judge(losses, decision):
            run.save(decision.superseded)
    evaluate_split(run, "test", final=True)


def evaluate_split(run: Run, name: str, *, final: bool = False) -> list[dict[str, float]]:
    """Evaluate the validation or test split, with the averaged weights too, and report it.

    Returns:
        The losses of each set by name, empty but on the last pipeline stage.
    """
    sources = run.valid_sources if name == "validation" else run.test_sources
    with run.parameter_gather.paused():
        losses = _evaluate_sources(run, name, sources, final=final)
        if run.ema is not None and name in run.ema_sources:
            with run.ema.swapped_in(run.chunks):
                _evaluate_sources(run, name, run.ema_sources[name], final=final, mark=AVERAGED)
    if name == "validation":
        run.progress.consumed_valid_samples += sum(map(run.evaluation_samples, sources))
    return losses


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


def evaluate(
    runner: StepRunner,
    source: BatchSource,
    num_steps: int,
    num_microbatches: int,
    *,
    collects: bool = False,
) -> tuple[dict[str, float], Any]:
    """Return the mean of each loss over the targets of ``num_steps`` global batches.

    Args:
        runner: runs the forward passes.
        source: batches of the split.
        num_steps: number of global batches.
        num_microbatches: micro-batches in each step, unless the source has a plan of its own.
        collects: also collect the data that `Task.process_non_loss_data` takes.

    Returns:
        The losses by name on the last pipeline stage, nothing on the others; and the collected
        data. A loss that had no target in the split, such as that of a condition mode, is left
        out. The first loss always stays, and is then 0.
    """
    for chunk in runner.chunks:
        chunk.eval()
    totals: dict[str, Tensor] = {}
    collected: Any = []
    silent = None if runner.context.is_reporting_rank else True
    bar = tqdm(range(num_steps), "Evaluating", unit="step", delay=1.0, leave=False, disable=silent)
    try:
        with torch.no_grad():
            for _ in bar:
                count = source.num_microbatches(num_microbatches)
                batches = source.next_step(count)
                reports = runner.forward_backward(batches, count, forward_only=True)
                for key, entry in reduce_reports(reports, runner.context).items():
                    totals[key] = totals[key] + entry if key in totals else entry
            if collects and runner.task.non_loss_data is not None:
                collected = runner.task.non_loss_data(runner.chunks)
            elif collects and num_steps > 0:
                collected = runner.forward_backward(
                    batches, count, forward_only=True, collect_non_loss_data=True
                )
    finally:
        for chunk in runner.chunks:
            chunk.train()
    first = next(iter(totals), None)
    losses = {
        key: float(mean_of(entry))
        for key, entry in totals.items()
        if key == first or float(entry[1]) > 0
    }
    return losses, collected
