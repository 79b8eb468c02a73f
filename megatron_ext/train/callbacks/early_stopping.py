"""What the validation loss decides: the best checkpoints, and an early stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_ext.checkpoint.publish import BestCheckpoint, with_candidate
from megatron_ext.errors import DataError

if TYPE_CHECKING:
    from megatron_ext.train.run import Run


@dataclass(frozen=True)
class Verdict:
    """What follows from an evaluation, the same on every rank.

    Attributes:
        save: the weights are among the best and are to be saved.
        stop: why the run ends, None if it goes on.
        outdone: iterations of checkpoints that nothing keeps any more.
    """

    save: bool = False
    stop: str | None = None
    outdone: tuple[int, ...] = ()


def mean_validation_loss(losses: Sequence[Mapping[str, float]]) -> float:
    """The first loss that each validation set reports (``lm loss``), averaged over the sets.

    Returns:
        The mean; NaN where there is nothing to average, as on all pipeline stages but the last.
    """
    first = [next(iter(each.values()), math.nan) for each in losses]
    return math.fsum(first) / len(first) if first else math.nan


def check_watched(run: Run) -> None:
    """Refuse to watch a validation loss that nobody computes; all ranks call this together.

    Raises:
        DataError: there is no validation split.
    """
    watching = {
        "--keep-best": run.config.checkpoint.keep_best,
        "--early-stop-patience": run.config.training.early_stop_patience,
    }
    for name, value in watching.items():
        if value is not None and not run.valid_sources:
            raise DataError(
                f"`{name}` ({value}) needs a validation split, but this run has none; give one by "
                "`--split` or `--valid-data-path`, or leave the flag out."
            )


def judge(run: Run, losses: Sequence[Mapping[str, float]], *, regular: bool) -> Verdict:
    """Note the losses of an evaluation in the run's progress; all ranks call this together.

    Args:
        run: the run.
        losses: of each validation set, empty but on the last pipeline stage.
        regular: the checkpoint of this iteration is saved for another reason too.
    """
    config = run.config
    if config.checkpoint.keep_best is None and config.training.early_stop_patience is None:
        return Verdict()
    loss = _agreed(run, mean_validation_loss(losses))
    stop = _early_stop(run, loss)
    save, outdone = _rank(run, loss, regular=regular or stop is not None)
    return Verdict(save, stop, outdone)


def exhausted(run: Run) -> str | None:
    """Why a run must not go on: the loss has not fallen for too long; None if it has."""
    patience, progress = run.config.training.early_stop_patience, run.progress
    if patience is None or progress.stale_evaluations < patience:
        return None
    delta = run.config.training.early_stop_min_delta
    least = f" by more than {delta:g}" if delta else ""
    return (
        f"early stop: the validation loss has not fallen below {progress.lowest_loss:.6E}{least} "
        f"in {progress.stale_evaluations} evaluations"
    )


def _agreed(run: Run, loss: float) -> float:
    """The loss of the reporting rank, on every rank."""
    value = torch.tensor(loss, dtype=torch.float64, device=run.device)
    torch.distributed.broadcast(value, src=run.context.reporting_rank)
    return float(value)


def _early_stop(run: Run, loss: float) -> str | None:
    """Count an evaluation; a loss that is not finite is no improvement."""
    progress, delta = run.progress, run.config.training.early_stop_min_delta
    if progress.lowest_loss is None:
        fell = math.isfinite(loss)
    else:
        fell = loss < progress.lowest_loss - delta
    progress.stale_evaluations = 0 if fell else progress.stale_evaluations + 1
    if fell:
        progress.lowest_loss = loss
    return exhausted(run)


def _rank(run: Run, loss: float, *, regular: bool) -> tuple[bool, tuple[int, ...]]:
    """Place this iteration among the best; returns whether it is, and whom nothing keeps."""
    config, progress = run.config.checkpoint, run.progress
    if config.keep_best is None or not math.isfinite(loss):
        return False, ()
    new = BestCheckpoint(progress.iteration, loss, regular)
    progress.best_checkpoints, dropped = with_candidate(
        progress.best_checkpoints, new, config.keep_best
    )
    if new not in progress.best_checkpoints:
        return False, ()
    if progress.best_checkpoints[0] is new:
        run.reporters.say(f"best validation loss so far at iteration {new.iteration}: {loss:.6E}")
    # With --save-retain-interval each checkpoint goes when the next is saved; its turn has passed.
    unkept = [e for e in dropped if not e.regular or config.save_retain_interval is not None]
    return True, tuple(entry.iteration for entry in unkept)
