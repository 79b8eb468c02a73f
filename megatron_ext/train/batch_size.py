"""The numbers of samples in a step and in a run, and the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron.core.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    RampupBatchsizeNumMicroBatchesCalculator,
)

from megatron_ext.checkpoint.publish import BestCheckpoint
from megatron_ext.config.training import TrainingConfig, parse_batch_schedule
from megatron_ext.errors import ConfigError


class _Steps:
    """Batch sizes of ``--step-batch-size-schedule``, each used from a number of samples on.

    megatron-core 0.17 has a class with the same attributes and methods, which can replace this one.
    """

    def __init__(self, steps: list[tuple[int, int]], seq_length: int, multiple: int) -> None:
        self.steps = [(tokens // seq_length, batch) for tokens, batch in steps]
        self._multiple = multiple
        self.update(0, consistency_check=False)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Set the batch size to the latest one that begins at or before ``consumed_samples``."""
        reached = [step for step in self.steps if step[0] <= consumed_samples]
        self.current_running_global_batch_size = max(reached)[1]
        self.num_micro_batches = self.current_running_global_batch_size // self._multiple


class BatchSize:
    """The batch size of the current step: constant, or changing with the consumed samples.

    ``samples_per_microbatch`` is the micro-batch size times the data-parallel size.
    """

    def __init__(
        self, training: TrainingConfig, seq_length: int | None, data_parallel_size: int
    ) -> None:
        micro_batch_size, global_batch_size = training.batch_sizes
        decreases = training.decrease_batch_size_if_needed
        # -1: no rank logs, since the iteration line shows the batch size.
        common = (global_batch_size, micro_batch_size, data_parallel_size, decreases, -1)
        self.samples_per_microbatch = micro_batch_size * data_parallel_size
        self._calculator: (
            ConstantNumMicroBatchesCalculator | RampupBatchsizeNumMicroBatchesCalculator | _Steps
        )
        self._flag, self._ramp_end = "--rampup-batch-size", -1
        if training.step_batch_size_schedule is not None:
            self._flag = "--step-batch-size-schedule"
            steps = parse_batch_schedule(training.step_batch_size_schedule)
            self._calculator = _Steps(steps, seq_length or 1, self.samples_per_microbatch)
            self._ramp_end = self._calculator.steps[-1][0] - 1
        elif training.rampup_batch_size is None:
            self._calculator = ConstantNumMicroBatchesCalculator(*common)
        else:
            start, increment, self._ramp_end = training.rampup_batch_size
            self._calculator = RampupBatchsizeNumMicroBatchesCalculator(
                *common, start, increment, self._ramp_end
            )

    def update(self, consumed_samples: int) -> bool:
        """Set the batch size, and return whether the number of micro-batches has changed.

        A batch size that is not divisible by ``samples_per_microbatch`` raises a ConfigError.
        """
        before = self.num_microbatches
        self._calculator.update(consumed_samples, consistency_check=False)
        size = self._calculator.current_running_global_batch_size
        if size % self.samples_per_microbatch:
            raise ConfigError(
                f"`{self._flag}` reaches the global batch size {size}, which must be "
                "divisible by micro-batch size × data-parallel size "
                f"({self.samples_per_microbatch}); change the start or increment, or give "
                "`--decrease-batch-size-if-needed`."
            )
        return self.num_microbatches != before

    def is_final(self, consumed_samples: int) -> bool:
        """Return whether the batch size has reached its last value."""
        return consumed_samples > self._ramp_end

    @property
    def num_microbatches(self) -> int:
        """Return the current number of micro-batches of a step on each data-parallel rank."""
        return int(self._calculator.num_micro_batches)

    @property
    def global_batch_size(self) -> int:
        return int(self._calculator.current_running_global_batch_size)


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
        data_plan: digest of all that decides each step's samples; empty for data without a digest.
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
