"""The numbers of samples in a step and in a run, and the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_ext.checkpoint.publish import BestCheckpoint
from megatron_ext.config.training import TrainingConfig, parse_batch_schedule


class BatchSize:
    """The batch size of the current step: constant, or changing with the consumed samples.

    Attributes:
        samples_per_microbatch: the micro-batch size times the data-parallel size.
        num_microbatches: the micro-batches of the current step on each data-parallel rank.
    """

    num_microbatches = 0

    def __init__(
        self, training: TrainingConfig, seq_length: int | None, data_parallel_size: int
    ) -> None:
        micro_batch_size, self._final = training.batch_sizes
        self.samples_per_microbatch = micro_batch_size * data_parallel_size
        self._training, self._replicas = training, data_parallel_size
        self._ramp, self._ramp_end = training.rampup_batch_size, -1
        self._steps: list[tuple[int, int]] = []
        if training.step_batch_size_schedule is not None:
            steps = parse_batch_schedule(training.step_batch_size_schedule)
            self._steps = [(tokens // (seq_length or 1), batch) for tokens, batch in steps]
            self._ramp_end = self._steps[-1][0] - 1
        elif self._ramp is not None:
            self._ramp_end = self._ramp[2]
        self.update(0)

    def update(self, consumed_samples: int) -> bool:
        """Set the batch size, and return whether the number of micro-batches has changed."""
        before = self.num_microbatches
        number = self._training.microbatches(self._size_at(consumed_samples), self._replicas)
        assert number is not None, "the flags were checked before"
        self.num_microbatches = number
        return number != before

    def _size_at(self, consumed_samples: int) -> int:
        """Return the batch size that the flags ask for after this number of samples."""
        if self._steps:
            return max(step for step in self._steps if step[0] <= consumed_samples)[1]
        if self._ramp is None or consumed_samples > self._ramp_end:
            return self._final
        start, increment, samples = self._ramp
        # A float, as in Megatron-LM, which decides the step at which a size begins.
        each = samples / ((self._final - start) // increment)
        return start + (int(consumed_samples / each) * increment if each else 0)

    def is_final(self, consumed_samples: int) -> bool:
        """Return whether the batch size has reached its last value."""
        return consumed_samples > self._ramp_end

    @property
    def global_batch_size(self) -> int:
        """Return the samples of the current step on all ranks."""
        return self.num_microbatches * self.samples_per_microbatch


def number_of_iterations(
    training: TrainingConfig, seq_length: int | None, data_parallel_size: int
) -> int:
    """Return the number of training iterations, computed from ``--train-samples`` if given."""
    if training.train_samples is None:
        return training.train_iters or 0
    size = BatchSize(training, seq_length, data_parallel_size)
    iterations = consumed = 0
    while not size.is_final(consumed):
        if consumed + size.global_batch_size > training.train_samples:
            return iterations
        consumed += size.global_batch_size
        iterations += 1
        size.update(consumed)
    return iterations + (training.train_samples - consumed) // size.global_batch_size


def split_sizes(training: TrainingConfig, num_iterations: int) -> list[int | None]:
    """Return the numbers of samples to draw from train, valid and test; None means one epoch."""
    batch = training.global_batch_size
    assert batch is not None
    train = training.train_samples or num_iterations * batch
    test = training.eval_iters * batch
    rounds = 1 if training.skip_train else num_iterations // training.eval_interval + 1
    return [train, None if training.full_validation else rounds * test, test]


@dataclass(frozen=True)
class StepStats:
    """Samples, tokens (positions) and floating-point operations of a step on all ranks."""

    samples: int
    tokens: int
    flops: float


@dataclass
class Progress:
    """Counters of a run on all ranks together, which are saved with every checkpoint.

    Attributes:
        iteration: training steps done, skipped ones included.
        epoch: passes through the training data; None where it has no epochs.
        skipped_iterations: steps without an update because of a non-finite gradient.
        nan_iterations: skipped steps whose loss was not finite either.
        floating_point_operations: work of the model so far, forward and backward.
        best_checkpoints: checkpoints to keep (``--keep-best``), lowest validation loss first.
        lowest_loss: validation loss that early stopping compares with; None before the first.
        stale_evaluations: evaluations since the lowest loss (``--early-stop-patience``).
        data_order: the mixtures of the run, from which the order of its samples follows; None for
            data whose order is that of the dataset.
        data_plan: digest of all that decides each step's samples; empty for data without a digest.
        recent_values: loss and gradient norm of the last steps, for ``--on-spike``; else empty.
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
    recent_values: list[list[float]] = field(default_factory=list)
    data_order: dict[str, Any] | None = None

    def advance(self, stats: StepStats, steps_per_epoch: int | None) -> None:
        """Count a training step, even if its update was skipped."""
        self.iteration += 1
        self.consumed_train_samples += stats.samples
        self.floating_point_operations += stats.flops
        if steps_per_epoch is not None:
            self.epoch = self.iteration / steps_per_epoch

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Build counters from `to_dict`'s values; ignore unknown keys, as newer versions add."""
        names = {field.name for field in fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        best = [BestCheckpoint(**entry) for entry in known.pop("best_checkpoints", [])]
        return cls(**known, best_checkpoints=best)
