"""Batches against megatron-core's masks, shifts written by hand, and weights sample by sample."""

import math
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.data.batch import (
    Batch,
    MappingLoader,
    StepLoader,
    documents_of_positions,
    reduced_weights,
    shift_left,
    with_mtp_targets,
    with_reduced_weights,
)
from megatron_ext.data.samplers import Announced, RandomSampler, SequentialSampler
from megatron_ext.errors import DataError
from megatron_ext.parallel.context import ParallelContext
from tests.losses.dense_cross_entropy import Watch
from tests.ranks import ranks


def test_mtp_targets_are_further_shifts_of_labels_and_mask() -> None:
    labels = torch.tensor([[11, 12, 13, 14]])
    mask = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    batch = with_mtp_targets(Batch(labels - 1, labels, mask, labels), 2)
    assert [t.tolist() for t in batch.mtp_labels] == [[[12, 13, 14, 0]], [[13, 14, 0, 0]]]
    assert [t.tolist() for t in batch.mtp_loss_weights] == [[[1, 0, 1, 0]], [[0, 1, 0, 0]]]
    assert shift_left(labels).tolist() == [[12, 13, 14, 0]]
    assert labels.tolist() == [[11, 12, 13, 14]]


WEIGHTS = torch.tensor([[1.0, 1, 0, 1, 1, 1, 0, 0], [0.0, 0, 0, 0, 1, 0, 0, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 3, 4]])
COUNTS = [3, 2, 1]
"""Targets of the samples that have any: two of the first row, one of the second."""

DENOMINATORS = {"token": 6.0, "sample": 3.0, "square": sum(math.sqrt(n) for n in COUNTS)}


def documents() -> Tensor:
    return documents_of_positions(POSITIONS)


@pytest.mark.parametrize("reduction", DENOMINATORS)
def test_weights_add_up_to_targets_samples_or_square_roots(reduction: str) -> None:
    total = reduced_weights(WEIGHTS, documents(), reduction).sum()
    assert float(total) == pytest.approx(DENOMINATORS[reduction], rel=1e-6)
    assert not reduced_weights(torch.zeros_like(WEIGHTS), documents(), reduction).any()


@pytest.mark.parametrize(("reduction", "exponent"), [("sample", 1.0), ("square", 0.5)])
def test_every_token_weighs_what_its_sample_says(reduction: str, exponent: float) -> None:
    found = reduced_weights(WEIGHTS, documents(), reduction)
    for row, starts in ((0, [(0, 4), (4, 7)]), (1, [(0, 3), (3, 8)])):
        for first, end in starts:
            part = WEIGHTS[row, first:end]
            share = part / max(1.0, float(part.sum())) ** exponent
            assert torch.allclose(found[row, first:end], share, rtol=1e-6)


def test_rows_fractional_weights_and_padding() -> None:
    whole = reduced_weights(WEIGHTS, None, "sample")  # A row is a sample.
    assert torch.allclose(whole.sum(dim=1), torch.ones(2))
    parts = reduced_weights(0.5 * WEIGHTS, documents(), "sample")  # They are parts of targets.
    assert torch.allclose(parts, reduced_weights(WEIGHTS, documents(), "sample"))
    every = torch.arange(8)[None].expand(2, -1)  # Each position is a document, as in padding.
    assert torch.equal(reduced_weights(0.5 * WEIGHTS, every, "sample"), WEIGHTS)
    padded = documents().masked_fill(WEIGHTS == 0, -1)  # It belongs to no sample.
    found = reduced_weights(WEIGHTS, padded, "square")
    assert float(found.sum()) == pytest.approx(DENOMINATORS["square"], rel=1e-6)


def test_prediction_depths_are_calibrated_by_themselves() -> None:
    ids = torch.zeros_like(POSITIONS)
    fewer = torch.tensor([[1.0, 0, 0, 1, 1, 0, 0, 0], [0.0] * 8])
    batch = Batch(ids, ids, WEIGHTS, POSITIONS, mtp_labels=(ids,), mtp_loss_weights=(fewer,))
    found = with_reduced_weights(batch, documents(), "sample")
    assert float(found.loss_weights.sum()) == pytest.approx(3)
    assert float(found.mtp_loss_weights[0].sum()) == pytest.approx(2)


def samples(length: int, end: int, count: int) -> list[dict[str, Tensor]]:
    """Return micro-batches of one sample whose documents end at each multiple of ``end``."""
    at = torch.arange(length)[None]
    ids = {"tokens": at % end, "labels": at, "position_ids": at % end}
    return [{**ids, "loss_mask": torch.ones(1, length)}] * count


@pytest.mark.parametrize("by", ["tokens", "positions"])
@ranks()
def test_masks_of_a_step_take_four_bytes_a_token(context: ParallelContext, by: str) -> None:
    """Dense masks would take a byte for each pair of positions: 16 MiB here."""
    length, count, end = 1024, 16, 100
    how = {"documents_by_position": True} if by == "positions" else {"mask_documents_at": end - 1}
    given = iter(samples(length, end, count))
    loader = StepLoader(given, context, (1, length), torch.device("cpu"), **how)
    with Watch() as watch:
        batches = loader.next_step(count)
    wanted = (torch.arange(length) // end)[None].int()
    assert all(torch.equal(batch.attention_mask, wanted) for batch in batches)
    assert sum(batch.attention_mask.nbytes for batch in batches) == 4 * count * length
    assert watch.peak < 100 * count * length < count * length * length / 10


@ranks(cp=2)
def test_context_parallel_ranks_know_the_documents_of_all_keys(context: ParallelContext) -> None:
    """Where positions begin documents, a token that ends one elsewhere has no effect."""
    given = iter(samples(16, 5, 1))
    how: dict[str, Any] = {"documents_by_position": True, "mask_documents_at": 2}
    (batch,) = StepLoader(given, context, (1, 16), torch.device("cpu"), **how).next_step(1)
    assert batch.tokens.shape == (1, 8)
    assert batch.attention_mask.tolist() == [[0] * 5 + [1] * 5 + [2] * 5 + [3]]


@ranks()
def test_documents_that_the_data_numbers_need_no_end_token(context: ParallelContext) -> None:
    numbers = torch.tensor([[4, 4, 4, 7, 7, -1]])
    (given,) = samples(6, 3, 1)
    how: dict[str, Any] = {"mask_documents_at": 2, "with_sample_ids": True, "mtp_depths": 1}
    named = iter([{**given, "sample_ids": numbers}])
    (batch,) = StepLoader(named, context, (1, 6), torch.device("cpu"), **how).next_step(1)
    assert batch.attention_mask.tolist() == batch.sample_ids.tolist() == numbers.tolist()
    assert batch.mtp_loss_weights[0].tolist() == [[1, 1, 0, 1, 0, 0]]


@ranks(tp=2, cp=2)
def test_peers_receive_steps_of_any_length_and_weigh_their_own_part(
    context: ParallelContext,
) -> None:
    """Only the first tensor-parallel rank has the data; its first step is half as long."""
    reads = context.tp_rank == 0
    given = [*samples(8, 5, 2), *samples(16, 5, 1)]
    loader = StepLoader(iter(given) if reads else None, context, (1, 16), torch.device("cpu"))
    assert [batch.tokens.shape for batch in loader.next_step(2, 8)] == [(1, 4), (1, 4)]
    (batch,) = loader.next_step(1)
    cut = batch.labels[0].tolist()
    part = context.pgs.cp.rank()
    assert cut == [*range(4 * part, 4 * part + 4), *range(12 - 4 * part, 16 - 4 * part)]

    mask = torch.tensor([[1.0, 1, 0, 1], [0.0, 1, 0, 0]])
    named = [{"loss_mask": mask, "name": "a"}, {"pixels": torch.zeros(3, 2)}]
    own = MappingLoader(iter(named) if reads else None, context, torch.device("cpu"))
    first, second = own.next_step(2)
    assert first["name"] == "a"
    assert first.loss_weights.tolist() == mask[:, 2 * part : 2 * part + 2].tolist()
    assert second.loss_weights.tolist() == [1, 1, 1]


@pytest.mark.parametrize("reduction", ["token", "sample"])
@ranks()
def test_ignored_labels_weigh_nothing(context: ParallelContext, reduction: str) -> None:
    labels = torch.tensor([[5, 7, 7, 2, 9, 7]])
    sample = {
        "tokens": torch.arange(6)[None],
        "labels": labels,
        "position_ids": torch.arange(6)[None],
        "loss_mask": torch.tensor([[1.0, 1, 1, 1, 1, 0]]),
    }

    def first(ignore_index: int) -> tuple[list[float], list[float]]:
        how = {"mtp_depths": 1, "reduction": reduction, "ignore_index": ignore_index}
        loader = StepLoader(iter([sample]), context, (1, 6), torch.device("cpu"), **how)
        (batch,) = loader.next_step(1)
        return batch.loss_weights[0].tolist(), batch.mtp_loss_weights[0][0].tolist()

    each = 1 if reduction == "token" else 1 / 3
    of_depth = 1 if reduction == "token" else 1 / 2
    assert first(7) == (
        pytest.approx([each, 0, 0, each, each, 0]),
        pytest.approx([0, 0, of_depth, of_depth, 0, 0]),
    )
    whole = 1 if reduction == "token" else 1 / 5
    assert first(-100)[0] == pytest.approx([whole] * 5 + [0])


def test_sequential_gives_each_rank_its_share_and_resumes_until_there_is_none() -> None:
    ranks = [list(SequentialSampler(9, 0, 2, rank, 2)) for rank in range(2)]
    assert ranks == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    whole = list(SequentialSampler(24, 0, 2, 1, 3))
    assert list(SequentialSampler(24, 12, 2, 1, 3)) == whole[2:]
    assert len(SequentialSampler(24, 12, 2, 1, 3)) == 2
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
    with pytest.raises(DataError, match=r"holds 5 samples, but one micro-batch .* takes 6"):
        RandomSampler(5, 0, 2, 0, 3, data_sharding=True)
    exact = [next(iter(RandomSampler(6, 0, 2, r, 3, data_sharding=sharded))) for r in range(3)]
    assert sorted(i for batch in exact for i in batch) == list(range(6))


@pytest.mark.parametrize("sharded", [True, False])
def test_random_leaves_out_what_fills_no_step_of_all_ranks(sharded: bool) -> None:
    """An epoch has two steps of 6 of its 17 samples; the run goes on after any of them."""
    whole = [
        list(islice(RandomSampler(17, 0, 2, r, 3, data_sharding=sharded), 8)) for r in range(3)
    ]
    for epoch in range(4):
        seen = [i for rank in whole for batch in rank[2 * epoch : 2 * epoch + 2] for i in batch]
        assert len(set(seen)) == 12 and max(seen) < (12 if sharded else 16)
    for rank, wanted in enumerate(whole):
        if sharded:
            assert {i // 4 for batch in wanted for i in batch} == {rank}
        for step in range(8):
            rest = RandomSampler(17, 6 * step, 2, rank, 3, data_sharding=sharded)
            assert list(islice(rest, 8 - step)) == wanted[step:]


def test_batches_are_announced_before_they_are_read_and_none_is_lost() -> None:
    batches = [[number] for number in range(9)]
    expected: list[list[int]] = []
    seen = []
    for batch in Announced(batches, lambda numbers: expected.append(list(numbers)), ahead=2):
        seen.append(batch)
        assert expected == batches[: len(seen) + 2]
    assert seen == batches


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            torch.ones(1, 6),
            r"\(Tensor\) lacks `tokens`, `labels`, `position_ids`, `loss_mask`; r",
        ),
        (
            {"tokens": 1, "labels": 1, "position_ids": 1},
            r"\(dict\) lacks `loss_mask`; return a ma",
        ),
    ],
)
def test_samples_without_a_tensor_are_refused_by_its_name(sample: Any, message: str) -> None:
    nowhere: Any = None
    loader = StepLoader(iter([sample]), nowhere, (1, 6), torch.device("cpu"))
    with pytest.raises(DataError, match=message):
        loader.next_step(1)
