"""Gradients through a cache and where they end, recomputation, and history encoded anew."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.cache import KVCache, recache
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.wan.model import VideoDiT
from tests.ranks import ranks
from tests.video.networks.harness import Tensors, largest, one, relative
from tests.video.networks.wan import problem as wan

PROBLEM = wan.Problem(frames=21, batch=1)
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
    wan.stream(chunk, cache, inputs, 3)
    for first in order:
        own = wan.frames_of(inputs, first, 3)
        flow = chunk(**own, cache=cache, update_cache=False)
        (flow * PROBLEM.target()[:, first : first + 3]).sum().backward()
    return gradients_of(chunk)


def one_graph(chunk: VideoDiT, inputs: dict[str, Tensor], cache: KVCache) -> Tensors:
    """Run all blocks with gradient through a cache that they fill, and one backward pass."""
    flows = [chunk(**wan.frames_of(inputs, first, 3), cache=cache) for first in BLOCKS]
    (torch.cat(flows, dim=1) * PROBLEM.target()).sum().backward()
    assert not any(t.requires_grad for t in (*cache.keys, *cache.values))
    return gradients_of(chunk)


@ranks()
def test_two_phases_give_the_gradient_of_one_graph(context: ParallelContext) -> None:
    """Compare both with plain torch whose keys and values are cut between blocks."""
    chunk = one(PROBLEM, context, torch.float64)
    inputs = PROBLEM.inputs(dtype=torch.float64)
    plain = wan.plain_of(chunk)
    flow = plain(**inputs, rule=PROBLEM.rule, cut_blocks=True)
    (flow * PROBLEM.target()).sum().backward()
    grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    want = PROBLEM.to_parallel(grads, dict(chunk.named_parameters()))
    assert want.keys() == dict(chunk.named_parameters()).keys()
    for order in (BLOCKS, reversed(BLOCKS)):
        cache = wan.new_cache(chunk, PROBLEM, chunk_frames=21)
        same(two_phase(chunk, inputs, cache, order), want, 1e-10)
    same(one_graph(chunk, inputs, wan.new_cache(chunk, PROBLEM, chunk_frames=21)), want, 1e-10)


@ranks()
def test_recomputation_changes_no_gradient(context: ParallelContext) -> None:
    inputs = PROBLEM.inputs(dtype=torch.float64)
    runs, found = [], []
    for number in (0, 1, 100):
        options = dataclasses.replace(wan.CAUSAL, recompute_blocks=number)
        chunk = one(dataclasses.replace(PROBLEM, options=options), context, torch.float64).eval()
        calls = []
        for block in chunk.blocks.values():
            block.register_forward_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        # Backward recomputes when the cache stands at the end of the chunk.
        found.append(one_graph(chunk, inputs, wan.new_cache(chunk, PROBLEM, chunk_frames=21)))
        runs.append(len(calls))
    assert runs == [14, 21, 28]
    for other in found[1:]:
        same(other, found[0], 1e-12)


@ranks()
def test_recomputation_never_reads_other_keys(context: ParallelContext) -> None:
    """Drop a frame, or write it again, before the backward pass recomputes its readers."""
    options = dataclasses.replace(wan.CAUSAL, recompute_blocks=2)
    chunk = one(dataclasses.replace(PROBLEM, options=options), context)
    inputs = PROBLEM.inputs()
    with pytest.raises(ConfigError, match="of the cache were overwritten or dropped before the"):
        one_graph(chunk, inputs, wan.new_cache(chunk, PROBLEM))
    cache = wan.new_cache(chunk, PROBLEM, chunk_frames=21)
    wan.stream(chunk, cache, inputs, 3)
    flow = chunk(**wan.frames_of(inputs, 18, 3), cache=cache, update_cache=False)
    with torch.no_grad():
        chunk(**wan.frames_of(PROBLEM.inputs(1), 15, 3), cache=cache)
    with pytest.raises(ConfigError, match=r"frames 0-2, 12-17 of the cache were overwritten or dr"):
        flow.sum().backward()


LONG = wan.Problem(frames=45, batch=1)
LENGTH = 21
"""Frames that are encoded anew."""


def clean(problem: wan.Problem, number: int = 0) -> dict[str, Tensor]:
    inputs = problem.inputs(number)
    return {**inputs, "timesteps": torch.zeros_like(inputs["timesteps"])}


def first_frames(inputs: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return {**inputs, "x": inputs["x"][:, :count], "timesteps": inputs["timesteps"][:, :count]}


def switch(chunk: VideoDiT, cache: KVCache, inputs: Tensors, end: int, **settings: Any) -> None:
    first = max(0, end - LENGTH)
    if not settings and first:
        settings = {"sink_latents": inputs["x"][:, :3]}
    x = inputs["x"][:, first:end]
    given = {"latents": x, "first_frame": first, "text": inputs["text"]}
    recache(chunk, cache, timestep=0.0, **given, **settings)


@pytest.mark.parametrize("end", [12, 21])
@ranks()
def test_the_same_prompt_gives_the_same_cache(context: ParallelContext, end: int) -> None:
    """Give the whole history, of which each frame was written back under the same mask."""
    chunk, _, cache = wan.cached(LONG, context, chunk_frames=21)
    inputs = clean(LONG)
    wan.stream(chunk, cache, first_frames(inputs, end), 3)
    before = wan.held(cache)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    switch(chunk, cache, inputs, end)
    after = wan.held(cache)
    assert after.keys() == before.keys() and cache.end == end
    assert max(largest(after[f], kv) for f, kv in before.items()) < 1e-5


@pytest.mark.parametrize("end", [21, 39])
@ranks()
def test_nothing_of_the_first_prompt_is_left(context: ParallelContext, end: int) -> None:
    chunk, inputs = one(LONG, context), clean(LONG)
    second = {**inputs, "text": LONG.inputs(2)["text"]}
    flows = []
    for number in (0, 1):
        cache = wan.new_cache(chunk, LONG, chunk_frames=21)
        first = {**inputs, "text": LONG.inputs(number)["text"]}
        wan.stream(chunk, cache, first_frames(first, end), 3)
        switch(chunk, cache, second, end)
        flows.append(wan.stream(chunk, cache, first_frames(second, end + 6), 3, start=end))
    assert torch.equal(*flows)


@ranks()
def test_a_window_of_frames_is_recached_as_the_dense_mask_says(context: ParallelContext) -> None:
    """Encode sinks and frames 18 to 38 alone, in one pass each, and block by block."""
    chunk, _, cache = wan.cached(LONG, context, chunk_frames=21)
    inputs = clean(LONG)
    switch(chunk, cache, inputs, 39)
    other = wan.new_cache(chunk, LONG, chunk_frames=21)
    with torch.no_grad():
        chunk(**wan.frames_of(inputs, 0, 3), cache=other)
        other.skip_to(18)
        chunk(**wan.frames_of(inputs, 18, 21), cache=other)
    wanted = wan.held(other)
    assert all(largest(kv, wanted[f]) < 1e-5 for f, kv in wan.held(cache).items())
    follow = [wan.stream(chunk, c, inputs, 3, start=39) for c in (cache, other)]
    assert largest(*follow) < 1e-5


@ranks()
def test_a_first_frame_alone_is_recached_as_the_dense_mask_says(context: ParallelContext) -> None:
    """Encode all frames, as each was written back; then frames 16 to 36 and sinks of two blocks."""
    problem = dataclasses.replace(LONG, options=wan.ALONE, frames=46)
    chunk, _, cache = wan.cached(problem, context, chunk_frames=22)
    inputs = clean(problem)
    with torch.no_grad():
        for piece in ((0, 1), *((start, 3) for start in range(1, 22, 3))):
            chunk(**wan.frames_of(inputs, *piece), cache=cache)
    before = wan.held(cache)
    given = {"first_frame": 0, "timestep": 0.0, "text": inputs["text"]}
    recache(chunk, cache, latents=inputs["x"][:, :22], **given)
    after = wan.held(cache)
    assert after.keys() == before.keys() and cache.end == 22
    assert max(largest(after[f], kv) for f, kv in before.items()) < 1e-5
    given["first_frame"] = 16
    newest = inputs["x"][:, 16:37]
    with pytest.raises(ConfigError, match=r"`sink_latents` \(1 frames\) must hold the first 4 fra"):
        recache(chunk, cache, latents=newest, **given, sink_latents=inputs["x"][:, :1])
    recache(chunk, cache, latents=newest, **given, sink_latents=inputs["x"][:, :7])
    other = wan.new_cache(chunk, problem, chunk_frames=22)
    with torch.no_grad():
        chunk(**wan.frames_of(inputs, 0, 4), cache=other)
        other.skip_to(16)
        chunk(**wan.frames_of(inputs, 16, 21), cache=other)
    wanted = wan.held(other)
    assert cache.frames == other.frames == (0, 1, 2, *range(16, 37))
    assert all(largest(kv, wanted[f]) < 1e-5 for f, kv in wan.held(cache).items())


@ranks()
def test_sinks_that_are_neither_given_nor_held_are_refused(context: ParallelContext) -> None:
    chunk, _, cache = wan.cached(LONG, context)
    inputs = clean(LONG)
    wan.stream(chunk, cache, first_frames(inputs, 21), 3)
    before = wan.held(cache)
    with pytest.raises(ConfigError, match=r"`sink_latents` \(0 frames\) must hold the first 3 fra"):
        switch(chunk, cache, inputs, 39, sink_latents=None)
    with pytest.raises(ConfigError, match="`sink_latents` were given, but `keep_sink` ignores"):
        switch(chunk, cache, inputs, 39, sink_latents=inputs["x"][:, :3], keep_sink=True)
    with pytest.raises(ConfigError, match="`keep_sink` keeps frames 0 to 2, but `latents` begin"):
        switch(chunk, cache, inputs, 21, keep_sink=True)
    with pytest.raises(DataError, match=r"`num_frames` \(20\) must be a multiple of the frame bl"):
        switch(chunk, cache, inputs, 20)
    # A refusal leaves the cache as it was.
    assert all(torch.equal(kv, before[f]) for f, kv in wan.held(cache).items())
    with pytest.raises(ConfigError, match=r"`keep_sink` needs the sink frames \(0 to 2\) in the"):
        switch(chunk, wan.new_cache(chunk, LONG), inputs, 39, keep_sink=True)


@ranks()
def test_sinks_may_be_kept_and_be_several_or_partial_blocks(context: ParallelContext) -> None:
    chunk, _, cache = wan.cached(LONG, context)
    inputs = clean(LONG)
    wan.stream(chunk, cache, first_frames(inputs, 39), 3)
    before = wan.held(cache)
    other = {**inputs, "text": LONG.inputs(1)["text"]}
    switch(chunk, cache, other, 39, keep_sink=True)
    after = wan.held(cache)
    assert cache.frames == (0, 1, 2, *range(30, 39))
    for frame in cache.frames:
        assert torch.equal(after[frame], before[frame]) == (frame < 3)
    options = dataclasses.replace(wan.CAUSAL, window=FrameWindow(3, 13, 4))
    problem = dataclasses.replace(LONG, options=options)
    chunk, _, cache = wan.cached(problem, context, chunk_frames=21)
    inputs = clean(problem)
    switch(chunk, cache, inputs, 39, sink_latents=inputs["x"][:, :9])
    assert cache.frames == (0, 1, 2, 3, *range(18, 39))
    with pytest.raises(ConfigError, match=r"`sink_latents` \(3 frames\) must hold the first 6 fra"):
        switch(chunk, cache, inputs, 39, sink_latents=inputs["x"][:, :3])
