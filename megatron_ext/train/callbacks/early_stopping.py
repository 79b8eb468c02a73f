"""The best checkpoints (``--keep-best``) and early stopping (``--early-stop-patience``)."""

from __future__ import annotations

import math

import torch

from megatron_ext.checkpoint.publish import BestCheckpoint, with_candidate
from megatron_ext.errors import DataError
from megatron_ext.train.callbacks.callback import Callback, Decision, Losses
from megatron_ext.train.callbacks.stopping import EXIT_INTERVAL
from megatron_ext.train.run import Run


class EarlyStopping(Callback):
    """Keeps the checkpoints of the lowest validation losses, and ends a run that learns no more.

    Raises:
        DataError: a flag needs the validation loss, but there is no validation split; raised by
            the constructor, on all ranks.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._losses: Losses | None = None
        needs_validation = {
            "--keep-best": run.config.checkpoint.keep_best,
            "--early-stop-patience": run.config.training.early_stop_patience,
        }
        for name, value in needs_validation.items():
            if value is not None and not run.valid_sources:
                raise DataError(
                    f"`{name}` ({value}) needs a validation split, but this run has none; give "
                    "one by `--split` or `--valid-data-path`, or leave the flag out."
                )

    @property
    def exhausted(self) -> str | None:
        """Return why the run must not go on: its loss has not fallen for too long; else None."""
        patience, progress = self.run.config.training.early_stop_patience, self.run.progress
        if patience is None or progress.stale_evaluations < patience:
            return None
        delta = self.run.config.training.early_stop_min_delta
        least = f" by more than {delta:g}" if delta else ""
        return (
            "early stop: the validation loss has not fallen below "
            f"{progress.lowest_loss:.6E}{least} in {progress.stale_evaluations} evaluations"
        )

    def after_evaluation(self, losses: Losses) -> None:
        """Keep the losses until it is known whether this iteration is saved anyway."""
        self._losses = losses

    def decide(self, decision: Decision) -> None:
        """Save a checkpoint that is among the best, and end a run that is exhausted."""
        losses, self._losses = self._losses, None
        if losses is not None:
            self.judge(losses, decision)

    def judge(self, losses: Losses, decision: Decision) -> bool:
        """Note the losses of an evaluation in the run's progress; all ranks call this together.

        Args:
            losses: losses of each validation set.
            decision: says whether this iteration is saved for another reason, and is completed.

        Returns:
            Whether the weights are among the best.
        """
        config, progress = self.run.config, self.run.progress
        if config.checkpoint.keep_best is None and config.training.early_stop_patience is None:
            return False
        loss = self._reported(mean_validation_loss(losses))
        self._count(loss)
        exhausted = self.exhausted
        if exhausted and decision.stop in (None, EXIT_INTERVAL):
            decision.stop = exhausted
        ends = progress.iteration == self.run.num_iterations
        regular = ends or decision.save or decision.stop is not None
        is_best = self._rank(loss, decision, regular=regular)
        decision.save |= is_best
        return is_best

    def _reported(self, loss: float) -> float:
        """Return the loss of the reporting rank on every rank."""
        value = torch.tensor(loss, dtype=torch.float64, device=self.run.device)
        torch.distributed.broadcast(value, src=self.run.context.reporting_rank)
        return float(value)

    def _count(self, loss: float) -> None:
        """Count evaluations without improvement; a loss that is not finite is none."""
        progress, delta = self.run.progress, self.run.config.training.early_stop_min_delta
        if progress.lowest_loss is None:
            fell = math.isfinite(loss)
        else:
            fell = loss < progress.lowest_loss - delta
        progress.stale_evaluations = 0 if fell else progress.stale_evaluations + 1
        if fell:
            progress.lowest_loss = loss

    def _rank(self, loss: float, decision: Decision, *, regular: bool) -> bool:
        """Place this iteration among the best, and note which checkpoints it supersedes."""
        config, progress = self.run.config.checkpoint, self.run.progress
        if config.keep_best is None or not math.isfinite(loss):
            return False
        new = BestCheckpoint(progress.iteration, loss, regular)
        progress.best_checkpoints, dropped = with_candidate(
            progress.best_checkpoints, new, config.keep_best
        )
        if new not in progress.best_checkpoints:
            return False
        if progress.best_checkpoints[0] is new:
            text = f"best validation loss so far at iteration {new.iteration}: {loss:.6E}"
            self.run.reporters.say(text)
        # With --save-retain-interval each checkpoint goes when the next is saved; its turn is past.
        retains = config.save_retain_interval is not None
        superseded = [entry for entry in dropped if retains or not entry.regular]
        decision.superseded = tuple(entry.iteration for entry in superseded)
        return True


def mean_validation_loss(losses: Losses) -> float:
    """Return the mean over the validation sets of the first loss that each reports (``lm loss``).

    The mean is NaN where there is nothing to average, as on all pipeline stages but the last.
    """
    first = [next(iter(each.values()), math.nan) for each in losses]
    return math.fsum(first) / len(first) if first else math.nan
