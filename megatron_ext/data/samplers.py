"""Samplers: which samples each data-parallel rank reads in each micro-batch of a run.

`SequentialSampler` and `RandomSampler` follow Megatron-LM's order, `StepSampler` a `StepPlan`,
which a data set brings where its samples decide how many micro-batches a step has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from megatron_ext.errors import DataError

Ints = NDArray[np.int64]
Row = list[int]
"""Numbers of the samples that share a row; an empty row holds padding only."""


@dataclass(eq=False)
class SequentialSampler(Sampler[list[int]]):
    """Micro-batches in the order of the (already shuffled) dataset, ``--dataloader-type single``.

    All data-parallel ranks together have consumed ``consumed_samples``.

    Raises:
        DataError: no sample is left.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        if self.consumed_samples >= self.total_samples:
            raise DataError(
                f"The run has consumed {self.consumed_samples} samples, but the dataset holds "
                f"{self.total_samples}; give more data, or lower `--train-iters`."
            )

    def __len__(self) -> int:
        """Return the number of micro-batches left for this rank."""
        left = self.total_samples - self.consumed_samples
        return left // (self.micro_batch_size * self.dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(len(self)):
            own = index * self.dp_size + self.dp_rank
            begin = self.consumed_samples + own * self.micro_batch_size
            yield list(range(begin, begin + self.micro_batch_size))


@dataclass(eq=False)
class RandomSampler(Sampler[list[int]]):
    """A new permutation for every epoch, ``--dataloader-type cyclic``; never ends.

    With ``data_sharding`` each rank shuffles its own contiguous shard, otherwise all ranks deal
    from one permutation. The seed of a permutation is the number of the epoch, as in Megatron-LM.

    Raises:
        DataError: the dataset is smaller than one micro-batch on all ranks.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    data_sharding: bool

    def __post_init__(self) -> None:
        self._stride = self.micro_batch_size * self.dp_size
        if self.total_samples < self._stride:
            raise DataError(
                f"The dataset holds {self.total_samples} samples, but one micro-batch on all "
                f"data-parallel ranks takes {self._stride}; give more data or fewer ranks."
            )

    def _epoch_order(self, epoch: int, offset: int) -> list[int]:
        """Return what this rank has left in an epoch after ``offset`` samples on all ranks."""
        unit = self._stride if self.data_sharding else self.micro_batch_size
        size = self.total_samples // unit * self.micro_batch_size
        order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
        if self.data_sharding:
            return (order[offset // self.dp_size :] + self.dp_rank * size).tolist()
        return order[offset:][self.dp_rank :: self.dp_size].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch = self.total_samples - self.total_samples % self._stride
        consumed = self.consumed_samples
        while True:
            epoch, offset = divmod(consumed, per_epoch)
            order = self._epoch_order(epoch, offset)
            for index in range((per_epoch - offset) // self._stride):
                begin = index * self.micro_batch_size
                yield order[begin : begin + self.micro_batch_size]
            consumed = (epoch + 1) * per_epoch


def shuffled(length: int, *seeds: int) -> Ints:
    """Return a permutation ``[length]`` made of raw generator bits, which numpy never changes."""
    return np.argsort(np.random.PCG64(seeds).random_raw(length), kind="stable").astype(np.int64)


class Epochs(Protocol):
    """The rows of each rank in each step of each epoch, which all ranks find by themselves."""

    steps_per_epoch: int

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        """Return the rows ``[rank][row]`` of a step, counted within its epoch."""
        ...


class StepPlan:
    """The micro-batches of a run, step by step through its epochs.

    Args:
        micro_batch_size: rows of one micro-batch.
        identity: a digest of all that decides which samples a step sees; a layout does not.
        packs_documents: a row may hold several documents, each with positions from 0, and neither
            attention nor multi-token prediction crosses from one into the next.
    """

    def __init__(
        self,
        epochs: Epochs,
        micro_batch_size: int,
        identity: str = "",
        *,
        packs_documents: bool = False,
    ) -> None:
        self.identity, self.packs_documents = identity, packs_documents
        self._epochs, self._micro_batch_size = epochs, micro_batch_size
        self._last: tuple[int, list[list[Row]]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps in an epoch."""
        return self._epochs.steps_per_epoch

    def _rows(self, step: int) -> list[list[Row]]:
        if self._last[0] != step:
            self._last = step, self._epochs.step(*divmod(step, self.steps_per_epoch))
        return self._last[1]

    def num_microbatches(self, step: int) -> int:
        """Return the micro-batches of each rank in a step, counted from the start of the run."""
        return len(self._rows(step)[0]) // self._micro_batch_size

    def microbatches(self, step: int, rank: int) -> list[list[tuple[int, ...]]]:
        """Return the sample numbers ``[micro-batch][row]`` of one data-parallel rank."""
        rows = [tuple(row) for row in self._rows(step)[rank]]
        size = self._micro_batch_size
        return [rows[i : i + size] for i in range(0, len(rows), size)]


@dataclass(eq=False)
class StepSampler(Sampler[list[tuple[int, ...]]]):
    """The micro-batches that a plan gives one data-parallel rank, from a step on; never ends."""

    plan: StepPlan
    dp_rank: int
    first_step: int

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        for step in count(self.first_step):
            yield from self.plan.microbatches(step, self.dp_rank)
