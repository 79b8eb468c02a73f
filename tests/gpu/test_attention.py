"""Attention on a GPU: float64's numbers, the fastest kernel, and masks that skip blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from benchmarks.attention import SHAPES, Inputs, Shape, make_inputs, measure, ours
from megatron_ext.config.model import ModelConfig
from megatron_ext.device.rates import seconds_of
from megatron_ext.layers import flex_attention as flex
from megatron_ext.layers import sdpa
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.attention_logits import largest_logits
from megatron_ext.layers.causal_parts import attend_in_parts, prefers_parts
from tests.gpu.runs import one_gpu
from tests.layers import plain

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SMALL = Shape(384, 2, 4, 2, 64)
ODD = Shape(384, 2, 4, 2, 96)
"""Heads whose size is no power of 2."""


def outcome(call: Callable[..., Tensor], inputs: Inputs, exact: bool = False) -> list[Tensor]:
    """Return output and gradients, in float64 arithmetic or in the inputs' own."""
    kind = torch.float64 if exact else inputs.query.dtype
    leaves = [x.detach().to(kind).requires_grad_() for x in inputs.leaves]
    out = call(*leaves)
    out.backward(inputs.gradient.to(kind))  # type: ignore[no-untyped-call]
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def assert_near(found: list[Tensor], truth: list[Tensor], tolerance: float = 2e-2) -> None:
    for mine, true in zip(found, truth, strict=True):
        assert float((mine.double() - true).norm() / true.norm()) < tolerance


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused", "local"])
def test_every_backend_gives_float64s_numbers(backend: str) -> None:
    inputs = make_inputs(SMALL, DEVICE, torch.bfloat16)
    forbidden = plain.causal(SMALL.s, SMALL.b).to(DEVICE)
    truth = outcome(lambda q, k, v: plain.attention(q, k, v, forbidden), inputs, exact=True)
    with one_gpu() as context:
        module = ours(SMALL, context)
        module.backend = AttnBackend[backend]
        assert_near(outcome(lambda *qkv: module(*qkv, None), inputs), truth)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_the_largest_logits_are_float64s(
    documents: bool, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(SMALL, DEVICE, torch.bfloat16)
    query, key, _ = (x.detach() for x in inputs.leaves)
    mask = plain.document_indices(SMALL.s, [[100, 130]] * SMALL.b) if documents else None
    forbidden = plain.causal(SMALL.s, SMALL.b)
    if mask is not None:
        forbidden = forbidden | (mask[:, :, None] != mask[:, None, :])
        mask = mask.to(DEVICE)
    with one_gpu() as context:
        module = ours(SMALL, context)
        monkeypatch.setattr(flex, "FINDS_LARGEST", kernel and flex.FINDS_LARGEST)
        found = largest_logits(module, query, key, mask, first_query=0)
        scale = module.softmax_scale
    key = key.repeat_interleave(query.size(2) // key.size(2), dim=2).double()
    logits = torch.einsum("qbnd,kbnd->bnqk", query.double(), key) * scale
    want = logits.masked_fill(forbidden[:, None].to(DEVICE), -torch.inf).amax(dim=(0, 2, 3))
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, (100, 0)])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shape", [SMALL, ODD], ids=str)
def test_block_masks_give_float64s_numbers(shape: Shape, window: Any, documents: bool) -> None:
    if window is None and not documents:
        pytest.skip("no mask")
    inputs = make_inputs(shape, DEVICE, torch.bfloat16)
    ends = [[100, 200], [129]]
    forbidden = plain.documents(SMALL.s, ends) if documents else plain.causal(SMALL.s, SMALL.b)
    mask = plain.document_indices(SMALL.s, ends).to(DEVICE) if documents else None
    if window is not None:
        at = torch.arange(SMALL.s)
        forbidden = forbidden | (at[:, None] - at[None, :] > window[0])
    forbidden = forbidden.to(DEVICE)
    truth = outcome(lambda q, k, v: plain.attention(q, k, v, forbidden), inputs, exact=True)
    with one_gpu() as context:
        module = ours(shape, context)
        module.window_size = window
        if not flex.flex_fits(inputs.query.permute(1, 2, 0, 3), 0.0):
            pytest.skip("Triton is not installed, or this torch takes powers of 2 alone")
        assert_near(outcome(lambda *qkv: module(*qkv, mask), inputs), truth)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_g4_within_5_percent_of_the_fastest_backend(shape: Shape) -> None:
    with one_gpu() as context:
        found = measure(shape, context, DEVICE, torch.bfloat16, 20)
    mine = found.pop("ours")
    fastest = min(one.seconds for one in found.values() if not one.refusal)
    assert not mine.refusal and mine.seconds <= 1.05 * fastest


def seconds_with(module: DotProductAttention, inputs: Inputs, mask: Tensor | None) -> float:
    return seconds_of(lambda: outcome(lambda *qkv: module(*qkv, mask), inputs), DEVICE, repeats=10)


def test_documents_cost_less_than_one_long_one() -> None:
    shape = Shape(8192, 1, 16, 16, 128)
    inputs = make_inputs(shape, DEVICE, torch.bfloat16)
    if not flex.flex_fits(inputs.query.permute(1, 2, 0, 3), 0.0):
        pytest.skip("Triton is not installed")
    mask = plain.document_indices(shape.s, [list(range(512, 8192, 512))]).to(DEVICE)
    with one_gpu() as context:
        module = ours(shape, context)
        assert seconds_with(module, inputs, mask) < seconds_with(module, inputs, None)


def sliced(shape: Shape, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last queries of a sequence and all its keys and values, as kernels get them."""
    inputs = make_inputs(shape, DEVICE, torch.bfloat16)
    query, key, value = (x.permute(1, 2, 0, 3) for x in inputs.leaves)
    query = query[:, :, -queries:]
    if not prefers_parts(query, key, value, 0.0, AttnBackend.auto):
        pytest.skip("cuDNN is not preferred here")
    return query, key, value


def lower_right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = causal_lower_right(query.size(2), key.size(2))
    return sdpa.attend(query, key, value, mask=mask)


def test_attention_in_parts_gives_float64s_numbers() -> None:
    query, key, value = sliced(SMALL, 128)
    found = []
    for attend, kind in ((attend_in_parts, torch.bfloat16), (lower_right, torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in (query, key, value)]
        scale = (SMALL.d**-0.5,) if attend is attend_in_parts else ()
        out = attend(*leaves, *scale)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert_near(*found)


def test_a_slice_of_queries_is_faster_in_parts() -> None:
    query, key, value = sliced(Shape(16384, 1, 16, 16, 128), 4096)

    def both(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]

        def once() -> None:
            out = attend(*leaves)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        return seconds_of(once, DEVICE, repeats=10)

    assert both(partial(attend_in_parts, scale=128**-0.5)) < both(lower_right)


def test_flash_attention_3_gives_float64s_numbers() -> None:
    if not sdpa.use_flash_3(ModelConfig(attention_dropout=0.0), DEVICE):
        pytest.skip("FlashAttention 3 is not installed for this GPU and torch")
    try:
        inputs = make_inputs(SMALL, DEVICE, torch.bfloat16)
        forbidden = plain.causal(SMALL.s, SMALL.b).to(DEVICE)
        truth = outcome(lambda q, k, v: plain.attention(q, k, v, forbidden), inputs, exact=True)
        with one_gpu() as context:
            module = ours(SMALL, context)
            assert_near(outcome(lambda *qkv: module(*qkv, None), inputs), truth)
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("length", [8192, 8000])
def test_hopper_takes_cudnn_where_it_is_trusted(length: int) -> None:
    query = torch.empty(1, 2, length, 128, device=DEVICE, dtype=torch.bfloat16)
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    lengths = (length, length)
    trusted = sdpa.prefers_cudnn(torch.cuda.get_device_capability(DEVICE), version, lengths)
    kernels = sdpa.kernels_for(query, query, AttnBackend.auto)
    assert kernels == (sdpa.CUDNN_FIRST if trusted else ())
