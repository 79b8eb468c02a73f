"""Samplers against orders that are written down by hand."""

from __future__ import annotations

from itertools import islice

import pytest

from megatron_ext.data.samplers import RandomSampler, SequentialSampler
from megatron_ext.errors import DataError


def test_sequential_gives_each_rank_its_share_of_every_micro_batch() -> None:
    ranks = [list(SequentialSampler(9, 0, 2, rank, 2)) for rank in range(2)]
    assert ranks == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_sequential_resumes_after_consumed_samples() -> None:
    whole = list(SequentialSampler(24, 0, 2, 1, 3))
    assert list(SequentialSampler(24, 12, 2, 1, 3)) == whole[2:]
    assert len(SequentialSampler(24, 12, 2, 1, 3)) == 2


def test_sequential_refuses_an_exhausted_dataset() -> None:
    with pytest.raises(DataError, match=r"has consumed 8 samples, but the dataset holds 8"):
        SequentialSampler(8, 8, 2, 0, 2)


@pytest.mark.parametrize("sharded", [True, False])
def test_random_covers_each_epoch_once_and_resumes(sharded: bool) -> None:
    def micro_batches(consumed: int, count: int) -> list[list[list[int]]]:
        return [
            list(islice(RandomSampler(12, consumed, 2, r, 3, data_sharding=sharded), count))
            for r in range(3)
        ]

    four = micro_batches(0, 4)  # two epochs of two micro-batches on each of three ranks
    for epoch in (0, 1):
        seen = [i for rank in four for batch in rank[2 * epoch : 2 * epoch + 2] for i in batch]
        assert sorted(seen) == list(range(12))
    assert [rank[:2] for rank in four] != [rank[2:] for rank in four]
    assert micro_batches(6, 3) == [rank[1:] for rank in four]


def test_random_refuses_a_dataset_below_one_micro_batch() -> None:
    with pytest.raises(DataError, match=r"holds 5 samples, but one micro-batch .* takes 6"):
        RandomSampler(5, 0, 2, 0, 3, data_sharding=True)
