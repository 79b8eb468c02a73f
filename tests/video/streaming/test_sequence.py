"""Sequences against lengths and masks that are written out, and what a switch of prompts does."""

import copy
import dataclasses
import io
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.rollout import StreamClip
from megatron_ext.video.streaming.sequence import Prompts, Replica, StreamingSequence
from tests.video.streaming.network import (
    ALONE,
    OPTIONS,
    PAPER,
    PLAIN,
    Cache,
    Window,
    build,
    cache_of,
    clips_of,
    new_of,
    paper,
    prompts,
    switching_at,
    text_of,
)


def test_ends_masks_and_previous_frames_of_the_paper() -> None:
    # A codec hook that changes the first frame shows that previous frames are the generated ones.
    sequence = paper(first_frame=lambda latents: latents[:, -1:] + 100)
    generated, ends = torch.empty(1, 0, 1, 1, 1, dtype=torch.float64), []
    for number in range(13):
        assert number == 0 or sequence.can_generate_more
        clip = sequence.next_clip(trains_generator=number % 2 == 0)
        ends.append(clip.end)
        generated = torch.cat([generated, new_of(clip)], dim=1)
        assert clip.latents.shape == (1, 21, 1, 1, 1) and clip.mask.shape == (1, 21)
        assert clip.mask[0].tolist() == [number == 0 or i >= 3 for i in range(21)]
        assert sequence.state is not None
        assert torch.equal(sequence.state.previous, generated[:, -21:])
        assert not sequence.state.previous.requires_grad
        first = generated[:, -21] + (100 if number else 0)
        assert torch.equal(clip.latents[:, 0], first)
        assert torch.equal(clip.latents[:, 1:], generated[:, -20:])
    assert ends == list(range(21, 238, 18))
    assert not sequence.can_generate_more
    assert sequence.next_clip(trains_generator=False).sequence == 1


def test_a_clip_tells_its_exit_step_only_if_all_blocks_share_it() -> None:
    each = dataclasses.replace(PLAIN, same_exit_across_blocks=False)
    assert {clip.exit_step for clip in clips_of(build(each), 4)} == {None}
    sequence = build(PLAIN)
    timesteps = sequence.generator.schedule.denoising_timesteps
    for _ in range(8):
        clip = sequence.next_clip(trains_generator=True)
        assert clip.exit_step is not None
        assert {block.timestep for block in clip.blocks} == {timesteps[clip.exit_step]}


def test_growth_of_sequences() -> None:
    options = dataclasses.replace(PAPER, max_new_frames=21, switches=False)
    sequence = paper(options, first_frame=lambda latents: latents[:, -1:])
    clips = clips_of(sequence, 12)
    growth = {(c.number, c.end - c.first_new) for c in clips}
    assert {n for number, n in growth if number} == {18, 21}
    full = next(c for c in clips if c.number and c.end - c.first_new == 21)
    # All frames are new, but the first is no generated one any more.
    assert full.mask[0].tolist() == [i >= 1 for i in range(21)]
    options = dataclasses.replace(PLAIN, max_new_frames=9, sequence_lengths=(27,))
    sequence = build(options, replica=Replica(seed=3))
    for _ in range(12):
        clip = sequence.next_clip(trains_generator=False)
        assert clip.end <= 27 and clip.end - clip.first_new in (6, 9)
    options = dataclasses.replace(PLAIN, train_first_chunk=False)
    numbers = [(c.sequence, c.number) for c in clips_of(build(options), 5)]
    assert numbers == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]


@pytest.mark.parametrize("whole", [True, False])
def test_what_the_codec_decodes(whole: bool) -> None:
    seen: list[Tensor] = []

    def hook(latents: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        seen.append(latents)
        return latents[:, -1:]

    options = dataclasses.replace(PLAIN, decode_history=whole)
    sequence = build(options, first_frame=hook)
    clips = clips_of(sequence, 2)
    known = torch.cat([clips[0].latents, new_of(clips[1])], dim=1)
    # 15 frames are known; the clip begins at frame 6.
    assert len(seen) == 1
    assert torch.equal(seen[0], known[:, :7] if whole else known[:, 6:7])


def test_a_new_sequence_knows_nothing_of_the_old_and_has_its_own_samples() -> None:
    sequence = build(PLAIN)
    clips_of(sequence, 4)
    sequence.begin()
    assert cache_of(sequence).end == 0 and not cache_of(sequence).held
    after = clips_of(sequence, 4)

    fresh = build(PLAIN)
    fresh.begin()
    fresh.begin()
    assert fresh.state is not None and fresh.state.sequence == 1
    for a, b in zip(after, clips_of(fresh, 4), strict=True):
        assert torch.equal(a.latents, b.latents)
    sequence = build(PLAIN, replica=Replica(seed=1, batch=2, dp_rank=1, dp_size=3))
    assert [c.samples for c in clips_of(sequence, 5)[3:]] == [range(2, 4), range(8, 10)]
    assert sequence.state is not None
    assert torch.equal(sequence.state.text[1], text_of(9, "text"))


@pytest.mark.parametrize("frames", [3, 6])
def test_given_first_frames_are_the_past_of_the_first_clip(frames: int) -> None:
    """Ask for a switch among them, which comes with the first new block."""
    start = torch.randn(2, frames, 2, 2, 2, dtype=torch.float64)
    options = dataclasses.replace(switching_at(3), sequence_lengths=(9,))
    sequence = build(options, source=lambda s: dataclasses.replace(prompts(s), start=start))
    sequence.begin()
    assert sorted(cache_of(sequence).held) == list(range(frames))
    clip = sequence.next_clip(trains_generator=True)
    assert clip.sequence == 0 and torch.equal(clip.latents[:, :frames], start)
    assert clip.mask[0].tolist() == [i >= frames for i in range(9)]
    wanted = [slice(i, i + 3) for i in range(frames, 9, 3)]
    assert [clip.frames_of(b) for b in clip.blocks] == wanted
    assert torch.equal(clip.text, prompts(clip.samples).text_after)


def test_a_first_frame_alone_is_a_block_before_those_of_three() -> None:
    """Let a picture be the first frame, or generate it; a switch waits for the next block."""
    start = torch.randn(2, 1, 2, 2, 2, dtype=torch.float64)
    for given in (None, start):

        def source(samples: Sequence[int], given: Tensor | None = given) -> Prompts:
            return dataclasses.replace(prompts(samples), start=given)

        sequence = build(switching_at(17, ALONE), source=source)
        first = sequence.next_clip(trains_generator=True)
        begins = [0, 1, 4, 7] if given is None else [1, 4, 7]
        assert [b.first_frame for b in first.blocks] == begins
        sizes = [b.x.size(1) for b in first.blocks]
        assert sizes == [1 if start == 0 else 3 for start in begins]
        frames = [first.frames_of(b) for b in first.blocks]
        assert frames == [slice(a, a + n) for a, n in zip(begins, sizes, strict=True)]
        assert first.mask[0].tolist() == [given is None] + [True] * 9
        assert given is None or torch.equal(first.latents[:, :1], given)
        clips = [first, *(sequence.next_clip(trains_generator=True) for _ in range(3))]
        assert [c.end for c in clips] == [10, 16, 22, 28]
        assert [[b.first_frame for b in c.blocks] for c in clips[1:]] == [[10, 13], [19], [22, 25]]
        assert clips[2].mask[0].tolist() == [False] * 7 + [True] * 3
        assert not sequence.can_generate_more


def saved(sequence: StreamingSequence) -> dict[str, object]:
    file = io.BytesIO()
    torch.save(sequence.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("base", [OPTIONS, ALONE], ids=["", "first frame alone"])
@pytest.mark.parametrize("after", range(7))
def test_resume_is_exact_anywhere(after: int, base: StreamingConfig) -> None:
    options = switching_at(16, base)
    run = build(options)
    clips_of(run, after)
    stored = saved(run)
    resumed = build(options)
    resumed.load_state_dict(stored)
    for a, b in zip(clips_of(run, 3), clips_of(resumed, 3), strict=True):
        assert torch.equal(a.latents, b.latents) and torch.equal(a.mask, b.mask)
        assert torch.equal(a.text, b.text) and (a.samples, a.number) == (b.samples, b.number)


def test_a_state_without_its_cache_is_rebuilt_and_those_of_other_runs_are_refused() -> None:
    run = build(PLAIN)
    clips_of(run, 1)
    stored = saved(run)
    del stored["cache"]
    resumed = build(PLAIN)
    resumed.load_state_dict(stored)
    a, b = clips_of(run, 1)[0], clips_of(resumed, 1)[0]
    torch.testing.assert_close(a.latents, b.latents, rtol=0, atol=1e-12)
    # A state of another dtype is taken in that of this run; one without frames empties the cache.
    stored["previous"], stored["sink"] = stored["previous"].bfloat16(), stored["sink"].bfloat16()
    resumed.load_state_dict(stored)
    assert resumed.state is not None
    assert resumed.state.previous.dtype == resumed.state.sink.dtype == torch.float64
    begun = build(PLAIN)
    begun.begin()
    del (state := saved(begun))["cache"]
    resumed.load_state_dict(state)
    assert cache_of(resumed).end == 0 and not cache_of(resumed).held
    assert torch.equal(clips_of(resumed, 1)[0].latents, clips_of(build(PLAIN), 1)[0].latents)
    # A run that was saved before its first sequence begins with the first.
    resumed.load_state_dict(build(PLAIN).state_dict())
    assert resumed.state is None and resumed.coming == (0, 0)


def with_prompts(which: str, shift: float) -> tuple[StreamingSequence, list[StreamClip]]:
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


@pytest.mark.parametrize(("frames", "noise"), [(9, 0.0), (6, 100.0), (9, 100.0)])
def test_recache_with_the_same_prompt_reproduces_the_cache(frames: int, noise: float) -> None:
    """Let the sinks also lie before the frames that are encoded anew."""
    sequence = build(dataclasses.replace(PLAIN, recache_frames=frames, context_noise=noise))
    clips_of(sequence, 1)
    before = copy.deepcopy(cache_of(sequence).held)
    assert before.keys() == set(range(9))
    sequence.rebuild_cache()
    torch.testing.assert_close(cache_of(sequence).held, before, rtol=0, atol=1e-12)
    alone = dataclasses.replace(ALONE, switches=False, recache_frames=9, context_noise=noise)
    sequence = build(alone)
    clips_of(sequence, 1)
    before = copy.deepcopy(cache_of(sequence).held)
    assert before.keys() == set(range(10))
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
    layers = [pair for i in range(3) for pair in zip(held[i], under_first[i], strict=True)]
    same = all(torch.equal(new[0], old[0]) for new, old in layers)
    assert same == (sink == "keep")


def test_sinks_that_are_kept_are_left_alone_and_other_frames_see_their_own_past_only() -> None:
    """Switch inside the sinks: those before the switch were made under the first prompt."""
    options = dataclasses.replace(switching_at(3), sink_at_switch="keep")
    sequence = build(options, window=Window(window=9, sink=6))
    first = clips_of(sequence, 1)[0]
    fresh = Cache(Window(window=9, sink=6), 15, 2)
    for frame, which in ((0, "text"), (3, "text_after")):
        x, text = first.latents[:, frame : frame + 3], getattr(prompts(first.samples), which)
        told = {"x": x, "timesteps": torch.zeros(2, 3), "text": text}
        sequence.generator.network(**told, cache=fresh, first_frame=frame)
    held = {f: cache_of(sequence).held[f] for f in range(6)}
    torch.testing.assert_close(held, fresh.held, rtol=0, atol=1e-12)
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
    assert [b.first_frame for b in clip.blocks] == [12]
    assert clip.frames_of(clip.blocks[0]) == slice(6, 9)
    after = prompts(clip.samples).text_after
    assert after is not None
    assert torch.equal(clip.text, after) and torch.equal(clip.blocks[0].text, after)
    # A switch at the last frames of a clip waits for the next block.
    sequence = build(switching_at(8))
    clip = sequence.next_clip(trains_generator=True)
    assert bool(clip.mask.all()) and torch.equal(clip.text, prompts(clip.samples).text)
    assert sequence.next_clip(trains_generator=True).mask[0].tolist() == [False] * 3 + [True] * 6


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

        sequence.generator = dataclasses.replace(sequence.generator, network=spy)
        clip = clips_of(sequence, 1)[0]
        written = torch.cat([x for x, _ in seen], dim=1)
        assert all(updates for _, updates in seen)
        error = (written - clip.latents).abs().mean()
        assert float(error) == pytest.approx(sigma, rel=0.5, abs=0 if sigma else 1e-15)
        seen.clear()
        sequence.rebuild_cache()
        assert torch.equal(torch.cat([x for x, _ in seen], dim=1), clip.latents)
