"""Attention on a GPU: float64's numbers, the fastest kernel, and masks that skip blocks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from benchmarks.attention import SHAPES, Inputs, Shape, make_inputs, measure, ours
from megatron_ext.device.gpus import seconds_of
from megatron_ext.layers import masks, sdpa
from megatron_ext.layers.attention import DotProductAttention
from tests.gpu.runs import one_gpu
from tests.layers import plain

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SMALL = Shape(384, 2, 4, 2, 64)


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


@pytest.mark.parametrize("window", [None, (100, 0)])
@pytest.mark.parametrize("documents", [False, True])
def test_block_masks_give_float64s_numbers(window: Any, documents: bool) -> None:
    if window is None and not documents:
        pytest.skip("no mask")
    inputs = make_inputs(SMALL, DEVICE, torch.bfloat16)
    ends = [[100, 200], [129]]
    forbidden = plain.documents(SMALL.s, ends) if documents else plain.causal(SMALL.s, SMALL.b)
    mask = forbidden[:, None].to(DEVICE) if documents else None
    if window is not None:
        at = torch.arange(SMALL.s)
        forbidden = forbidden | (at[:, None] - at[None, :] > window[0])
    forbidden = forbidden.to(DEVICE)
    truth = outcome(lambda q, k, v: plain.attention(q, k, v, forbidden), inputs, exact=True)
    with one_gpu() as context:
        module = ours(SMALL, context)
        module.window_size = window
        if not masks.flex_fits(inputs.query.permute(1, 2, 0, 3), 0.0):
            pytest.skip("Triton is not installed")
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
    if not masks.flex_fits(inputs.query.permute(1, 2, 0, 3), 0.0):
        pytest.skip("Triton is not installed")
    mask = plain.documents(shape.s, [list(range(512, 8192, 512))])[:, None].to(DEVICE)
    with one_gpu() as context:
        module = ours(shape, context)
        assert seconds_with(module, inputs, mask) < seconds_with(module, inputs, None)


@pytest.mark.parametrize("length", [8192, 8000])
def test_hopper_takes_cudnn_where_it_is_trusted(length: int) -> None:
    query = torch.empty(1, 2, length, 128, device=DEVICE, dtype=torch.bfloat16)
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    lengths = (length, length)
    trusted = sdpa.prefers_cudnn(torch.cuda.get_device_capability(DEVICE), version, lengths)
    kernels = sdpa.kernels_for(query, query, AttnBackend.auto)
    assert kernels == (sdpa.CUDNN_FIRST if trusted else ())
