"""Attention to earlier keys in two parts, merged: plain softmax in float64, and cuDNN's calls."""

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.layers import causal_parts, sdpa
from megatron_ext.layers.causal_parts import CUDNN, PartKernel, Saved, attend_in_parts
from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.test_attention import check_part
from tests.ranks import ranks

B, N, D, Q, K = 2, 4, 8, 24, 56
SCALE = 0.3
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def repeated(query: Tensor, *grouped: Tensor) -> list[Tensor]:
    """Return keys or values with the heads of the queries, which torch's CPU kernel wants."""
    return [x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in grouped]


def cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Saved]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, *repeated(query, key, value), 0.0, causal, scale=scale
    )
    return out, lse, ()


def cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Saved,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, *repeated(query, key, value), out, lse, 0.0, causal, scale=scale
    )
    groups = key.size(1)
    return found[0], *(x.unflatten(1, (groups, -1)).sum(2) for x in found[1:])


CPU: Any = PartKernel(cpu_forward, cpu_backward)


def inputs(groups: int, dtype: torch.dtype, device: str = "cpu", factor: float = 1) -> list[Tensor]:
    """Return queries ``[q, b, n, d]``, and keys and values ``[k, b, g, d]``."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(Q, B, N, D), (K, B, groups, D), (K, B, groups, D)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [(factor * x).to(device, dtype).requires_grad_() for x in made]


def in_parts(kernel: PartKernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return attend_in_parts(q, k, v, SCALE, kernel).permute(2, 0, 1, 3)


def check(found: list[Tensor], truth: list[Tensor], tolerance: float) -> None:
    for mine, true in zip(found, truth, strict=True):
        assert float((mine.detach().double() - true).abs().max() / true.abs().max()) <= tolerance


def truth_of(leaves: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Return output and gradients of plain softmax attention in float64."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    forbidden = plain.causal(K, B)[:, K - Q :]
    out = plain.attention(*exact, forbidden, SCALE)
    return [out.detach(), *torch.autograd.grad(out, exact, cotangent.double())]


@pytest.mark.parametrize("factor", [1, 20])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_output_and_gradients_are_those_of_plain_softmax(
    dtype: torch.dtype, groups: int, factor: float
) -> None:
    """The greater factor lets the probability of a query fall on one key of either part."""
    if factor > 1 and dtype == torch.bfloat16:
        pytest.skip("rounded scores of this size have other softmaxes")
    leaves = inputs(groups, dtype, factor=factor)
    out = in_parts(CPU, *leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    truth = truth_of(leaves, cotangent.flatten(2))
    # A score is rounded in proportion to its size, the product of two inputs.
    check([out.flatten(2), *gradients], truth, TOLERANCES[dtype] * factor**2)


def test_merging_compiled_changes_nothing() -> None:
    leaves = inputs(2, torch.float32)
    eager = in_parts(CPU, *leaves)
    with compiled_on_cpu():
        torch.testing.assert_close(in_parts(CPU, *leaves), eager, rtol=0, atol=1e-6)


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
@ranks(cp=2)
def test_context_parallel_slices_equal_plain_arithmetic(
    context: ParallelContext, kind: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []

    def watched(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        calls.append((query.size(2), key.size(2)))
        return attend_in_parts(query, key, value, scale, CPU)

    monkeypatch.setattr(causal_parts, "prefers_parts", lambda *given: True)
    monkeypatch.setattr(causal_parts, "attend_in_parts", watched)
    check_part(context, kind, "causal", groups, torch.float64)
    check_part(context, kind, "causal", groups, torch.float32)
    # Of the 16 positions a rank has two slices of 4; the first of all has no earlier keys.
    once = [(4, 16)] if context.pgs.cp.rank() == 0 else [(4, 8), (4, 12)]
    assert calls == 2 * once


class Calls(TorchDispatchMode):
    """Records the calls of attention kernels, with their numbers of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::_scaled_dot_product_")
        if "attention" in name:
            backward = name.endswith("backward")
            query, key = args[backward : backward + 2]
            # The last flags of the forward pass are left out where they are False.
            causal = args[14] if backward else args[6] if len(args) > 6 else False
            self.found.append((name, query.size(2), key.size(2), causal))
        return func(*args, **(kwargs or {}))


def test_cudnn_gets_a_full_and_a_square_part_without_copies() -> None:
    """torch knows the shapes and strides of cuDNN's kernels without a GPU."""
    leaves = inputs(2, torch.bfloat16, "meta")
    with Calls() as calls:
        out = in_parts(CUDNN, *leaves)
        assert out.is_contiguous() and out.dtype == torch.bfloat16
        gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    parts = [(Q, K - Q, False), (Q, Q, True)]
    assert calls.found == [
        *(("cudnn_attention", *part) for part in parts),
        *(("cudnn_attention_backward", *part) for part in parts),
    ]
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


@pytest.mark.parametrize(
    ("kernels", "fits", "dropout", "prefers"),
    [
        (sdpa.CUDNN_FIRST, True, 0.0, True),
        ((SDPBackend.CUDNN_ATTENTION,), True, 0.0, True),
        (sdpa.CUDNN_FIRST, True, 0.1, False),
        (sdpa.CUDNN_FIRST, False, 0.0, False),
        (sdpa.FLASH_FIRST, True, 0.0, False),
        (sdpa.WITHOUT_CUDNN, True, 0.0, False),
        ((), True, 0.0, False),
    ],
)
def test_parts_are_taken_where_cudnn_goes_first(
    kernels: Any, fits: bool, dropout: float, prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool, bool]] = []

    def can_use(params: Any) -> bool:
        asked.append((params.key.size(2), params.is_causal, params.enable_gqa))
        return fits

    monkeypatch.setattr(causal_parts, "kernels_for", lambda *given, masked: masked and kernels)
    monkeypatch.setattr(causal_parts, "can_use_cudnn_attention", can_use)
    q, k, v = (x.permute(1, 2, 0, 3) for x in inputs(2, torch.bfloat16, "meta"))
    assert causal_parts.prefers_parts(q, k, v, dropout, AttnBackend.auto) is prefers
    if prefers:
        assert asked == [(K - Q, False, True), (Q, True, True)]


def test_a_cpu_keeps_to_one_part() -> None:
    q, k, v = (x.permute(1, 2, 0, 3) for x in inputs(2, torch.float32))
    prefers = partial(causal_parts.prefers_parts, q, k, v, 0.0)
    assert not any(prefers(backend) for backend in AttnBackend)
