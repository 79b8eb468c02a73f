"""Prompt switches: history encoded anew."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.wan.attention import FrameWindow
from megatron_ext.video.model.wan.cache import KVCache
from megatron_ext.video.model.wan.model import VideoDiT
from megatron_ext.video.model.wan.recache import recache
from tests.ranks import ranks
from tests.video.model.wan.problem import CAUSAL, Problem, frames_of, held, new_cache, stream
from tests.video.networks import largest, one

LONG = Problem(frames=45, batch=1)
LENGTH = 21
"""Frames that are encoded anew."""


def clean(problem: Problem, number: int = 0) -> dict[str, Tensor]:
    """Frames as they are written back: the network is told that there is no noise."""
    inputs = problem.inputs(number)
    return {**inputs, "timesteps": torch.zeros_like(inputs["timesteps"])}


def first_frames(inputs: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return {**inputs, "x": inputs["x"][:, :count], "timesteps": inputs["timesteps"][:, :count]}


def switch(
    chunk: VideoDiT, cache: KVCache, inputs: dict[str, Tensor], end: int, **settings: object
) -> None:
    """Encode the frames before ``end`` anew under the text of ``inputs``."""
    first = max(0, end - LENGTH)
    if not settings and first:
        settings = {"sink_latents": inputs["x"][:, :3]}
    x = inputs["x"][:, first:end]
    recache(
        chunk, cache, latents=x, first_frame=first, timestep=0.0, text=inputs["text"], **settings
    )


@pytest.mark.parametrize("end", [12, 21])
@ranks()
def test_the_same_prompt_gives_the_same_cache(context: ParallelContext, end: int) -> None:
    """The whole history is given: each frame was written back under the same mask."""
    chunk, inputs = one(LONG, context), clean(LONG)
    cache = new_cache(chunk, LONG, chunk_frames=21)
    stream(chunk, cache, first_frames(inputs, end), 3)
    before = held(cache)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    switch(chunk, cache, inputs, end)
    after = held(cache)
    assert after.keys() == before.keys() and cache.end == end
    assert max(largest(after[f], kv) for f, kv in before.items()) < 1e-5


@ranks()
def test_no_attended_key_is_zero_or_old(context: ParallelContext) -> None:
    """Frames 0 to 2 and 18 to 38 are held, all of them made anew."""
    chunk, inputs = one(LONG, context), clean(LONG)
    cache = new_cache(chunk, LONG, chunk_frames=21)
    stream(chunk, cache, first_frames(inputs, 39), 3)
    before = held(cache)
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    other = {**inputs, "text": LONG.inputs(1)["text"]}
    switch(chunk, cache, other, 39)
    after = held(cache)
    assert cache.frames == (0, 1, 2, *range(18, 39))
    assert all(float(kv.norm(dim=-1).min()) > 0.1 for kv in after.values())
    # What the text decides is new everywhere: keys and values of the second block.
    assert all(largest(after[f][1::2], before[f][1::2]) > 1e-3 for f in after if f in before)


@pytest.mark.parametrize("end", [21, 39])
@ranks()
def test_nothing_of_the_first_prompt_is_left(context: ParallelContext, end: int) -> None:
    """The same latents under two first prompts: bit for bit the same from the switch on."""
    chunk, inputs = one(LONG, context), clean(LONG)
    second = {**inputs, "text": LONG.inputs(2)["text"]}
    flows = []
    for number in (0, 1):
        cache = new_cache(chunk, LONG, chunk_frames=21)
        first = {**inputs, "text": LONG.inputs(number)["text"]}
        stream(chunk, cache, first_frames(first, end), 3)
        switch(chunk, cache, second, end)
        flows.append(stream(chunk, cache, first_frames(second, end + 6), 3, start=end))
    assert torch.equal(*flows)


@ranks()
def test_a_window_of_frames_is_recached_as_the_dense_mask_says(context: ParallelContext) -> None:
    """Sinks and frames 18 to 38 alone, in one pass each, give the same as block by block."""
    chunk, inputs = one(LONG, context), clean(LONG)
    cache = new_cache(chunk, LONG, chunk_frames=21)
    switch(chunk, cache, inputs, 39)
    other = new_cache(chunk, LONG, chunk_frames=21)
    with torch.no_grad():
        chunk(**frames_of(inputs, 0, 3), cache=other)
        other.skip_to(18)
        chunk(**frames_of(inputs, 18, 21), cache=other)
    wanted = held(other)
    assert all(largest(kv, wanted[f]) < 1e-5 for f, kv in held(cache).items())
    follow = [stream(chunk, c, inputs, 3, start=39) for c in (cache, other)]
    assert largest(*follow) < 1e-5


@ranks()
def test_sinks_may_be_kept_as_the_first_prompt_made_them(context: ParallelContext) -> None:
    """And only then: the original's `global_sink` was never read."""
    chunk, inputs = one(LONG, context), clean(LONG)
    cache = new_cache(chunk, LONG)
    stream(chunk, cache, first_frames(inputs, 39), 3)
    before = held(cache)
    other = {**inputs, "text": LONG.inputs(1)["text"]}
    switch(chunk, cache, other, 39, keep_sink=True)
    after = held(cache)
    assert cache.frames == (0, 1, 2, *range(30, 39))
    for frame in cache.frames:
        assert torch.equal(after[frame], before[frame]) == (frame < 3)


@ranks()
def test_sinks_of_several_or_partial_blocks(context: ParallelContext) -> None:
    """Four sink frames need two blocks of latents; the two spare frames are seen no more."""
    options = dataclasses.replace(CAUSAL, window=FrameWindow(3, 13, 4))
    problem = dataclasses.replace(LONG, options=options)
    chunk, inputs = one(problem, context), clean(problem)
    cache = new_cache(chunk, problem, chunk_frames=21)
    switch(chunk, cache, inputs, 39, sink_latents=inputs["x"][:, :9])
    assert cache.frames == (0, 1, 2, 3, *range(18, 39))
    with pytest.raises(ConfigError, match=r"`sink_latents` \(3 frames\) must hold the first 6 fra"):
        switch(chunk, cache, inputs, 39, sink_latents=inputs["x"][:, :3])


@ranks()
def test_sinks_that_are_neither_given_nor_held_are_refused(context: ParallelContext) -> None:
    chunk, inputs = one(LONG, context), clean(LONG)
    cache = new_cache(chunk, LONG)
    stream(chunk, cache, first_frames(inputs, 21), 3)
    before = held(cache)
    with pytest.raises(ConfigError, match=r"`sink_latents` \(0 frames\) must hold the first 3 fra"):
        switch(chunk, cache, inputs, 39, sink_latents=None)
    with pytest.raises(ConfigError, match="`sink_latents` were given, but `keep_sink` ignores"):
        switch(chunk, cache, inputs, 39, sink_latents=inputs["x"][:, :3], keep_sink=True)
    with pytest.raises(
        ConfigError, match="`keep_sink` keeps frames 0 to 2, but `latents` begin at"
    ):
        switch(chunk, cache, inputs, 21, keep_sink=True)
    with pytest.raises(
        DataError, match=r"`num_frames` \(20\) must be a multiple of the frame block"
    ):
        recache(
            chunk,
            cache,
            latents=inputs["x"][:, :20],
            first_frame=0,
            timestep=0.0,
            text=inputs["text"],
        )
    # A refusal leaves the cache as it was.
    assert all(torch.equal(kv, before[f]) for f, kv in held(cache).items())
    with pytest.raises(ConfigError, match=r"`keep_sink` needs the sink frames \(0 to 2\) in the"):
        switch(chunk, new_cache(chunk, LONG), inputs, 39, keep_sink=True)
