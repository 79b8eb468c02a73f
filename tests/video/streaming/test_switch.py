"""Prompt switches, and what the cache holds after them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.video.streaming.decisions import switch_candidates
from megatron_ext.video.streaming.rollout import Generator, StreamClip
from megatron_ext.video.streaming.sequence import StreamingSequence
from megatron_ext.video.streaming.state import Prompts
from tests.video.streaming.network import (
    OPTIONS,
    PAPER,
    PLAIN,
    Cache,
    Window,
    build,
    cache_of,
    clips_of,
    new_of,
    prompts,
    switching_at,
)


def with_prompts(which: str, shift: float) -> tuple[StreamingSequence, list[StreamClip]]:
    """Return a run whose first or second prompts are moved."""

    def source(samples: Sequence[int]) -> Prompts:
        given = prompts(samples)
        assert given.text_after is not None
        text = given.text + shift if which == "text" else given.text
        return Prompts(text, given.text_after + shift if which == "after" else given.text_after)

    sequence = build(switching_at(15), source=source)
    return sequence, clips_of(sequence, 4)


def test_output_follows_the_current_prompt() -> None:
    _, base = with_prompts("text", 0.0)
    _, other_after = with_prompts("after", 1.0)
    # 9, 15, 21, 27: the third clip is the first under the second prompt.
    for i in (0, 1):
        assert torch.equal(base[i].latents, other_after[i].latents)
        assert torch.equal(base[i].text, other_after[i].text)
    assert not torch.equal(new_of(base[2]), new_of(other_after[2]))
    for i in (2, 3):
        assert torch.equal(base[i].text, prompts(base[i].samples).text_after)


def test_after_the_switch_the_first_prompt_acts_through_frames_only() -> None:
    """Take the frames before it from another run, which leaves the first prompt no part."""
    outputs = []
    for shift in (0.0, 1.0):

        def source(samples: Sequence[int], shift: float = shift) -> Prompts:
            given = prompts(samples)
            return Prompts(given.text + shift, given.text_after)

        sequence = build(switching_at(15), source=source)
        clips_of(sequence, 2)
        assert sequence.state is not None
        sequence.state.previous = torch.linspace(-1, 1, 2 * 9 * 8).view(2, 9, 2, 2, 2).double()
        sequence.state.sink = sequence.state.previous[:, :3]
        outputs.append(torch.cat([new_of(c) for c in clips_of(sequence, 2)], dim=1))
    assert torch.equal(*outputs)


def test_recache_with_the_same_prompt_reproduces_the_cache() -> None:
    sequence = build(dataclasses.replace(PLAIN, recache_frames=9))
    clips_of(sequence, 1)
    before = copy.deepcopy(cache_of(sequence).held)
    sequence.rebuild_cache()
    after = cache_of(sequence).held
    assert after.keys() == before.keys() == set(range(9))
    for frame, layers in before.items():
        for old, new in zip(layers, after[frame], strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frames", [6, 9])
def test_holds_with_context_noise_too(frames: int) -> None:
    """Let the sinks also lie before the frames that are encoded anew."""
    options = dataclasses.replace(PLAIN, recache_frames=frames, context_noise=100.0)
    sequence = build(options)
    clips_of(sequence, 1)
    before = copy.deepcopy(cache_of(sequence).held)
    sequence.rebuild_cache()
    torch.testing.assert_close(cache_of(sequence).held, before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sink", ["rebuild", "keep"])
@pytest.mark.parametrize("frame", [9, 15, 21])
def test_the_sinks_after_a_switch(sink: str, frame: int) -> None:
    """Compare with the frames that were generated, under the second prompt or the first."""
    options = dataclasses.replace(switching_at(frame), sink_at_switch=sink, recache_frames=6)
    sequence = build(options)
    first = clips_of(sequence, 1)[0]
    under_first = copy.deepcopy(cache_of(sequence).held)
    clips_of(sequence, (frame - 9) // 6)
    assert sequence.state is not None and not sequence.state.has_switched
    clips_of(sequence, 1)
    assert sequence.state.has_switched
    held = cache_of(sequence).held
    assert all(bool((k != 0).any(dim=2).all()) for x in held.values() for k, _ in x)
    # What a network makes of the sink frames as the first ones of a video, under a prompt.
    fresh = Cache(Window(), 12, 2)
    text = first.text if sink == "keep" else prompts(first.samples).text_after
    t = torch.zeros(2, 3)
    with torch.no_grad():
        sequence.generator.network(x=first.latents[:, :3], timesteps=t, text=text, cache=fresh)
    for i in range(3):
        torch.testing.assert_close(held[i], fresh.held[i], rtol=0, atol=1e-12)
    same = all(torch.equal(a[0], b[0]) for i in range(3) for a, b in zip(
        held[i], under_first[i], strict=True))  # fmt: skip
    assert same == (sink == "keep")


def test_sinks_that_are_kept_and_are_all_there_is_are_left_alone() -> None:
    """Switch inside the sinks: those before the switch were made under the first prompt."""
    options = dataclasses.replace(switching_at(3), sink_at_switch="keep")
    sequence = build(options, window=Window(window=9, sink=6))
    first = clips_of(sequence, 1)[0]
    fresh = Cache(Window(window=9, sink=6), 15, 2)
    for frame, which in ((0, "text"), (3, "text_after")):
        sequence.generator.network(
            x=first.latents[:, frame : frame + 3],
            timesteps=torch.zeros(2, 3),
            text=getattr(prompts(first.samples), which),
            cache=fresh,
            first_frame=frame,
        )
    held = {f: cache_of(sequence).held[f] for f in range(6)}
    torch.testing.assert_close(held, fresh.held, rtol=0, atol=1e-12)


def test_recached_frames_see_their_own_past_only() -> None:
    """Move later frames, on which recached frames must not depend."""
    keys = []
    for moved in (0.0, 1.0):
        sequence = build(switching_at(15))
        clips_of(sequence, 2)
        assert sequence.state is not None
        sequence.state.previous[:, -3:] += moved
        sequence._switch(15, [])
        keys.append(cache_of(sequence).held)
    assert all(torch.equal(keys[0][f][1][0], keys[1][f][1][0]) for f in range(6, 12))
    assert not any(torch.equal(keys[0][f][0][0], keys[1][f][0][0]) for f in range(12, 15))


def test_a_switch_inside_a_clip() -> None:
    """Check that frames under the first prompt neither count nor are trained."""
    sequence = build(switching_at(10))  # takes effect at 12, inside the clip [9, 15)
    first = sequence.next_clip(trains_generator=True)
    assert bool(first.mask.all()) and len(first.blocks) == 3
    clip = sequence.next_clip(trains_generator=True)
    assert clip.mask[0].tolist() == [False] * 6 + [True] * 3
    assert [b.step.first_frame for b in clip.blocks] == [12]
    assert clip.blocks[0].frames == slice(6, 9)
    after = prompts(clip.samples).text_after
    assert after is not None
    assert torch.equal(clip.text, after) and torch.equal(clip.blocks[0].step.text, after)


def test_a_switch_at_the_last_frames_of_a_clip_waits_for_the_next_block() -> None:
    sequence = build(switching_at(8))
    clip = sequence.next_clip(trains_generator=True)
    assert bool(clip.mask.all()) and torch.equal(clip.text, prompts(clip.samples).text)
    assert sequence.next_clip(trains_generator=True).mask[0].tolist() == [False] * 3 + [True] * 6


def test_default_switch_points_are_those_of_the_paper() -> None:
    assert switch_candidates(PAPER, 240) == tuple(range(21, 202, 18))
    assert switch_candidates(OPTIONS, 9) == ()
    assert switch_candidates(switching_at(15), 15) == ()


def test_frames_of_the_past_are_noised_alike() -> None:
    """Look at write-back, given frames and recache, which are clean by default."""
    for from_table, sigma in ((False, 0.0), (True, 4.98e-3)):
        sequence = build(dataclasses.replace(PLAIN, context_noise_from_table=from_table))
        seen: list[tuple[Tensor, bool]] = []
        model = sequence.generator.network

        def spy(model=model, seen=seen, **arguments):  # type: ignore[no-untyped-def]
            if bool((arguments["timesteps"] == 0).all()):
                seen.append((arguments["x"], arguments.get("update_cache", True)))
            return model(**arguments)

        sequence.generator = Generator(spy, cache_of(sequence), sequence.generator.schedule)
        clip = clips_of(sequence, 1)[0]
        written = torch.cat([x for x, _ in seen], dim=1)
        assert all(updates for _, updates in seen)
        error = (written - clip.latents).abs().mean()
        assert float(error) == pytest.approx(sigma, rel=0.5, abs=0 if sigma else 1e-15)
        seen.clear()
        sequence.rebuild_cache()
        assert torch.equal(torch.cat([x for x, _ in seen], dim=1), clip.latents)
