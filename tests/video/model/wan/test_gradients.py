"""Gradients through a cached forward: where they end, and what recomputation leaves as it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.wan.cache import KVCache
from megatron_ext.video.model.wan.model import VideoDiT
from tests.ranks import ranks
from tests.video.model.wan.names import to_parallel
from tests.video.model.wan.problem import CAUSAL, Problem, frames_of, new_cache, plain_of, stream
from tests.video.networks import Tensors, one, relative

PROBLEM = Problem(frames=21, batch=1)
BLOCKS = range(0, 21, 3)


def gradients_of(chunk: VideoDiT) -> Tensors:
    out = {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}
    chunk.zero_grad()
    return out


def same(got: Tensors, want: Tensors, tolerance: float) -> None:
    assert got.keys() == want.keys()
    errors = {name: relative(got[name], want[name]) for name in want}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.2e}"


def two_phase(chunk: VideoDiT, inputs: dict[str, Tensor], cache: KVCache, order: Any) -> Tensors:
    """Fill the cache without gradient, then run each block again with it, in any order."""
    stream(chunk, cache, inputs, 3)
    for first in order:
        own = frames_of(inputs, first, 3)
        flow = chunk(**own, cache=cache, update_cache=False)
        (flow * PROBLEM.target()[:, first : first + 3]).sum().backward()
    return gradients_of(chunk)


def one_graph(chunk: VideoDiT, inputs: dict[str, Tensor], cache: KVCache) -> Tensors:
    """All blocks with gradient through a cache that they fill, and one backward pass."""
    flows = [chunk(**frames_of(inputs, first, 3), cache=cache) for first in BLOCKS]
    (torch.cat(flows, dim=1) * PROBLEM.target()).sum().backward()
    return gradients_of(chunk)


@ranks()
def test_two_phases_give_the_gradient_of_one_graph(context: ParallelContext) -> None:
    """And both that of plain torch whose keys and values are cut between blocks."""
    chunk = one(PROBLEM, context, torch.float64)
    inputs = PROBLEM.inputs(dtype=torch.float64)
    plain = plain_of(chunk)
    flow = plain(**inputs, rule=PROBLEM.rule, cut_blocks=True)
    (flow * PROBLEM.target()).sum().backward()
    grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    want = to_parallel(grads, PROBLEM.sizes)
    assert want.keys() == dict(chunk.named_parameters()).keys()
    for order in (BLOCKS, reversed(BLOCKS)):
        cache = new_cache(chunk, PROBLEM, chunk_frames=21)
        same(two_phase(chunk, inputs, cache, order), want, 1e-10)
    same(one_graph(chunk, inputs, new_cache(chunk, PROBLEM, chunk_frames=21)), want, 1e-10)


@ranks()
def test_recomputation_changes_no_gradient(context: ParallelContext) -> None:
    """In evaluation mode too, in which all networks run."""
    inputs = PROBLEM.inputs(dtype=torch.float64)
    runs, found = [], []
    for number in (0, 1, 100):
        options = dataclasses.replace(CAUSAL, recompute_blocks=number)
        chunk = one(dataclasses.replace(PROBLEM, options=options), context, torch.float64).eval()
        calls = []
        for block in chunk.blocks.values():
            block.register_forward_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        # Backward recomputes when the cache stands at the end of the chunk.
        found.append(one_graph(chunk, inputs, new_cache(chunk, PROBLEM, chunk_frames=21)))
        runs.append(len(calls))
    assert runs == [14, 21, 28]
    for other in found[1:]:
        same(other, found[0], 1e-12)


@ranks()
def test_recomputation_never_reads_other_keys(context: ParallelContext) -> None:
    """A frame was dropped, or written again, before the backward pass recomputes its readers."""
    options = dataclasses.replace(CAUSAL, recompute_blocks=2)
    chunk = one(dataclasses.replace(PROBLEM, options=options), context)
    inputs = PROBLEM.inputs()
    with pytest.raises(ConfigError, match="of the cache were overwritten or dropped before the"):
        one_graph(chunk, inputs, new_cache(chunk, PROBLEM))
    cache = new_cache(chunk, PROBLEM, chunk_frames=21)
    stream(chunk, cache, inputs, 3)
    flow = chunk(**frames_of(inputs, 18, 3), cache=cache, update_cache=False)
    with torch.no_grad():
        chunk(**frames_of(PROBLEM.inputs(1), 15, 3), cache=cache)
    with pytest.raises(ConfigError, match=r"frames 0-2, 12-17 of the cache were overwritten or dr"):
        flow.sum().backward()


@ranks()
def test_a_block_passes_no_gradient_to_another(context: ParallelContext) -> None:
    """Though every pass has gradients and writes its keys."""
    chunk, inputs = one(PROBLEM, context), PROBLEM.inputs()
    x = inputs["x"].requires_grad_()
    cache = new_cache(chunk, PROBLEM, chunk_frames=21)
    flows = [chunk(**frames_of(inputs, first, 3), cache=cache) for first in BLOCKS]
    for first, flow in zip(BLOCKS, flows, strict=True):
        (gradient,) = torch.autograd.grad(flow.square().sum(), x)
        reached = gradient.abs().amax(dim=(0, 2, 3, 4)).nonzero().flatten().tolist()
        assert reached == [first, first + 1, first + 2]
    assert not any(t.requires_grad for t in (*cache.keys, *cache.values))
    # Without a cache the earlier blocks are reached: it is the cache that cuts.
    (gradient,) = torch.autograd.grad(chunk(**inputs)[:, 18:].square().sum(), x)
    assert gradient[:, 12:18].abs().sum() > 0


@ranks()
def test_passes_without_gradient_make_no_graph(context: ParallelContext) -> None:
    chunk, inputs = one(PROBLEM, context), PROBLEM.inputs()
    flow = stream(chunk, new_cache(chunk, PROBLEM), inputs, 3)
    assert not flow.requires_grad and flow.grad_fn is None


@pytest.mark.parametrize("number", [0, 2])
@ranks()
def test_text_is_trained(context: ParallelContext, number: int) -> None:
    """The text's cache is filled, and blocks are recomputed or not."""
    options = dataclasses.replace(CAUSAL, recompute_blocks=number)
    chunk = one(dataclasses.replace(PROBLEM, options=options), context)
    inputs = PROBLEM.inputs()
    cache = new_cache(chunk, PROBLEM, chunk_frames=21)
    stream(chunk, cache, inputs, 3)
    assert cache.memo.is_filled
    with_cache = two_phase(chunk, inputs, cache, [18])
    for name in ("blocks.0.cross_attention.linear_kv", "blocks.1.cross_attention.linear_kv",
                 "embedder.text_in", "embedder.text_out"):  # fmt: skip
        for kind in ("weight", "bias"):
            assert with_cache[f"{name}.{kind}"].norm() > 1e-3, name
    assert with_cache.keys() == dict(chunk.named_parameters()).keys()
