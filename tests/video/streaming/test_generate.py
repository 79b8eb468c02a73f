"""Videos that are generated block by block, against generation without any cache."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.wan.recache import recache as recache_of_model
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.generate import Scene, generate_blocks, num_sinks
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import Generator
from megatron_ext.video.streaming.sequence import Replica
from tests.ranks import ranks
from tests.video.model.wan.problem import Problem, new_cache, plain_of
from tests.video.networks import largest, one
from tests.video.streaming.network import (
    OPTIONS,
    PLAIN,
    Cache,
    Window,
    build,
    clips_of,
    network,
    new_of,
    prompts,
    recache,
    switching_at,
    text_of,
)

WINDOW = Window()
LENGTH = 27
SHAPE = (3, 2, 2, 2)
SEED = 1


def video(
    scenes: Sequence[tuple[int, str]],
    *,
    length: int = LENGTH,
    context_noise: float = 0.0,
    sink: str = "rebuild",
    window: Window = WINDOW,
    shift: float = 0.0,
) -> Tensor:
    """Return latents of two videos of the tiny network, with as small a cache as it takes."""
    model = network(window)
    cache = Cache(window, window.window, len(model.layers))
    schedule = NoiseSchedule(StreamingConfig(context_noise=context_noise))
    generator = Generator(model, cache, schedule)
    texts = [torch.stack([text_of(s, which) for s in (0, 1)]) for _, which in scenes]
    texts[-1] = texts[-1] + shift
    blocks = generate_blocks(
        generator,
        recache,
        [Scene(frame, text) for (frame, _), text in zip(scenes, texts, strict=True)],
        noise_of(),
        num_frames=length,
        keep_sink=sink == "keep",
    )
    made = list(blocks)
    assert [frame for frame, _ in made] == list(range(0, length, window.block))
    return torch.cat([latents for _, latents in made], dim=1)


def noise_of() -> functools.partial[Tensor]:
    like = torch.empty(0, dtype=torch.float64)
    return functools.partial(decisions.block_noise, SEED, (0, 1), SHAPE, like=like)


@ranks()
def test_blocks_are_those_of_dense_masked_passes(context: ParallelContext) -> None:
    """Compare with a plain network that sees all frames so far in one masked pass."""
    problem = Problem(frames=30, batch=2)
    window = problem.options.window
    clip = one(problem, context, torch.float64)
    plain, schedule = plain_of(clip), NoiseSchedule(StreamingConfig())
    assert window is not None
    cache = new_cache(clip, problem)
    assert cache.capacity_frames == window.window < problem.frames
    text = problem.inputs(dtype=torch.float64)["text"]
    shape = (window.block, problem.sizes.channels, problem.height, problem.width)
    noise = functools.partial(decisions.block_noise, SEED, (4, 9), shape, like=text)
    past = text.new_empty(2, 0, *shape[1:])
    for frame, latents in generate_blocks(
        Generator(clip, cache, schedule),
        recache_of_model,
        [Scene(0, text)],
        noise,
        num_frames=problem.frames,
        keep_sink=False,
    ):
        x = noise(frame, 0)
        for step, t in enumerate(schedule.denoising_timesteps):
            times = torch.tensor([0.0] * frame + [t] * window.block).expand(2, -1)
            with torch.no_grad():
                flow = plain(torch.cat([past, x], dim=1), times, text, problem.rule)
            sigma = float(schedule.sigma(torch.tensor(t)))
            x0 = x - sigma * flow[:, frame:]
            if step < 3:
                after = torch.tensor(schedule.denoising_timesteps[step + 1])
                sigma = float(schedule.sigma(after))
                x = (1 - sigma) * x0 + sigma * noise(frame, step + 1)
        assert largest(latents, x0) < 1e-9, frame
        past = torch.cat([past, latents], dim=1)


@pytest.mark.parametrize("sink", ["rebuild", "keep"])
@pytest.mark.parametrize("context_noise", [0.0, 100.0])
@pytest.mark.parametrize("switch", [None, 3, 15])
def test_blocks_are_those_of_a_training_rollout_with_all_steps(
    switch: int | None, context_noise: float, sink: str
) -> None:
    """Let training encode as many frames anew as the window holds, also after a switch."""
    options = PLAIN if switch is None else switching_at(switch, OPTIONS)
    options = dataclasses.replace(
        options,
        last_step_only=True,
        recache_frames=WINDOW.window,
        sink_at_switch=sink,
        context_noise=context_noise,
    )
    sequence = build(options, replica=Replica(seed=SEED, batch=2), window=WINDOW)
    want = torch.cat([new_of(clip) for clip in clips_of(sequence, 4)], dim=1)
    scenes = [(0, "text")] if switch is None else [(0, "text"), (switch, "after")]
    got = video(scenes, context_noise=context_noise, sink=sink)
    assert got.shape == want.shape == (2, LENGTH, 2, 2, 2)
    assert largest(got, want) < 1e-12


def test_a_prompt_acts_from_its_frame_on() -> None:
    scenes = [(0, "text"), (9, "after"), (18, "text")]
    base, moved = video(scenes), video(scenes, shift=1.0)
    assert torch.equal(base[:, :18], moved[:, :18])
    assert all(largest(base[:, i : i + 3], moved[:, i : i + 3]) > 1e-3 for i in (18, 21, 24))
    once = video(scenes[:2])
    assert torch.equal(once[:, :18], base[:, :18]) and not torch.equal(once[:, 18:], base[:, 18:])
    assert torch.equal(video(scenes[:1])[:, :9], base[:, :9])


@pytest.mark.parametrize("window", [Window(window=7, sink=1), Window(window=6, sink=0)])
def test_windows_and_sinks_need_not_be_whole_blocks(window: Window) -> None:
    """Check that a later prompt changes no block before it."""
    scenes = [(0, "text"), (12, "after")]
    got = video(scenes, window=window)
    assert torch.isfinite(got).all()
    assert num_sinks(window) % window.block == 0 and num_sinks(window) >= window.sink
    assert torch.equal(got[:, :12], video(scenes[:1], window=window)[:, :12])


def test_what_is_held_does_not_grow_with_the_length() -> None:
    model = network(WINDOW)
    cache = Cache(WINDOW, WINDOW.window, len(model.layers))
    text = prompts((0, 1)).text
    blocks = generate_blocks(
        Generator(model, cache, NoiseSchedule(StreamingConfig())),
        recache,
        [Scene(0, text), Scene(30, text + 1)],
        noise_of(),
        num_frames=90,
        keep_sink=False,
    )
    alive: list[weakref.ref[Tensor]] = []
    for _, latents in blocks:
        alive.append(weakref.ref(latents))
        del latents
        # The window and the sinks, in whole blocks.
        assert sum(one() is not None for one in alive) <= 3
        assert len(cache.held) <= WINDOW.window
    assert len(alive) == 30


def numpy_state() -> bytes:
    state = np.random.get_state(legacy=False)["state"]
    return bytes(state["key"].tobytes()) + bytes([state["pos"] % 256])


def test_no_stream_of_random_numbers_is_touched() -> None:
    torch.manual_seed(3)
    before, numpy_before = torch.get_rng_state(), numpy_state()
    model = network(WINDOW)  # seeds torch
    torch.set_rng_state(before)
    cache = Cache(WINDOW, WINDOW.window, len(model.layers))
    generator = Generator(model, cache, NoiseSchedule(StreamingConfig()))
    scenes = [Scene(0, prompts((0, 1)).text)]
    for _ in generate_blocks(generator, recache, scenes, noise_of(), num_frames=9, keep_sink=True):
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    assert numpy_state() == numpy_before


@pytest.mark.parametrize(
    ("starts", "length", "message"),
    [
        ([0], 10, r"`num_frames` \(10\) must be a positive multiple of the frame block \(3\)"),
        ([0], 0, r"`num_frames` \(0\) must be a positive multiple"),
        ([], 9, r"scenes begin at frames none, but must begin at 0"),
        ([3], 9, r"scenes begin at frames 3, but must begin at 0"),
        ([0, 4], 9, r"frames 0, 4, but .* later multiples of the frame block \(3\)"),
        ([0, 6, 3], 9, r"frames 0, 6, 3, but .* in order and before the end \(9\)"),
        ([0, 9], 9, r"frames 0, 9, but .* before the end \(9\)"),
    ],
)
def test_scenes_that_do_not_fit_are_refused_at_once(
    starts: list[int], length: int, message: str
) -> None:
    model = network(WINDOW)
    cache = Cache(WINDOW, WINDOW.window, len(model.layers))
    scenes = [Scene(start, torch.zeros(2, 3, 4, dtype=torch.float64)) for start in starts]
    generator = Generator(model, cache, NoiseSchedule(StreamingConfig()))
    with pytest.raises(DataError, match=message):
        generate_blocks(generator, recache, scenes, noise_of(), num_frames=length, keep_sink=False)
