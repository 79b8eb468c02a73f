"""Block masks: FlexAttention, uncompiled on a CPU, against float64; and what is reused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from megatron_ext.layers import sdpa as block_mask
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.context_parallel import slices_of, to_rank_order
from megatron_ext.layers.sdpa import Span
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.test_attention import build, config
from tests.losses.dense_cross_entropy import Watch
from tests.ranks import ranks

S, B, N, G, D = 300, 2, 4, 2, 16
ENDS = [[40, 170], [129]]


@pytest.fixture(autouse=True)
def flexible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU, uncompiled."""
    monkeypatch.setattr(block_mask, "flex_fits", lambda query, dropout: True)
    monkeypatch.setattr(block_mask, "compiled_flex_attention", lambda: flex_attention)
    block_mask._of_positions.cache_clear()
    monkeypatch.setattr(block_mask, "_newest", block_mask._NewestMask())


@contextmanager
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Span]]:
    spans: list[Span] = []
    genuine = block_mask._made

    def watched(span: Span, *args: Any) -> Any:
        spans.append(span)
        return genuine(span, *args)

    with monkeypatch.context() as patch:
        patch.setattr(block_mask, "_made", watched)
        yield spans


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(S, B, n, D, generator=generator) for n in (N, G, G)]


def expected(forbidden: Tensor) -> Tensor:
    return plain.attention(*(x.double() for x in qkv()), forbidden)


def farther_than(left: int) -> Tensor:
    distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    return distance > left


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("left", [None, 150])
@ranks()
def test_documents_and_windows_equal_plain_arithmetic(
    context: ParallelContext, documents: bool, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden = plain.documents(S, ENDS) if documents else plain.causal(S, B)
    mask = forbidden[:, None] if documents else None
    window = None if left is None else (left, 0)
    transformer_config = config(num_query_groups=G, kv_channels=D, window_size=window)
    module = build(DotProductAttention, transformer_config, context)
    with made(monkeypatch) as masks:
        found = module(*qkv(), mask)
    assert len(masks) == (documents or left is not None)
    if left is not None:
        forbidden = forbidden | farther_than(left)
    torch.testing.assert_close(found.double(), expected(forbidden), rtol=0, atol=2e-6)


@ranks()
def test_a_window_that_looks_ahead(context: ParallelContext) -> None:
    module = build(DotProductAttention, config(window_size=(20, 30)), context)
    module.causal = False
    module.softmax_scale = D**-0.5
    found = module(*qkv(), None)
    forbidden = (farther_than(20) | farther_than(30).T).expand(B, -1, -1)
    torch.testing.assert_close(found.double(), expected(forbidden), rtol=0, atol=2e-6)


@ranks()
def test_one_mask_for_all_samples(context: ParallelContext) -> None:
    module = build(DotProductAttention, config(kv_channels=D), context)
    forbidden = plain.documents(S, ENDS[:1])
    found = module(*qkv(), forbidden[:, None])
    torch.testing.assert_close(
        found.double(), expected(forbidden.expand(B, -1, -1)), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("documents", [False, True])
@ranks(cp=2)
def test_parts_of_the_sequence(context: ParallelContext, documents: bool) -> None:
    forbidden = plain.documents(S, ENDS) if documents else plain.causal(S, B)
    transformer_config = config(kv_channels=D, window_size=(150, 0), context_parallel_size=2)
    module = build(DotProductAttention, transformer_config, context, cp_comm_type="all_gather")
    rank = context.pgs.cp.rank()
    local = [to_rank_order(x, 2).chunk(2)[rank] for x in qkv()]
    own = torch.cat([forbidden.chunk(4, dim=1)[chunk] for chunk in slices_of(rank, 2)], dim=1)
    found = module(*local, own[:, None] if documents else None)
    truth = to_rank_order(expected(forbidden | farther_than(150)), 2).chunk(2)[rank]
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=2e-6)


def views() -> list[Tensor]:
    return [x.permute(1, 2, 0, 3) for x in qkv()]


def test_layers_share_a_mask_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = views()
    mask = plain.documents(S, ENDS)[:, None].contiguous()
    plainly, windowed = Span(0, False, None), Span(0, True, (3, 0))
    with made(monkeypatch) as spans:
        for seen in (mask, mask.detach(), mask[:, :, :]):
            for span in (plainly, windowed):
                block_mask.block_mask(q, k, span, seen)
        assert spans == [plainly, windowed]
        first, last = (mask[:, :, part] for part in (slice(0, 150), slice(150, 300)))
        for part in (first, last, first):
            block_mask.block_mask(q[:, :, :150], k, plainly, part)
        assert len(spans) == 4
        copy = mask.clone()
        block_mask.block_mask(q, k, plainly, copy)
        assert len(spans) == 5
        copy.logical_not_()
        block_mask.block_mask(q, k, plainly, copy)
        assert len(spans) == 6


def test_blocks_that_no_query_sees_are_left_out() -> None:
    q, k, _ = views()
    made = block_mask.block_mask(q, k, Span(0, True, (100, 0)), None)
    seen = made.to_dense()[0, 0]
    assert seen.tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_making_blocks_takes_a_few_bytes_for_a_pair_of_positions() -> None:
    """A difference of positions alone would take 8, which at 32,768 positions are 8 GiB."""
    length = 1024
    mask = plain.causal(length, 1)[:, None].contiguous()
    for span in (Span(0, False, None), Span(0, True, (100, 0))):
        with Watch() as watch:
            block_mask._made(span, (length, length), mask.device, mask)
        assert watch.peak < 4 * mask.numel()


def test_what_flex_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    query = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    assert not block_mask.flex_fits(query, 0.0), "a CPU has its own ways"

    class Cuda:
        is_cuda = True
        dtype = torch.bfloat16

        def __init__(self, d: int) -> None:
            self.d = d

        def size(self, dim: int) -> int:
            return self.d

    monkeypatch.setattr(block_mask, "compiles", lambda query: True)
    given: list[Any] = [(Cuda(128), 0.0), (Cuda(96), 0.0), (Cuda(128), 0.1), (Cuda(8), 0.0)]
    assert [block_mask.flex_fits(*one) for one in given] == [True, False, False, False]
