"""Weights of the multi-token-prediction losses against plain arithmetic."""

import math
import random

import pytest
import torch
from torch import Tensor

from megatron_ext.data.batch import (
    Batch,
    StepLoader,
    documents_of_tokens,
    slice_for_context_parallel,
    with_mtp_targets,
)
from megatron_ext.extras.audit import reproduce_mtp as stock
from megatron_ext.layers.auxiliary_loss import MTPTargets, mean_of_means_weights, per_token_weights
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.task import GPT
from tests.layers.plain import zigzag
from tests.numerics.reproductions import check_ratio
from tests.ranks import on_ranks, ranks
from tests.training_runs import TINY, config_of, mock_data


def test_per_token_weights_give_each_depth_its_own_mean() -> None:
    masks = [torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])]
    losses = torch.tensor([[3.0, 5.0, 9.0]])
    main = torch.tensor(3.0)
    weights = per_token_weights(masks, 0.1, main, torch.tensor([2.0, 1.0]))
    objective = sum(float((w * losses).sum()) for w in weights) / float(main)
    assert abs(objective - 0.05 * (8.0 / 2 + 3.0 / 1)) < 1e-7
    scaled = [mask / 8 for mask in masks]
    same = per_token_weights(scaled, 0.1, main, torch.tensor([2.0, 1.0]) / 8)
    torch.testing.assert_close(same, weights)


def test_a_mean_of_means_shares_its_factor_among_the_depths() -> None:
    masks = [torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])]
    losses = torch.tensor([[3.0, 5.0, 9.0]])
    weights = mean_of_means_weights(masks, 0.1)
    objective = sum(float((w * losses).sum()) for w in weights)
    assert abs(objective - 0.05 * (8.0 / 2 + 3.0 / 1)) < 1e-7
    torch.testing.assert_close(mean_of_means_weights([mask / 8 for mask in masks], 0.1), weights)


def test_a_depth_without_targets_contributes_nothing() -> None:
    masks = [torch.zeros(1, 4)]
    (weights,) = per_token_weights(masks, 0.1, torch.tensor(4.0), torch.tensor([0.0]))
    assert torch.equal(weights, masks[0])
    assert torch.equal(mean_of_means_weights(masks, 0.1)[0], masks[0])


def test_reports_hold_sum_and_count() -> None:
    masks = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.5]])]
    targets = MTPTargets([torch.zeros(1, 2)] * 2, masks, [torch.ones(1, 2)] * 2)
    targets.record(0, torch.tensor([[2.5, 100.0]]))
    targets.record(1, torch.tensor([[4.0, 8.0]]))
    assert [report.tolist() for report in targets.reports] == [[2.5, 1.0], [5.0, 0.75]]


EOD = 99


def packed_row(lengths: list[int], padded: list[int]) -> Batch:
    """Return a row whose label at position t is 100 + t; padding has labels, but no targets."""
    length = sum(padded)
    position = torch.arange(length).unsqueeze(0)
    mask = torch.cat(
        [(torch.arange(pad) < true).float() for true, pad in zip(lengths, padded, strict=True)]
    )
    return Batch(position + 50, position + 100, mask.unsqueeze(0), position)


def targets_by_hand(
    batch: Batch, lengths: list[int], padded: list[int], depth: int
) -> tuple[list[int], list[int]]:
    """Return labels and mask of one depth: what the document holds ``depth`` positions on."""
    labels, mask, start = [], [], 0
    for true, pad in zip(lengths, padded, strict=True):
        for offset in range(pad):
            inside = offset + depth < true
            at = start + offset + depth
            labels.append(int(batch.labels[0, at]) if inside else 0)
            mask.append(int(batch.loss_weights[0, at]) if inside else 0)
        start += pad
    return labels, mask


def with_packed_targets(lengths: list[int], padded: list[int], depths: int) -> Batch:
    """Return a packed row with its targets; padding belongs to no document."""
    documents = [
        document if offset < true else -1
        for document, (true, pad) in enumerate(zip(lengths, padded, strict=True))
        for offset in range(pad)
    ]
    return with_mtp_targets(packed_row(lengths, padded), depths, torch.tensor([documents]))


def test_d09_padding_brings_no_targets_and_none_crosses_documents() -> None:
    lengths, padded = [5, 6], [8, 8]
    batch = with_packed_targets(lengths, padded, 2)
    assert batch.loss_weights.sum() == 11
    assert [int(mask.sum()) for mask in batch.mtp_loss_weights] == [9, 7]
    for depth in (1, 2):
        labels, mask = targets_by_hand(batch, lengths, padded, depth)
        assert batch.mtp_labels[depth - 1].tolist() == [labels]
        assert batch.mtp_loss_weights[depth - 1].tolist() == [mask]


def test_d09_stock_shifts_by_the_lengths_without_padding() -> None:
    """Ten targets: one of them wants a label of the other document."""
    check_ratio(stock.padded_packing, {"0.16": 10 / 9, "0.19": 10 / 9})


def test_random_packings_equal_the_count_by_hand() -> None:
    draw = random.Random(5)
    for _ in range(50):
        lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))]
        padded = [length + draw.choice([0, 0, 1, 5]) for length in lengths]
        batch = with_packed_targets(lengths, padded, 3)
        for depth in (1, 2, 3):
            labels, mask = targets_by_hand(batch, lengths, padded, depth)
            assert batch.mtp_labels[depth - 1].tolist() == [labels]
            assert batch.mtp_loss_weights[depth - 1].tolist() == [mask]


SHORT = [1, 3, 2, 7, 1, 2]
"""Lengths that sum to 16: most are shorter than the chunks of two or four ranks."""


def check_short_documents(context: ParallelContext) -> None:
    size, rank = context.pgs.cp.size(), context.cp_rank
    mine = slice_for_context_parallel(with_packed_targets(SHORT, SHORT, 2), context.pgs.cp)
    for depth in (1, 2):
        labels, mask = targets_by_hand(packed_row(SHORT, SHORT), SHORT, SHORT, depth)
        for found, whole in ((mine.mtp_labels, labels), (mine.mtp_loss_weights, mask)):
            want = zigzag(torch.tensor([whole]), rank, size, dim=1)
            assert found[depth - 1].tolist() == want.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_d10_documents_shorter_than_the_chunks_of_ranks(size: int) -> None:
    on_ranks(check_short_documents, {"cp": size})


def test_d10_stock_cannot_shift_a_short_document() -> None:
    found = check_ratio(stock.short_packing, {"0.16": math.nan, "0.19": math.nan})
    assert "IndexError" in found.what


def sample_of(tokens: list[int]) -> dict[str, Tensor]:
    """Return one collated sample of GPT pretraining, all of whose positions have targets."""
    row = torch.tensor([tokens])
    return {
        "tokens": row[:, :-1],
        "labels": row[:, 1:],
        "position_ids": torch.arange(len(tokens) - 1).unsqueeze(0),
        "loss_mask": torch.ones(1, len(tokens) - 1),
    }


@ranks()
def test_samples_are_shifted_by_document_where_attention_is(context: ParallelContext) -> None:
    sample = sample_of([1, 2, EOD, 4, 5, 6, EOD, 8, 9])
    shape, device = (1, 8), torch.device("cpu")
    apart = StepLoader(
        iter([sample]), context, shape, device, mask_documents_at=EOD, mtp_depths=1
    ).next_step(1)[0]
    assert apart.mtp_labels[0].tolist() == [[EOD, 4, 0, 6, EOD, 8, 0, 0]]
    assert apart.mtp_loss_weights[0].tolist() == [[1, 1, 0, 1, 1, 1, 0, 0]]
    through = StepLoader(iter([sample]), context, shape, device, mtp_depths=1).next_step(1)[0]
    assert through.mtp_labels[0].tolist() == [[EOD, 4, 5, 6, EOD, 8, 9, 0]]
    assert through.mtp_loss_weights[0].tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]


def second_document_losses(chunk: torch.nn.Module, tokens: Tensor) -> list[list[float]]:
    """Return sum and count of each depth's losses over the second document of a row."""
    documents = documents_of_tokens(tokens[:, :-1], EOD)
    position = torch.arange(tokens.size(1) - 1).unsqueeze(0)
    mask = (documents == 1).float()
    batch = Batch(tokens[:, :-1], tokens[:, 1:], mask, position)
    batch = with_mtp_targets(batch, 2, documents)
    masks = batch.mtp_loss_weights
    targets = MTPTargets(batch.mtp_labels, masks, masks)
    attention_mask = documents.int()
    chunk(batch.tokens, position, attention_mask, labels=batch.labels, mtp_targets=targets)
    return [entry.tolist() for entry in targets.reports]


@ranks()
def test_a_document_knows_nothing_of_the_one_before(context: ParallelContext) -> None:
    flags = [*TINY, *mock_data(), "--padded-vocab-size", "2048", "--mtp-num-layers", "2"]
    config = config_of([*flags, "--train-iters", "1"])
    (chunk,) = build_chunks(GPT.model_chunk, config, build_transformer_config(config), context)
    tokens = torch.randint(100, 2000, (1, 33), generator=torch.Generator().manual_seed(3))
    tokens[0, 12] = EOD
    other = tokens.clone()
    other[0, :12] = tokens[0, :12].flip(0)
    mine = second_document_losses(chunk, tokens)
    assert [count for _, count in mine] == [18, 17]
    assert mine == second_document_losses(chunk, other)
