"""The loaders of a run's splits: which samples each rank gets, and what fills the last batch."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_ext.config.run import RunConfig
from megatron_ext.data.loader import (
    BatchSource,
    FilledUp,
    StepDataset,
    build_source,
    stage_reads_data,
)
from megatron_ext.data.samplers import RandomSampler
from megatron_ext.data.step_plan import StepPlan
from megatron_ext.errors import DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
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


def _on_a_middle_stage(*words: str) -> tuple[RunConfig, ParallelContext]:
    """Return the configuration of a run on three stages, and the context of the second."""
    flags = "--mock-data --train-iters 9 --tokenizer-type NullTokenizer --vocab-size 90".split()
    config = config_of([*TINY, *flags, "--pipeline-model-parallel-size", "3", *words], ranks=3)
    layout = Layout.from_config(config.parallel)
    groups: Any = None
    where = {"rank": 1, "tp_rank": 0, "pp_rank": 1, "dp_rank": 0, "cp_rank": 0}
    return config, ParallelContext(layout, **where, pgs=groups, pipeline_channels=groups)


def test_a_middle_stage_reads_tokens_only_if_it_predicts_several_or_masks_documents() -> None:
    for words, reads in (
        (["--num-layers", "3"], False),
        (["--num-layers", "3", "--reset-attention-mask"], True),
        (
            "--pipeline-model-parallel-layout Et|ttm|L --num-layers 3 --mtp-num-layers 1".split(),
            True,
        ),
        (
            "--pipeline-model-parallel-layout Et|t|tmL --num-layers 3 --mtp-num-layers 1".split(),
            False,
        ),
    ):
        config, context = _on_a_middle_stage(*words)
        assert stage_reads_data(config.model, config.parallel, context) is reads, words


def test_stages_without_data_count_the_steps_of_a_plan() -> None:
    """All stages must run the same number of micro-batches."""
    plan: Any = SimpleNamespace(num_microbatches=lambda step: 10 * step)
    source = BatchSource(None, None, plan, first_step=2)
    sizes = []
    for _ in range(3):
        sizes.append(source.num_microbatches(1))
        assert source.next_step(sizes[-1]) is None
    assert sizes == [20, 30, 40]
    assert BatchSource(None, None).num_microbatches(7) == 7


class Planned(StepDataset, Numbered):
    """A dataset that names the samples of each step: its own number, and a hundred more."""

    @property
    def plan(self) -> StepPlan:  # type: ignore[override]
        return StepPlan(self, 1)

    packs_documents = True
    steps_per_epoch = 3

    def step(self, epoch: int, step: int) -> list[list[list[int]]]:
        return [[[10 * epoch + step]]]

    def __getitem__(self, number: Any) -> dict[str, Tensor]:
        (own,) = number
        return {**super().__getitem__(own), "sample_ids": torch.zeros(4, dtype=torch.int64)}


@ranks()
def test_a_plan_goes_on_at_the_step_that_follows_the_consumed_samples(
    context: ParallelContext,
) -> None:
    words = [*TINY, *"--mock-data --train-iters 9 --tokenizer-type NullTokenizer".split()]
    config = config_of([*words, *"--vocab-size 90 --micro-batch-size 1".split()])
    for done, numbers in ((0, [0, 1, 2, 10]), (4, [11, 12, 20, 21])):
        source = build_source(Planned(100), config, context, CPU, 16 * done)
        assert [_numbers(source.next_step(1)) for _ in range(4)] == [[[n]] for n in numbers]
    with pytest.raises(DataError, match=r"consumed 24 samples, which is no whole number of steps"):
        build_source(Planned(100), config, context, CPU, 24)


def test_a_middle_stage_gets_the_documents_of_packed_rows() -> None:
    config, context = _on_a_middle_stage("--num-layers", "3", "--micro-batch-size", "1")

    class Packed(Planned):
        @property
        def plan(self) -> StepPlan:  # type: ignore[override]
            return StepPlan(self, 1, packs_documents=True)

    assert build_source(Packed(9), config, context, CPU, 0).loader is not None
    assert build_source(Planned(9), config, context, CPU, 0).loader is None


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
