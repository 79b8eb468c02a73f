"""Samplers: which samples each data-parallel rank reads in each micro-batch of a run.

`SequentialSampler` and `RandomSampler` follow Megatron-LM's order. Datasets whose samples determine
the number of micro-batches of each step have a sampler of their own (`data.step_plan`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from megatron_ext.errors import DataError

Ints = NDArray[np.int64]


@dataclass(eq=False)
class Announced(Sampler[list[int]]):
    """Yields the batches of a sampler, so late that the next ``ahead`` batches are known.

    ``expect`` is called with the sample indices of each batch as soon as the batch is known, so
    that the dataset can start to fetch them.
    """

    batches: Iterable[list[int]]
    expect: Callable[[Sequence[int]], None]
    ahead: int = 4

    def __iter__(self) -> Iterator[list[int]]:
        waiting: deque[list[int]] = deque()
        for batch in self.batches:
            waiting.append(batch)
            self.expect(batch)
            if len(waiting) > self.ahead:
                yield waiting.popleft()
        yield from waiting


@dataclass(eq=False)
class SequentialSampler(Sampler[list[int]]):
    """Yields micro-batches in the order of the (shuffled) dataset: ``--dataloader-type single``.

    ``consumed_samples`` counts the samples used by all data-parallel ranks together.

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
                f"{self.total_samples}; give more data, lower `--train-iters`, or, if this is the "
                "validation split, keep the checkpoint's `--eval-interval` and `--eval-iters`."
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
    """Yields micro-batches without end, each epoch in a new order: ``--dataloader-type cyclic``.

    With ``data_sharding`` each data-parallel rank shuffles its own contiguous shard; otherwise the
    ranks share one permutation and each takes every ``dp_size``-th sample. The seed of a
    permutation is the index of the epoch, as in Megatron-LM.

    Raises:
        DataError: the dataset is too small for one micro-batch on every rank.
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
        """Return the dataset indices of the samples that this rank has left in an epoch, in order.

        ``offset`` is the number of the epoch's samples that all ranks together have used.
        """
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
    """Return the permutation ``[length]`` that ``seeds`` determine in every version of numpy."""
    return np.argsort(np.random.PCG64(seeds).random_raw(length), kind="stable").astype(np.int64)
