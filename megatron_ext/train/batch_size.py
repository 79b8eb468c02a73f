"""Micro-batches per step: constant, or growing with the consumed samples.

How far a run has come; saved with every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from megatron.core.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    RampupBatchsizeNumMicroBatchesCalculator,
)

from megatron_ext.checkpoint.publish import BestCheckpoint
from megatron_ext.config.training import parse_batch_schedule
from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


class _Steps:
    """A list of batch sizes, each from a number of consumed tokens on.

    megatron-core has this calculator from 0.17 on; its names are used, so that it can take over.
    """

    def __init__(self, steps: list[tuple[int, int]], seq_length: int, multiple: int) -> None:
        self.steps = [(tokens // seq_length, batch) for tokens, batch in steps]
        self._multiple = multiple
        self.update(0, consistency_check=False)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Take the last step whose start has been reached."""
        self.current_running_global_batch_size = max(
            step for step in self.steps if step[0] <= consumed_samples
        )[1]
        self.num_micro_batches = self.current_running_global_batch_size // self._multiple


class BatchSize:
    """The batch size of the current step.

    Attributes:
        num_microbatches: micro-batches of each data-parallel rank.
        global_batch_size: samples of the step on all ranks.
    """

    def __init__(self, config: RunConfig, data_parallel_size: int) -> None:
        training = config.training
        micro_batch_size, global_batch_size = training.batch_sizes
        common = (
            global_batch_size,
            micro_batch_size,
            data_parallel_size,
            training.decrease_batch_size_if_needed,
            -1,  # no rank logs: the iteration line shows the batch size
        )
        by_steps = training.step_batch_size_schedule is not None
        self._flag = "--step-batch-size-schedule" if by_steps else "--rampup-batch-size"
        self._multiple = micro_batch_size * data_parallel_size
        self._calculator: (
            ConstantNumMicroBatchesCalculator | RampupBatchsizeNumMicroBatchesCalculator | _Steps
        )
        self._ramp_end = -1
        if training.step_batch_size_schedule is not None:
            steps = parse_batch_schedule(training.step_batch_size_schedule)
            self._calculator = _Steps(steps, config.model.seq_length or 1, self._multiple)
            self._ramp_end = self._calculator.steps[-1][0] - 1
        elif training.rampup_batch_size is None:
            self._calculator = ConstantNumMicroBatchesCalculator(*common)
        else:
            start, increment, samples = (int(x) for x in training.rampup_batch_size)
            self._ramp_end = samples
            self._calculator = RampupBatchsizeNumMicroBatchesCalculator(
                *common, start, increment, samples
            )

    def update(self, consumed_samples: int) -> bool:
        """Follow the ramp-up; returns whether the number of micro-batches changed.

        Raises:
            ConfigError: a batch size of the ramp-up that the ranks cannot share out.
        """
        before = self.num_microbatches
        self._calculator.update(consumed_samples, consistency_check=False)
        size = self._calculator.current_running_global_batch_size
        if size % self._multiple:
            raise ConfigError(
                f"`{self._flag}` reaches the global batch size {size}, which must be "
                "divisible by micro-batch size × data-parallel size "
                f"({self._multiple}); change the start or increment, or give "
                "`--decrease-batch-size-if-needed`."
            )
        return self.num_microbatches != before

    def is_final(self, consumed_samples: int) -> bool:
        """Whether the batch size changes no more."""
        return consumed_samples > self._ramp_end

    @property
    def num_microbatches(self) -> int:
        return int(self._calculator.num_micro_batches)

    @property
    def global_batch_size(self) -> int:
        return int(self._calculator.current_running_global_batch_size)


def number_of_iterations(config: RunConfig, data_parallel_size: int) -> int:
    """Training iterations, also where the length is given in samples."""
    training = config.training
    if training.train_samples is None:
        return training.train_iters or 0
    size = BatchSize(config, data_parallel_size)
    iterations, consumed = 0, 0
    while not size.is_final(consumed):
        if consumed + size.global_batch_size > training.train_samples:
            return iterations
        consumed += size.global_batch_size
        iterations += 1
        size.update(consumed)
    return iterations + (training.train_samples - consumed) // size.global_batch_size


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        iteration: training steps done, skipped ones included.
        consumed_train_samples: training samples used by all ranks together.
        consumed_valid_samples: validation samples used likewise.
        epoch: passes through the training data so far, with the part of the last one; None where
            the data has no epochs.
        skipped_iterations: steps without an update because of a non-finite gradient.
        nan_iterations: skipped steps whose loss was not finite either.
        floating_point_operations: of the model, forward and backward, on all ranks.
        best_checkpoints: of the lowest validation loss, lowest first (``--keep-best``).
        lowest_loss: validation loss that an early stop compares with; None before the first.
        stale_evaluations: evaluations since then (``--early-stop-patience``).
        data_plan: identity of the plan of the training data, where it has one.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Read back what `to_dict` gave; counters of newer versions are left out."""
        names = {field.name for field in fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        best = [BestCheckpoint(**entry) for entry in known.pop("best_checkpoints", [])]
        return cls(**known, best_checkpoints=best)
