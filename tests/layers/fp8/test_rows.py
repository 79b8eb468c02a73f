"""Rows in 8 bits: values and scales, and what experts compute from rows that were sent so."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.expert_exchange import OverlappedDispatcher
from megatron_ext.layers.fp8.blocks import BLOCKS
from megatron_ext.layers.fp8.rows import RowFormat
from megatron_ext.layers.keeping_dispatcher import KeepingDispatcher
from megatron_ext.layers.moe import AlltoAllDispatcher
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.expert_hops import expert_hops
from tests.layers.test_kept_tokens import FULL, build, counted, results
from tests.layers.test_layers import H, same
from tests.layers.test_two_hop_dispatcher import DROPPING, MOE, PADDED
from tests.ranks import on_ranks, ranks

FORMAT = RowFormat(8)
THERE = {"moe_dispatch_fwd_dtype": "fp8"}
BOTH = {**THERE, "moe_combine_bwd_dtype": "fp8"}


def in_8_bits(rows: Tensor, form: RowFormat = FORMAT) -> Tensor:
    return form.decode(form.encode(rows), rows.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", sorted(BLOCKS.values()))
def test_values_are_e4m3_with_the_least_power_of_two_as_scale(
    block: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    magnitudes = torch.exp2(torch.randint(-30, 30, (64, 1), generator=generator).float())
    rows = (torch.randn(64, 256, generator=generator) * magnitudes).to(dtype)
    rows[0] = 0.0
    # The largest value that a scale allows, and the next one.
    rows[1] = 448.0
    rows[2] = 450.0
    form = RowFormat(block)
    encoded = form.encode(rows)
    assert encoded.shape == (64, 256 + 256 // block)
    wanted = rows.clone().unflatten(1, (-1, block))
    for values in wanted.flatten(0, 1):
        largest = values.abs().max().double()
        scale = torch.exp2(torch.ceil(torch.log2(largest / 448))).item() if largest else 1.0
        values.copy_((values.float() / scale).to(torch.float8_e4m3fn).float() * scale)
    decoded = form.decode(encoded, dtype)
    assert torch.equal(decoded, wanted.flatten(1))
    assert torch.equal(in_8_bits(decoded, form), decoded), "a second hop rounds nothing"
    assert form.decode(form.encode(rows[:0]), dtype).shape == (0, 256)


def test_values_that_are_not_finite_stay_so() -> None:
    rows = torch.ones(3, 16)
    rows[0, 3] = float("inf")
    rows[1, 12] = float("nan")
    found = in_8_bits(rows)
    assert not found[0, 3].isfinite()
    assert found[1, 12].isnan()
    assert torch.equal(found[2], rows[2])
    assert torch.equal(found[0, 8:], rows[0, 8:]), "other blocks are as they were"


class Straight(torch.autograd.Function):
    """Rounds rows as they are sent, and passes their gradient on."""

    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        return in_8_bits(rows)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def rounded(context: ParallelContext, *, back: bool, **changes: Any) -> dict[str, Tensor]:
    """Return the results of one all-to-all whose tokens and gradients are rounded beforehand."""
    dispatch = AlltoAllDispatcher.token_dispatch
    combine = AlltoAllDispatcher.token_combine

    def token_dispatch(self: Any, rows: Tensor, probs: Tensor) -> Any:
        return dispatch(self, Straight.apply(rows), probs)  # type: ignore[no-untyped-call]

    def token_combine(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = combine(self, *args, **kwargs)
        if back and output.requires_grad:
            output.register_hook(in_8_bits)  # type: ignore[no-untyped-call]
        return output

    with (
        mock.patch.object(AlltoAllDispatcher, "token_dispatch", token_dispatch),
        mock.patch.object(AlltoAllDispatcher, "token_combine", token_combine),
    ):
        return results(build(context, None, keeps=False, **changes), context)


def check_rounding(context: ParallelContext, ranks_per_node: int | None, keeps: bool) -> None:
    hops = None if ranks_per_node is None else expert_hops(context, ranks_per_node)
    with mock.patch.dict(BLOCKS, fp8=FORMAT.block):
        for formats in (THERE, BOTH):
            for changes in (FULL, {**MOE, **DROPPING}) if keeps else ({}, PADDED):
                wanted = rounded(context, back=formats is BOTH, **changes)
                block = build(context, hops, keeps=keeps, **changes, **formats)
                kind = KeepingDispatcher if keeps else OverlappedDispatcher
                assert isinstance(block.layers[0].mlp.token_dispatcher, kind)
                found = results(block, context)
                same(found, wanted, f"{changes}, {formats}")


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("size", "ranks_per_node"), [(2, None), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_rows_rounded_before_they_are_sent(
    size: int, ranks_per_node: int | None, keeps: bool
) -> None:
    on_ranks(check_rounding, {"dp": size, "ep": size}, ranks_per_node=ranks_per_node, keeps=keeps)


@ranks(dp=2, ep=2)
def test_rows_take_a_byte_for_a_value_and_one_for_a_scale(context: ParallelContext) -> None:
    sent = []
    with mock.patch.dict(BLOCKS, fp8=FORMAT.block):
        for formats in ({}, THERE, BOTH):
            block = build(context, None, keeps=False, num_layers=1, **formats)
            with counted() as passes:
                results(block, context)
            sent.append(passes)
    # Two micro-batches; tokens with their probabilities there, outputs back; then an evaluation.
    plain, there, both = sent
    assert len(plain) == len(there) == len(both) == 3 * 3 + 2 * 3
    rows = [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    eighth = (H + H // FORMAT.block) / (4 * H)
    for tokens, probs, outputs in rows:
        assert there[tokens] == both[tokens] == eighth * plain[tokens]
        assert there[probs] == both[probs] == plain[probs]
        assert there[outputs] == both[outputs] == plain[outputs]
    assert sorted(there[9:]) == sorted(plain[9:])
    for gradients in (9, 12):
        assert both[gradients] == eighth * there[gradients]
    assert sum(both[9:]) == sum(there[9:]) - (1 - eighth) * (there[9] + there[12])
