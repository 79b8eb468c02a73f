"""Evaluation between steps and at the end, the best checkpoints, and early stopping.

The mean loss of a split does not depend on the parallel layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_ext.checkpoint.best import BestCheckpoint, with_candidate
from megatron_ext.config.run import RunConfig
from megatron_ext.data.loader import BatchSource
from megatron_ext.errors import DataError
from megatron_ext.train.callbacks.callback import EXIT_INTERVAL, Callback, Decision, Losses, due
from megatron_ext.train.reporting.records import AVERAGED, EvaluationRecord
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepRunner, means_of, reduce_reports


def check_validation(config: RunConfig, *, given: bool) -> None:
    """Raise a DataError if a flag needs a validation split but the run has none.

    ``given`` says whether the run has one.
    """
    best = config.checkpoint.keep_best
    patience = config.training.early_stop_patience
    for name, value in (("--keep-best", best), ("--early-stop-patience", patience)):
        if value is not None and not given:
            raise DataError(
                f"`{name}` ({value}) needs a validation split, but this run has none; give one by "
                "`--split` or `--valid-data-path`, or leave the flag out."
            )


class EarlyStopping(Callback):
    """Keeps the checkpoints with the lowest validation loss, and ends a run that stops improving.

    The constructor raises a DataError, on all ranks, if ``--keep-best`` or
    ``--early-stop-patience`` is given but the run has no validation split.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._losses: Losses | None = None
        check_validation(run.config, given=bool(run.valid_sources))

    @property
    def exhausted(self) -> str | None:
        """Return the reason to stop if the validation loss has not fallen for too long, else None.

        The limit is ``--early-stop-patience`` evaluations since `_count` last found a lower loss.
        """
        patience = self.run.config.training.early_stop_patience
        progress = self.run.progress
        if patience is None or progress.stale_evaluations < patience:
            return None
        delta = self.run.config.training.early_stop_min_delta
        least = f" by more than {delta:g}" if delta else ""
        return (
            "early stop: the validation loss has not fallen below "
            f"{progress.lowest_loss:.6E}{least} in {progress.stale_evaluations} evaluations"
        )

    def after_evaluation(self, losses: Losses) -> None:
        """Store the losses for `decide`, which runs after other callbacks have requested saves."""
        self._losses = losses

    def decide(self, decision: Decision) -> None:
        losses, self._losses = self._losses, None
        if losses is not None:
            self.judge(losses, decision)

    def judge(self, losses: Losses, decision: Decision) -> bool:
        """Count an evaluation, and return whether its loss is among the ``--keep-best`` lowest.

        Update ``decision``: request a save if the loss is among these, and a stop if the patience
        is exhausted. All ranks call this together; the loss of the reporting rank decides.
        """
        config = self.run.config
        progress = self.run.progress
        if config.checkpoint.keep_best is None and config.training.early_stop_patience is None:
            return False
        # All ranks must decide alike, so they use the loss of the reporting rank.
        mean = mean_validation_loss(losses)
        shared = torch.tensor(mean, dtype=torch.float64, device=self.run.device)
        torch.distributed.broadcast(shared, src=self.run.context.reporting_rank)
        loss = float(shared)
        self._count(loss)
        if self.exhausted and decision.stop in (None, EXIT_INTERVAL):
            decision.stop = self.exhausted
        ends = progress.iteration == self.run.num_iterations
        regular = ends or decision.save or decision.stop is not None
        is_best = self._rank(loss, decision, regular=regular)
        decision.save |= is_best
        return is_best

    def _count(self, loss: float) -> None:
        """Update the lowest loss, and the number of evaluations since it was reached.

        A loss counts as lower if it has fallen by more than ``--early-stop-min-delta``; NaN and
        infinity never count.
        """
        progress = self.run.progress
        lowest = self.run.progress.lowest_loss
        delta = self.run.config.training.early_stop_min_delta
        fell = math.isfinite(loss) if lowest is None else loss < lowest - delta
        progress.stale_evaluations = 0 if fell else progress.stale_evaluations + 1
        progress.lowest_loss = loss if fell else lowest

    def _rank(self, loss: float, decision: Decision, *, regular: bool) -> bool:
        """Return whether ``loss`` is among the ``--keep-best`` lowest; update their list if so.

        ``decision.superseded`` gets the checkpoints that drop out of the list and may be deleted.
        ``regular`` says whether this iteration is saved for another reason too; its checkpoint is
        then kept even if it drops out later, except with ``--save-retain-interval``.
        """
        config = self.run.config.checkpoint
        progress = self.run.progress
        if config.keep_best is None or not math.isfinite(loss):
            return False
        self.run.settle_best()
        before = progress.best_checkpoints
        new = BestCheckpoint(progress.iteration, loss, regular)
        progress.best_checkpoints, dropped = with_candidate(
            progress.best_checkpoints, new, config.keep_best
        )
        if new not in progress.best_checkpoints:
            return False
        self.run.best_before = before
        if progress.best_checkpoints[0] is new:
            sentence = f"best validation loss so far at iteration {new.iteration}: {loss:.6E}"
            self.run.reporters.say(sentence)
        # With --save-retain-interval a checkpoint is removed when the next one is saved. That
        # moment is past for these, so they must be removed here.
        retains = config.save_retain_interval is not None
        decision.superseded = tuple(x.iteration for x in dropped if retains or not x.regular)
        return True


def mean_validation_loss(losses: Losses) -> float:
    """Return the mean over the validation sets of the main (first) loss; NaN if a set has none."""
    first = [next(iter(each.values()), math.nan) for each in losses]
    return math.fsum(first) / len(first) if first else math.nan


class Evaluation(Callback):
    """Evaluates every ``--eval-interval`` steps, and calls ``callbacks`` before and after."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        super().__init__(run)
        self._callbacks = callbacks

    def after_step(self) -> None:
        run = self.run
        training = self.run.config.training
        if not due(run.progress.iteration, training.eval_interval):
            return
        for callback in self._callbacks:
            callback.before_evaluation()
        losses = evaluate_split(run, "validation")
        for callback in self._callbacks:
            callback.after_evaluation(losses)


def evaluate_at_end(run: Run) -> None:
    """Evaluate the validation and the test split after the last iteration.

    The checkpoint of this iteration has already been saved. If only this evaluation shows that
    the validation loss is among the ``--keep-best`` lowest, the checkpoint is saved again, so that
    the list of best checkpoints in it is complete.
    """
    losses = evaluate_split(run, "validation", final=True)
    iteration = run.progress.iteration
    training = run.config.training
    judged = due(iteration, training.eval_interval)
    judged = judged or any(entry.iteration == iteration for entry in run.progress.best_checkpoints)
    if not training.skip_train and not judged:
        decision = Decision(save=True)
        if EarlyStopping(run).judge(losses, decision):
            run.save(decision.superseded, is_last=True)
    evaluate_split(run, "test", final=True)


def evaluate_split(run: Run, name: str, *, final: bool = False) -> list[dict[str, float]]:
    """Evaluate the split ``name``, "validation" or "test", and report the losses.

    ``final`` says whether this follows the last step. With ``--eval-ema`` the averaged weights are
    evaluated and reported as well. Return a dict for each data set of the split: the losses of the
    current weights by name, or {} on ranks without the last pipeline stage.
    """
    sources = run.valid_sources if name == "validation" else run.test_sources
    with run.context.recorder.phase("evaluate"), run.parameter_gather.paused():
        losses = _evaluate_sources(run, name, sources, final=final)
        if run.ema is not None and name in run.ema_sources:
            with run.ema.swapped_in(run.chunks):
                _evaluate_sources(run, name, run.ema_sources[name], final=final, mark=AVERAGED)
    # The final evaluation comes after the run's last save. Its samples must not change the consumed
    # samples: a restart would continue from the saved ones.
    if name == "validation" and not final:
        run.progress.consumed_valid_samples += sum(map(run.evaluation_samples, sources))
    return losses


def _evaluate_sources(
    run: Run, name: str, sources: list[BatchSource], *, final: bool, mark: str = ""
) -> list[dict[str, float]]:
    """Evaluate and report each data set of the split ``name``; return each one's losses by name.

    ``final`` tells the report that this follows the last step. ``mark`` is appended to the split's
    name in the report; it is `AVERAGED` for averaged weights.
    """
    all_losses = []
    process = run.task.process_non_loss_data
    # All ranks run the collective calls, although only one rank passes the result on.
    collects = process is not None and bool(run.config.logging.tensorboard_dir) and not mark
    for index, source in enumerate(sources):
        steps = -(-run.evaluation_samples(source) // run.evaluation_batch_size)
        count = run.evaluation_batch_size // run.batch_size.samples_per_microbatch
        losses, collected = evaluate(run.runner, source, steps, count, collects=collects)
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
        all_losses.append(losses)
    return all_losses


def evaluate(
    runner: StepRunner,
    source: BatchSource,
    num_steps: int,
    num_microbatches: int,
    *,
    collects: bool = False,
) -> tuple[dict[str, float], Any]:
    """Return the mean of each loss over ``num_steps`` global batches, and collected data.

    Args:
        num_microbatches: number of micro-batches in a step, unless ``source`` has its own number.
        collects: whether to also collect data for `Task.process_non_loss_data`.

    Returns:
        The losses by name ({} before the last pipeline stage), and collected data ([] if none).
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
                reports = runner.evaluate(batches, count)
                for key, entry in reduce_reports(reports, runner.context).items():
                    totals[key] = totals[key] + entry if key in totals else entry
            if collects and runner.task.non_loss_data is not None:
                collected = runner.task.non_loss_data(runner.chunks)
            elif collects and num_steps > 0:
                collected = runner.evaluate(batches, count, collect_non_loss_data=True)
    finally:
        for chunk in runner.chunks:
            chunk.train()
    return means_of(totals), collected
