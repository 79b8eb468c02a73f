"""Attention on a fake GPU: masks wait for nothing, FlexAttention compiles, slices take cuDNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.layers import causal_parts
from megatron_ext.layers import flex_attention as flex
from megatron_ext.layers.flex_attention import Span
from tests.gpu_proof.cases import GROUPS, HEADS, D, S, half
from tests.gpu_proof.compiler import compiled_graphs
from tests.gpu_proof.fake_cuda import CAPABILITY, SHARED_MEMORY

CUDA = torch.device("cuda", 0)
on_h200 = pytest.mark.skipif(CAPABILITY != 90, reason="the limits are those of an H200")


class Recorder(TorchDispatchMode):
    """Records operations, and those for which the host waits: reads, and copies to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waits: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::")
        self.names.append(name)
        kinds = {x.device.type for x in (*args, found) if isinstance(x, Tensor) and x.dim()}
        if name in ("_local_scalar_dense", "nonzero", "lift_fresh") or len(kinds) > 1:
            self.waits.append(name)
        for x in found if isinstance(found, tuple) else (found,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel() * x.element_size())
        return found


def queries_keys_values(queries: int = S) -> list[Tensor]:
    """Return ``[b, n, q, d]``, ``[b, g, k, d]`` and ``[b, g, k, d]``, views of ``[s, b, n, d]``."""
    shapes = ((queries, HEADS), (S, GROUPS), (S, GROUPS))
    return [half(length, 1, heads, D).permute(1, 2, 0, 3) for length, heads in shapes]


def documents() -> Tensor:
    """Return the document index of each position ``[b, s]``."""
    return torch.zeros(1, S, dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("masked", [True, False], ids=["documents", "window"])
@pytest.mark.usefixtures("fake_tensors")
def test_making_blocks_waits_for_nothing_and_stays_small(masked: bool) -> None:
    query, key, _ = queries_keys_values()
    mask = documents() if masked else None
    with Recorder() as seen:
        flex.block_mask(query, key, Span(0, True, (1024, 0)), mask)
    assert seen.names and seen.waits == []
    assert seen.largest <= S * S / 256


@pytest.mark.usefixtures("fake_tensors")
def test_blocks_of_a_dense_mask_wait_for_nothing() -> None:
    query, key, _ = queries_keys_values()
    forbidden = torch.zeros(1, 1, S, S, dtype=torch.bool, device=CUDA)
    with Recorder() as seen:
        flex.block_mask(query, key, Span(0, False, None), forbidden)
    assert seen.names and seen.waits == []


@pytest.mark.parametrize("queries", [S, S // 4])
@pytest.mark.usefixtures("fake_tensors")
def test_documents_compile_to_kernels_that_fit(queries: int) -> None:
    """The first kernel of the backward pass sums products of the output and its gradient."""
    query, key, value = queries_keys_values(queries)
    blocks = flex.block_mask(query, key, Span(S - queries, True, None), documents())
    with compiled_graphs() as graphs:
        megatrons = (x.permute(2, 0, 1, 3) for x in (query, key, value))
        out = flex.attention_in_blocks(*megatrons, blocks, D**-0.5)
        torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    forward, backward = graphs
    assert backward.backward and not forward.backward
    assert (len(forward.kernels), len(backward.kernels)) == (1, 2)
    for kernel in (*forward.kernels, *backward.kernels):
        print(kernel.name, kernel.binaries)
        assert any(binary.shared <= SHARED_MEMORY for binary in kernel.binaries)
    assert any(binary.spilled == 0 for binary in forward.kernels[0].binaries)


@pytest.mark.parametrize(("size", "groups"), [(D, GROUPS), (192, HEADS)], ids=["llama", "deepseek"])
@pytest.mark.usefixtures("fake_tensors")
def test_the_largest_scores_are_one_kernel_that_fits(size: int, groups: int) -> None:
    query, key = half(S, 1, HEADS, size), half(S, 1, groups, size)
    views = [x.permute(1, 2, 0, 3) for x in (query, key)]
    blocks = flex.block_mask(*views, Span(0, True, None), documents())
    with compiled_graphs() as graphs, torch.no_grad():
        largest = flex.largest_scores(query, key, blocks, size**-0.5)
    assert (largest.shape, largest.dtype) == ((1, HEADS, S), torch.float32)
    (graph,) = graphs
    attending = [kernel for kernel in graph.kernels if "flex" in kernel.name]
    assert len(attending) == 1 and len(graph.kernels) <= 2
    for kernel in graph.kernels:
        print(kernel.name, kernel.binaries)
        assert any(
            binary.shared <= SHARED_MEMORY and binary.spilled == 0 for binary in kernel.binaries
        )


@dataclass(frozen=True)
class Heads:
    """Heads of a model, and the registers' bytes that its attention may spill, by direction.

    Attributes:
        sizes: of a key and of a value.
        capped: scores have a soft cap.
        sinks: each head has a sink.
    """

    sizes: tuple[int, int]
    spilled: tuple[int, int]
    groups: int = GROUPS
    capped: bool = False
    sinks: bool = False


MODELS = {
    "gemma": Heads((256, 256), (0, 1824), capped=True),
    "gpt-oss": Heads((64, 64), (184, 0), sinks=True),
    "deepseek": Heads((192, 128), (0, 536), groups=HEADS),
    "all parts": Heads((192, 128), (0, 904), groups=HEADS, capped=True, sinks=True),
}


@on_h200
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("fake_tensors")
def test_heads_of_models_compile_to_kernels_that_fit(model: str) -> None:
    heads = MODELS[model]
    query, key = half(S, 1, HEADS, heads.sizes[0]), half(S, 1, heads.groups, heads.sizes[0])
    value = half(S, 1, heads.groups, heads.sizes[1])
    sinks = half(HEADS) if heads.sinks else None
    limit = torch.full((), 50.0, device=CUDA) if heads.capped else None
    views = [x.permute(1, 2, 0, 3) for x in (query, key)]
    assert flex.flex_fits(views[0], 0.0)
    blocks = flex.block_mask(*views, Span(0, True, (1023, 0)), documents())
    with compiled_graphs() as graphs:
        scale = heads.sizes[0] ** -0.5
        out = flex.attention_in_blocks(query, key, value, blocks, scale, limit, sinks)
        inputs = [x for x in (query, key, value, sinks) if x is not None]
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert out.shape == (S, 1, HEADS, heads.sizes[1])
    forward, backward = graphs
    counts = (2, 4) if heads.sinks else (1, 2)
    for graph, count, spilled in zip((forward, backward), counts, heads.spilled, strict=True):
        assert len(graph.kernels) <= count
        for kernel in graph.kernels:
            print(kernel.name, kernel.binaries)
            assert any(
                binary.shared <= SHARED_MEMORY and binary.spilled <= spilled
                for binary in kernel.binaries
            )


@pytest.mark.usefixtures("fake_tensors")
def test_a_slice_of_queries_takes_cudnn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_parts, "can_use_cudnn_attention", lambda params: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    # Under a recorder nothing compiles; `cases` has this function.
    monkeypatch.setattr(causal_parts, "merged", causal_parts.merged.eager)
    query, key, value = queries_keys_values(S // 4)
    assert causal_parts.prefers_parts(query, key, value, 0.0, AttnBackend.auto)
    with Recorder() as seen:
        out = causal_parts.attend_in_parts(query, key, value, D**-0.5)
        torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    attention = [name for name in seen.names if "attention" in name]
    once = "_scaled_dot_product_cudnn_attention"
    assert attention == [once, once, f"{once}_backward", f"{once}_backward"]
    assert seen.waits == []
