"""The number of samples in each split of the data, and the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from megatron_ext.config.batch_size import number_of_iterations, samples_after
from megatron_ext.config.training import TrainingConfig

if TYPE_CHECKING:
    from megatron_ext.checkpoint.best import BestCheckpoint


def split_sizes(
    training: TrainingConfig, seq_length: int | None, data_parallel_size: int
) -> list[int | None]:
    """Return how many samples a run draws from the train, validation and test splits, in order.

    The validation number is None with ``--full-validation``: then each evaluation reads its split
    once from beginning to end.
    """
    _, batch = training.batch_sizes
    iterations = number_of_iterations(training, seq_length, data_parallel_size)
    train = training.train_samples
    if train is None:
        train = samples_after(iterations, training, seq_length, data_parallel_size)
    test = training.eval_iters * batch
    rounds = 1 if training.skip_train else iterations // training.eval_interval + 1
    return [train, None if training.full_validation else rounds * test, test]


@dataclass(frozen=True)
class StepStats:
    """Samples, tokens (padding included) and floating-point operations of a step on all ranks."""

    samples: int
    tokens: int
    flops: float


@dataclass
class Progress:
    """Counters of a run, over all ranks, which are saved with every checkpoint.

    Attributes:
        iteration: number of training steps, including skipped ones.
        epoch: passes through the training data; None if the data has no epochs.
        skipped_iterations: steps without an update because of a non-finite gradient.
        nan_iterations: skipped steps whose loss was not finite either.
        floating_point_operations: work of the model so far, forward and backward.
        best_checkpoints: checkpoints to keep (``--keep-best``), lowest validation loss first.
        lowest_loss: validation loss that early stopping compares with; None before the first.
        stale_evaluations: evaluations since the lowest loss (``--early-stop-patience``).
        data_order: the order of the run's samples with ``--data-order direct``, as JSON values;
            None with other orders.
        data_plan: digest of everything that determines the samples of each step; empty for data
            without a digest.
        average_updates: updates of the averaged weights since they were a copy of the weights.
            Skipped steps count, since the host may not yet know that a GPU has skipped a step.
        average_start: the share of that copy in the averaged weights: 1 at first, and multiplied
            by the decay with each update; None if unknown.
        recent_values: loss and gradient norm of the latest steps for ``--on-spike``; else empty.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    epoch: float | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    floating_point_operations: float = 0.0
    best_checkpoints: list[BestCheckpoint] = field(default_factory=list)
    lowest_loss: float | None = None
    stale_evaluations: int = 0
    data_plan: str = ""
    average_updates: int = 0
    average_start: float | None = 1.0
    recent_values: list[list[float]] = field(default_factory=list)
    data_order: dict[str, Any] | None = None

    def advance(self, stats: StepStats, steps_per_epoch: int | None) -> None:
        """Count a step, even a skipped one; ``steps_per_epoch`` is None for data without epochs."""
        self.iteration += 1
        self.consumed_train_samples += stats.samples
        self.floating_point_operations += stats.flops
        if steps_per_epoch is not None:
            self.epoch = self.iteration / steps_per_epoch

    def count_average(self, decay: float) -> None:
        """Count an update of the averaged weights, which multiplied the old ones by ``decay``."""
        self.average_updates += 1
        if self.average_start is not None:
            self.average_start *= decay

    @property
    def average_note(self) -> str | None:
        """Return a clause on the share that the first weights still have in the averaged weights.

        Return None if the share is below 0.1% or unknown, or if no update has been counted.
        """
        share = self.average_start
        if not self.average_updates or share is None or share < 1e-3:
            return None
        return (
            f"{share:.1%} of the averaged weights is still the weights that they started from, "
            f"{self.average_updates} update(s) before"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Build a Progress from a result of `to_dict`; ignore unknown keys of newer versions.

        Older versions did not count the updates of the averaged weights. In ``values`` of theirs,
        each training step is taken as one update, and ``average_start`` is unknown.
        """
        from megatron_ext.checkpoint.best import BestCheckpoint

        names = {field.name for field in fields(cls)}
        counters = {name: value for name, value in values.items() if name in names}
        if "average_updates" not in counters and counters.get("iteration"):
            counters |= {"average_updates": counters["iteration"], "average_start": None}
        best = [BestCheckpoint(**entry) for entry in counters.pop("best_checkpoints", [])]
        return cls(**counters, best_checkpoints=best)
