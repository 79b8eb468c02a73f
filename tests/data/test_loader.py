"""The loaders of a run's splits: which samples each rank gets, and what fills the last batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_ext.data.loader import FilledUp, build_source
from megatron_ext.data.samplers import RandomSampler
from megatron_ext.errors import DataError
from megatron_ext.parallel.context import ParallelContext
from tests.ranks import ranks
from tests.training_runs import TINY, config_of

CPU = torch.device("cpu")


class Numbered(Dataset[dict[str, Tensor]]):
    """Samples of four positions whose tokens are the number of the sample."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        at = torch.arange(4)
        tokens = torch.full((4,), number)
        return {"tokens": tokens, "labels": at, "position_ids": at, "loss_mask": torch.ones(4)}


def _numbers(batches: Sequence[Any] | None) -> list[list[int]]:
    assert batches is not None
    return [batch.tokens[:, 0].tolist() for batch in batches]


@ranks(dp=2)
def test_replicas_share_all_samples_or_have_shards_of_their_own(context: ParallelContext) -> None:
    words = [*TINY, *"--mock-data --train-iters 9 --tokenizer-type NullTokenizer".split()]
    config = config_of([*words, "--vocab-size", "90"], ranks=2)
    replicas = 2, context.dp_rank, 2
    for consumed in (0, 16):
        for sharded in (True, False):
            source = build_source(
                Numbered(41), config, context, CPU, consumed, cyclic=True, data_sharding=sharded
            )
            drawn = iter(RandomSampler(41, consumed, *replicas, data_sharding=sharded))
            for _ in range(3):
                assert _numbers(source.next_step(4)) == [next(drawn) for _ in range(4)]
    source = build_source(Numbered(41), config, context, CPU, 32)
    first = 32 + 2 * context.dp_rank
    assert _numbers(source.next_step(2)) == [[first, first + 1], [first + 4, first + 5]]
    with pytest.raises(DataError, match=r"middle of a step \(the split holds 41 samples\)"):
        source.next_step(1)


@ranks()
def test_full_validation_fills_its_last_batch_and_begins_again(context: ParallelContext) -> None:
    """19 samples in batches of 16: the 13 after them have no loss, in every pass."""
    words = [*TINY, *"--mock-data --train-iters 9 --tokenizer-type NullTokenizer".split()]
    config = config_of([*words, *"--vocab-size 90 --ignore-index 2".split()])
    torch.manual_seed(5)
    source = build_source(Numbered(19), config, context, CPU, 0, full_epoch=True)
    assert source.whole_epochs and source.num_samples == 19
    # Only training and validation by steps draw a number, as Megatron-LM's loaders do.
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        batches = [batch for _ in range(2) for batch in source.next_step(8) or ()]
        numbers = [number for batch in _numbers(batches) for number in batch]
        assert numbers == [*range(19), *[0] * 13]
        weights = torch.cat([batch.loss_weights for batch in batches])
        assert weights[:19].tolist() == [[1, 1, 0, 1]] * 19, "2 is ignored"
        assert not weights[19:].any()
    build_source(Numbered(19), config, context, CPU, 0)
    drawn = torch.Generator().manual_seed(5)
    torch.rand(1, generator=drawn)
    torch.empty((), dtype=torch.int64).random_(generator=drawn)
    assert torch.rand(1) == torch.rand(1, generator=drawn)


def test_a_split_is_filled_up_to_whole_batches_by_samples_without_a_loss() -> None:
    for count, length in ((1, 4), (3, 4), (4, 4), (5, 8)):
        filled = FilledUp(Numbered(count), 4)
        assert len(filled) == length
        assert [bool(filled[i]["loss_mask"].all()) for i in range(length)] == [
            i < count for i in range(length)
        ]
    bare: Any = [{"tokens": torch.ones(4)}]
    assert FilledUp(bare, 2)[0].keys() == {"tokens"}
    with pytest.raises(DataError, match="`--full-validation` fills up the last batch with samples"):
        FilledUp(bare, 2)[1]
