"""The cache: streaming equals the dense masked forward, its bookkeeping, and the text's memo."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.cache import (
    CachePass,
    CacheShape,
    KVCache,
    TextMemo,
    _checked_sinks,
    _ranges,
)
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.wan.model import VideoDiT
from tests.ranks import ranks
from tests.video.networks.harness import largest, one
from tests.video.networks.wan import problem as wan

WINDOWS = [(3, 12, 3), (3, 12, 0), (3, 6, 3), (3, 6, 0), (2, 9, 3), (3, 14, 4)]


@pytest.mark.parametrize("sizes", WINDOWS, ids=str)
@ranks()
def test_streaming_is_the_dense_pass(context: ParallelContext, sizes: tuple[int, int, int]) -> None:
    """Pass 36 frames through a cache of 12 or fewer; plain torch makes the dense mask itself."""
    window = FrameWindow(*sizes)
    options = dataclasses.replace(wan.CAUSAL, window=window)
    problem = wan.Problem(options=options, frames=36, batch=1)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        chunk = one(problem, context, dtype)
        inputs = problem.inputs(dtype=dtype)
        double = {k: v.double() for k, v in inputs.items()}
        want = wan.plain_of(chunk)(**double, rule=problem.rule)
        cache = wan.new_cache(chunk, problem)
        assert cache.capacity_frames == window.window < problem.frames
        assert largest(wan.stream(chunk, cache, inputs, window.block), want) < tolerance
        assert largest(chunk(**inputs), want) < tolerance
        assert cache.end == 36 and len(cache.frames) == window.window


@pytest.mark.parametrize("sizes", [(3, 12, 3), (3, 6, 0), (3, 14, 4), (2, 9, 4)], ids=str)
@ranks()
def test_a_first_frame_alone_is_streamed_as_the_dense_pass(
    context: ParallelContext, sizes: tuple[int, int, int]
) -> None:
    """Pass 37 frames block by block, the first alone, and several blocks at once."""
    window = FrameWindow(*sizes, first_alone=True)
    options = dataclasses.replace(wan.CAUSAL, window=window)
    problem = wan.Problem(options=options, frames=37, batch=1)
    chunk, inputs = one(problem, context, torch.float64), problem.inputs(dtype=torch.float64)
    want = wan.plain_of(chunk)(**inputs, rule=problem.rule)
    assert largest(chunk(**inputs), want) < 1e-12
    block = window.block
    for first, later in ((1, block), (1 + 2 * block, 6), (37, 36)):
        cache = wan.new_cache(chunk, problem, chunk_frames=None if first == 1 else first)
        pieces = [(0, first), *((start, later) for start in range(first, 37, later))]
        pieces = [(start, min(count, 37 - start)) for start, count in pieces]
        with torch.no_grad():
            made = [chunk(**wan.frames_of(inputs, *piece), cache=cache) for piece in pieces]
        assert largest(torch.cat(made, dim=1), want) < 1e-12
        assert cache.end == 37
    # All blocks of a chunk that holds the first frame can be run again at its end.
    cache = wan.new_cache(chunk, problem, chunk_frames=37)
    with torch.no_grad():
        chunk(**wan.frames_of(inputs, 0, 37), cache=cache)
        for start, count in ((0, 1), (1, block), (37 - block, block)):
            again = chunk(**wan.frames_of(inputs, start, count), cache=cache, update_cache=False)
            assert largest(again, want[:, start : start + count]) < 1e-12


@ranks()
def test_frames_that_do_not_begin_behind_the_first_are_refused(context: ParallelContext) -> None:
    problem = wan.Problem(options=wan.ALONE, frames=10, batch=1)
    chunk, inputs = one(problem, context), problem.inputs()
    for start, count, text in (
        (0, 3, r"`num_frames` \(3\) must be 1 \+ a multiple of the frame block \(3\); run whole"),
        (3, 3, r"`first_frame` \(3\) must be 0 or 1 \+ a multiple of the frame block \(3\)"),
        (1, 4, r"`num_frames` \(4\) must be a multiple of the frame block \(3\)"),
    ):
        with pytest.raises(DataError, match=text):
            chunk(**wan.frames_of(inputs, start, count))
    text = r"`chunk_frames` \(5\) must be a positive multiple of the frame block \(3\), or 1 more"
    with pytest.raises(ConfigError, match=text):
        wan.new_cache(chunk, problem, chunk_frames=5)


@pytest.mark.parametrize("capacity", [30, 33])
@ranks()
def test_a_cache_of_a_chunk_gives_the_same(context: ParallelContext, capacity: int) -> None:
    """Pass several blocks at once, and more frames than the cache holds."""
    problem = wan.Problem(frames=42, batch=1)
    chunk, inputs = one(problem, context, torch.float64), problem.inputs(dtype=torch.float64)
    want = chunk(**inputs).detach()
    cache = wan.new_cache(chunk, problem, chunk_frames=21, capacity_frames=capacity)
    assert largest(wan.stream(chunk, cache, inputs, 3), want) < 1e-12
    held = cache.frames
    assert held == (0, 1, 2, *range(42 - capacity + 3, 42))
    cache.reset()
    assert largest(wan.stream(chunk, cache, inputs, 21), want) < 1e-12
    cache.reset()
    assert largest(wan.stream(chunk, cache, inputs, 42), want) < 1e-12
    assert cache.frames == held


@ranks()
def test_repeating_a_forward_rewrites_its_block_only(context: ParallelContext) -> None:
    problem = wan.Problem(frames=24, batch=1)
    chunk, inputs, cache = wan.cached(problem, context, chunk_frames=6)
    other = problem.inputs(1)
    sinks = None
    with torch.no_grad():
        for first in range(0, 24, 3):
            chunk(**wan.frames_of(inputs, first, 3), cache=cache)
            pointers, before = (cache.end, cache.frames), wan.held(cache)
            assert pointers[0] == first + 3
            chunk(**wan.frames_of(other, first, 3), cache=cache)
            after = wan.held(cache)
            assert pointers == (cache.end, cache.frames)
            changed = [f for f in after if not torch.equal(after[f], before[f])]
            assert changed == [first, first + 1, first + 2]
            sinks = sinks or [after[f] for f in range(3)]
            assert all(torch.equal(after[f], sink) for f, sink in enumerate(sinks))
        # A block further back, which is still held.
        chunk(**wan.frames_of(inputs, 18, 3), cache=cache)
        changed = [f for f, kv in wan.held(cache).items() if not torch.equal(kv, after[f])]
        assert changed == [18, 19, 20] and cache.end == 24


@ranks()
def test_a_pass_that_does_not_update_writes_nothing(context: ParallelContext) -> None:
    problem = wan.Problem(frames=15, batch=1)
    chunk, inputs, cache = wan.cached(problem, context, chunk_frames=6)
    wan.stream(chunk, cache, {**inputs, "x": inputs["x"][:, :12]}, 3)
    before, end = wan.held(cache), cache.end
    new = chunk(**wan.frames_of(inputs, 12, 3), cache=cache, update_cache=False)
    again = chunk(**wan.frames_of(problem.inputs(1), 9, 3), cache=cache, update_cache=False)
    (new + again).sum().backward()
    after = wan.held(cache)
    assert cache.end == end and after.keys() == before.keys()
    assert all(torch.equal(after[f], kv) for f, kv in before.items())
    want = chunk(**inputs).detach()
    assert largest(new, want[:, 12:]) < 1e-5


@ranks()
def test_a_failed_pass_leaves_the_cache_as_it_was(context: ParallelContext) -> None:
    chunk, inputs, cache = wan.cached(wan.Problem(frames=6, batch=1), context)
    want = wan.stream(chunk, cache, inputs, 3)
    cache.reset()
    wan.stream(chunk, cache, {**inputs, "x": inputs["x"][:, :3]}, 3)
    before = wan.held(cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = chunk.blocks["1"].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
        chunk(**wan.frames_of(inputs, 3, 3), cache=cache)
    hook.remove()
    assert cache.frames == (0, 1, 2) and cache.end == 3
    assert all(torch.equal(kv, before[f]) for f, kv in wan.held(cache).items())
    assert torch.equal(wan.stream(chunk, cache, inputs, 3, start=3), want[:, 3:])


@ranks()
def test_too_small_a_capacity_is_refused(context: ParallelContext) -> None:
    problem = wan.Problem(frames=42, batch=1)
    chunk, inputs = one(problem, context), problem.inputs()
    for chunk_frames, needed, less in ((18, 27, 1), (21, 30, 3)):
        message = (
            rf"`capacity_frames` \({needed - less}\) must be {needed} or more: window \(12\) \+ "
            rf"chunk \({chunk_frames}\) - block \(3\)"
        )
        with pytest.raises(ConfigError, match=message):
            wan.new_cache(chunk, problem, chunk_frames=chunk_frames, capacity_frames=needed - less)
    with pytest.raises(ConfigError, match=r"`chunk_frames` \(20\) must be a positive multiple of"):
        wan.new_cache(chunk, problem, chunk_frames=20)
    cache = wan.new_cache(chunk, problem, chunk_frames=18)
    want = wan.stream(chunk, cache, inputs, 3)
    assert cache.capacity_frames == 27
    # The first block of an 18-frame chunk can be run again at its end, one before it cannot.
    got = chunk(**wan.frames_of(inputs, 24, 3), cache=cache, update_cache=False)
    assert largest(got, want[:, 24:27]) < 1e-5
    message = r"`capacity_frames` \(27\) must be 30 or more to run frame 21 again after frame 41"
    with pytest.raises(ConfigError, match=message):
        chunk(**wan.frames_of(inputs, 21, 3), cache=cache)


@ranks()
def test_frames_out_of_order_are_refused(context: ParallelContext) -> None:
    chunk, inputs, cache = wan.cached(wan.Problem(frames=24, batch=1), context)
    with pytest.raises(DataError, match=r"`first_frame` \(3\) must not exceed the frame at which"):
        chunk(**wan.frames_of(inputs, 3, 3), cache=cache)
    cache.skip_to(9)
    message = "frame 9 sees frame 2, which is not in the cache; it stands at frame 9 and holds noth"
    with pytest.raises(DataError, match=message):
        chunk(**wan.frames_of(inputs, 9, 3), cache=cache)
    cache.reset()
    chunk(**wan.frames_of(inputs, 0, 3), cache=cache)
    cache.skip_to(9)
    chunk(**wan.frames_of(inputs, 9, 3), cache=cache)
    assert cache.frames == (0, 1, 2, 9, 10, 11)
    with pytest.raises(DataError, match="frame 6 lies before frame 9, from which on the cache was"):
        chunk(**wan.frames_of(inputs, 6, 3), cache=cache)
    with pytest.raises(ConfigError, match="stands at frame 12 and cannot skip back to frame 9"):
        cache.skip_to(9)


@ranks()
def test_a_cache_that_is_reset_or_stored_goes_on_as_a_new_one(context: ParallelContext) -> None:
    """Compare bit for bit, also after the weights have changed: text too stays as it was made."""
    problem = wan.Problem(frames=24)
    chunk, inputs, cache = wan.cached(problem, context)
    wan.stream(chunk, cache, {**inputs, "x": inputs["x"][:, :18]}, 3)
    state = copy.deepcopy(cache.state_dict())
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.mul_(1.1)
    want = wan.stream(chunk, cache, inputs, 3, start=18)
    other = wan.new_cache(chunk, problem)
    wan.stream(chunk, other, problem.inputs(1), 3)
    other.load_state_dict(state)
    assert torch.equal(wan.stream(chunk, other, inputs, 3, start=18), want)
    assert other.frames == cache.frames and other.end == cache.end
    larger = wan.new_cache(chunk, problem, chunk_frames=6)
    with pytest.raises(CheckpointError, match=r"holds 2 blocks of \[12, 8, 2, 4, 16\], but this"):
        larger.load_state_dict(state)
    problem = wan.Problem(frames=18)
    chunk, inputs = one(problem, context), problem.inputs()
    fresh = wan.stream(chunk, wan.new_cache(chunk, problem), inputs, 3)
    cache = wan.new_cache(chunk, problem)
    wan.stream(chunk, cache, problem.inputs(1), 3)
    assert cache.memo.is_filled and cache.end == 18
    cache.reset()
    assert not cache.memo.is_filled
    assert (cache.end, cache.frames) == (0, ())
    assert torch.equal(wan.stream(chunk, cache, inputs, 3), fresh)


@settings(max_examples=60, deadline=None)
@given(
    sink=st.integers(0, 5),
    past=st.integers(0, 5),
    block=st.integers(1, 3),
    chunk_blocks=st.integers(1, 3),
    spare=st.integers(0, 4),
    alone=st.booleans(),
    moves=st.lists(st.integers(0, 6), min_size=1, max_size=30),
)
def test_whatever_is_run_again_the_frames_seen_are_the_last_written(
    sink: int, past: int, block: int, chunk_blocks: int, spare: int, alone: bool, moves: list[int]
) -> None:
    window = FrameWindow(block, sink + past + block, sink, first_alone=alone)
    chunk = chunk_blocks * block
    cache = KVCache(
        window, CacheShape(1, 1, 1, 1, 1), capacity_frames=window.capacity_for(chunk) + spare,
        chunk_frames=chunk, dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip
    written: list[float] = []
    starts: list[int] = []
    for number, move in enumerate(moves):
        if back := min(move, chunk_blocks, len(starts)):
            first = starts[-back]
        else:
            starts.append(first := len(written))
        size = 1 if alone and first == 0 else block
        values = [float(100 * number + i) for i in range(size)]
        reading = CachePass(cache, first, size, updates=True)
        got = {f: float(k) for f, (k, _) in zip(reading.past, reading.past_key_values(0))}  # noqa: B905
        seen = [f for part in window.visible(first) for f in part if f < first]
        assert got == {f: written[f] for f in seen}
        new = torch.tensor(values, dtype=torch.float64).view(size, 1, 1, 1, 1)
        reading.record(0, new, -new)
        reading.finish()
        written[first : first + size] = values
        assert cache.end == len(written)
        assert len(cache.frames) == min(len(written), cache.capacity_frames)
        keys = {f: float(cache.keys[0][cache.slot_of(f)]) for f in cache.frames}
        assert keys == {f: written[f] for f in cache.frames}
        assert keys == {f: -float(cache.values[0][cache.slot_of(f)]) for f in cache.frames}


def small_cache() -> KVCache:
    """Return a cache of single frames, each of which sees the first and the three before it."""
    return KVCache(
        FrameWindow(1, 5, 1), CacheShape(1, 1, 1, 1, 1), capacity_frames=6, chunk_frames=2,
        dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip


def run_frames(cache: KVCache, *frames: int) -> list[tuple[int, ...]]:
    """Write each frame's number as its key; return the frames that each one sees."""
    seen = []
    for frame in frames:
        reading = CachePass(cache, frame, 1, updates=True)
        seen.append(reading.past)
        new = torch.full((1, 1, 1, 1, 1), float(frame), dtype=torch.float64)
        reading.record(0, new, -new)
        reading.finish()
    return seen


def test_frames_before_a_skip_are_absent_until_the_cache_is_reset() -> None:
    cache = small_cache()
    assert run_frames(cache, 0, 1, 2)[-1] == (0, 1)
    cache.skip_to(3)
    assert cache.frames == (0,)
    assert run_frames(cache, 3, 4) == [(0,), (0, 3)]
    cache.skip_to(7)
    assert run_frames(cache, 7) == [(0,)]
    # A stored cache says which frames were skipped, and holds them after later passes.
    state = cache.state_dict()
    state["keys"] = [key.clone() for key in state["keys"]]
    wanted = run_frames(cache, 8, 9)
    assert wanted == [(0, 7), (0, 7, 8)]
    other = small_cache()
    run_frames(other, *range(6))
    reading = CachePass(other, 6, 1, updates=False)
    other.load_state_dict(state)
    assert run_frames(other, 8, 9) == wanted
    with pytest.raises(ConfigError, match="were overwritten or dropped before the backward"):
        reading.past_key_values(0)
    cache.reset(keep_sink=True)
    assert (cache.frames, cache.end) == ((0,), 1)
    for _ in range(2):
        assert run_frames(cache, 1, 2, 3, 4) == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
        cache.reset()
        assert (cache.frames, cache.end) == ((), 0)
        run_frames(cache, 0)


def test_a_pass_is_refused_that_was_open_when_a_cache_was_loaded() -> None:
    """Load the same frames into the same slots, all of the last write, whose keys may differ."""
    cache, other = small_cache(), small_cache()
    new = torch.ones(3, 1, 1, 1, 1, dtype=torch.float64)
    for each in (cache, other):
        writing = CachePass(each, 0, 3, updates=True)
        writing.record(0, new, new)
        writing.finish()
    reading = CachePass(cache, 3, 1, updates=False)
    reading.past_key_values(0)
    cache.load_state_dict(other.state_dict())
    with pytest.raises(ConfigError, match="frames 0-2 of the cache were overwritten"):
        reading.past_key_values(0)


def test_sinks_are_kept_or_given_from_the_frame_behind_them_on() -> None:
    cache = small_cache()
    run_frames(cache, 0, 1, 2)
    assert _checked_sinks(cache, 1, None, keep_sink=True) == 1
    with pytest.raises(ConfigError, match="would overwrite them; begin at frame 1 or later"):
        _checked_sinks(cache, 0, None, keep_sink=True)
    given = torch.zeros(1, 1, 1, 1, 1)
    assert _checked_sinks(cache, 2, given, keep_sink=False) == 1
    with pytest.raises(ConfigError, match=r"`sink_latents` \(0 frames\) must hold the first 1"):
        _checked_sinks(cache, 2, given[:, :0], keep_sink=False)
    assert _ranges([0, 1, 2, 9, 11, 12]) == "0-2, 9, 11-12" and _ranges([]) == "nothing"


def test_a_memo_is_independent_of_its_text_and_of_what_was_stored() -> None:
    memo, text = TextMemo(1), torch.ones(1, 2, 3)
    assert not memo.begin(text)
    memo.key_values[0] = text, text
    state = memo.state_dict()
    text.add_(1)
    assert memo.text is not None and torch.equal(memo.text, torch.ones(1, 2, 3))
    # Another text does not empty what was stored, and what is loaded does not grow with the other.
    assert memo.begin(torch.ones(1, 2, 3)) and not memo.begin(text)
    assert not memo.is_filled and len(state["key_values"]) == 1
    memo.load_state_dict(state)
    assert memo.is_filled and memo.begin(torch.ones(1, 2, 3))
    memo.key_values[1] = text, text
    assert len(state["key_values"]) == 1


def test_sizes_of_a_cache_come_from_the_model() -> None:
    shape = CacheShape(num_blocks=2, tokens=8, batch=3, num_heads=4, head_dim=16)
    cache = KVCache(
        FrameWindow(), shape, capacity_frames=12, chunk_frames=3, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert len(cache.keys) == len(cache.values) == 2
    assert cache.keys[0].shape == (12, 8, 3, 4, 16)
    assert cache.num_bytes == 2 * 2 * 12 * 8 * 3 * 64 * 2


@pytest.mark.parametrize("sink", [0, 3])
@pytest.mark.parametrize(("window", "chunk", "block"), [(12, 21, 3), (12, 3, 3), (6, 4, 1)])
@pytest.mark.parametrize(
    ("layers", "dtype", "size"), [(2, torch.bfloat16, 2), (5, torch.float32, 4)]
)
def test_the_bytes_of_a_cache_follow_from_window_chunk_and_layers(
    window: int, chunk: int, block: int, sink: int, layers: int, dtype: torch.dtype, size: int
) -> None:
    """Keys and values of the window and of what a chunk adds; sinks lie within the window."""
    shape = CacheShape(num_blocks=layers, tokens=8, batch=3, num_heads=4, head_dim=16)
    frames = FrameWindow(window=window, sink=sink, block=block)
    cache = KVCache(
        frames, shape, capacity_frames=frames.capacity_for(chunk), chunk_frames=chunk, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    wanted = 2 * layers * (window + chunk - block) * 8 * 3 * (4 * 16) * size
    assert cache.num_bytes == wanted
    assert wanted == sum(x.nbytes for x in (*cache.keys, *cache.values))


PROBLEM = wan.Problem(frames=6)


def count_projections(chunk: VideoDiT) -> list[int]:
    calls: list[int] = []
    for block in chunk.blocks.values():
        block.cross_attention.linear_kv.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@ranks()
def test_text_is_projected_once_unless_it_is_written_over(context: ParallelContext) -> None:
    chunk, inputs, cache = wan.cached(PROBLEM, context)
    calls = count_projections(chunk)
    wan.stream(chunk, cache, inputs, 3)
    wan.stream(chunk, cache, {**inputs, "text": inputs["text"].clone()}, 3, start=3)
    assert len(calls) == 2
    chunk(**wan.frames_of(inputs, 3, 3), cache=cache)
    assert len(calls) == 4
    cache.memo.clear()
    wan.stream(chunk, cache, inputs, 3, start=3)
    assert len(calls) == 6
    with torch.inference_mode():
        for _ in range(2):
            text = inputs["text"].clone()
            wan.stream(chunk, cache, {**inputs, "text": text}, 3, start=3)
    assert len(calls) == 6
    chunk, inputs, cache = wan.cached(PROBLEM, context)
    calls = count_projections(chunk)
    wan.stream(chunk, cache, inputs, 3)
    inputs["text"].copy_(PROBLEM.inputs(1)["text"])
    wan.stream(chunk, cache, inputs, 3, start=3)
    assert len(calls) == 4
    with torch.inference_mode():
        inputs["text"] = inputs["text"].clone()
        wan.stream(chunk, cache, inputs, 3, start=3)
        inputs["text"].add_(1)
        wan.stream(chunk, cache, inputs, 3, start=3)
    assert len(calls) == 6


@ranks()
def test_the_cache_follows_the_text(context: ParallelContext) -> None:
    chunk, inputs = one(PROBLEM, context, torch.float64), PROBLEM.inputs(dtype=torch.float64)
    plain = wan.plain_of(chunk)
    cache = wan.new_cache(chunk, PROBLEM)
    for text in (inputs["text"], PROBLEM.inputs(1, torch.float64)["text"]):
        wan.stream(chunk, cache, {**inputs, "text": text}, 3, start=cache.end and 3)
        words = plain.text_embedding(text)
        for number, block in enumerate(plain.blocks):
            _, key, value = block.cross_attn.qkv(words, words)
            for got, want in zip(cache.memo.key_values[number], (key, value), strict=True):
                assert largest(got.permute(1, 2, 0, 3), want) < 1e-12
