"""Batch samplers that resume from a number of consumed samples.

Both give each data-parallel rank its share of every micro-batch, in Megatron-LM's order, so that a
run continued here sees the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from megatron_ext.errors import DataError


class SequentialSampler(Sampler[list[int]]):
    """Micro-batches in the order of the (already shuffled) dataset, ``--dataloader-type single``.

    Args:
        total_samples: length of the dataset.
        consumed_samples: samples already used by all data-parallel ranks together.
        micro_batch_size: samples of one micro-batch on one rank.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.

    Raises:
        DataError: no sample is left.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        if consumed_samples >= total_samples:
            raise DataError(
                f"The run has consumed {consumed_samples} samples, but the dataset holds "
                f"{total_samples}; give more data, or lower `--train-iters`."
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size

    def __len__(self) -> int:
        """Number of micro-batches left for this rank."""
        return (self.total_samples - self.consumed_samples) // (
            self.micro_batch_size * self.dp_size
        )

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.micro_batch_size * self.dp_size
        for index in range(len(self)):
            begin = self.consumed_samples + index * stride + self.dp_rank * self.micro_batch_size
            yield list(range(begin, begin + self.micro_batch_size))


class RandomSampler(Sampler[list[int]]):
    """A new permutation for every epoch, ``--dataloader-type cyclic``; never ends.

    With ``data_sharding`` each rank shuffles its own contiguous shard, otherwise all ranks deal
    from one permutation. The seed of a permutation is the number of the epoch, as in Megatron-LM.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        *,
        data_sharding: bool,
    ) -> None:
        self.stride = micro_batch_size * dp_size
        if total_samples < self.stride:
            raise DataError(
                f"The dataset holds {total_samples} samples, but one micro-batch on all "
                f"data-parallel ranks takes {self.stride}; give more data or fewer ranks."
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.data_sharding = data_sharding

    def _epoch_order(self, epoch: int, offset: int) -> list[int]:
        """Indices that this rank has left in an epoch, after ``offset`` samples on all ranks."""
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            size = (self.total_samples // self.stride) * self.micro_batch_size
            order = torch.randperm(size, generator=generator)[offset // self.dp_size :]
            return (order + self.dp_rank * size).tolist()
        size = (self.total_samples // self.micro_batch_size) * self.micro_batch_size
        order = torch.randperm(size, generator=generator)[offset:]
        return order[self.dp_rank :: self.dp_size].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch = self.total_samples - self.total_samples % self.stride
        consumed = self.consumed_samples
        while True:
            epoch, offset = divmod(consumed, per_epoch)
            order = self._epoch_order(epoch, offset)
            for index in range((per_epoch - offset) // self.stride):
                begin = index * self.micro_batch_size
                yield order[begin : begin + self.micro_batch_size]
            consumed = (epoch + 1) * per_epoch
