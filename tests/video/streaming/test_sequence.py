"""Sequences against lengths and masks that are written out."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.sequence import Replica, StreamingSequence
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
    network,
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


def test_the_range_of_the_seed_document_draws_21_new_frames_too() -> None:
    options = dataclasses.replace(PAPER, max_new_frames=21, switches=False)
    sequence = paper(options, first_frame=lambda latents: latents[:, -1:])
    clips = clips_of(sequence, 12)
    growth = {(c.number, c.end - c.first_new) for c in clips}
    assert {n for number, n in growth if number} == {18, 21}
    full = next(c for c in clips if c.number and c.end - c.first_new == 21)
    # All frames are new, but the first is no generated one any more.
    assert full.mask[0].tolist() == [i >= 1 for i in range(21)]


def test_the_last_clip_never_passes_the_end() -> None:
    options = dataclasses.replace(PLAIN, max_new_frames=9, sequence_lengths=(27,))
    sequence = build(options, replica=Replica(seed=3))
    for _ in range(12):
        clip = sequence.next_clip(trains_generator=False)
        assert clip.end <= 27 and clip.end - clip.first_new in (6, 9)


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


def test_a_new_sequence_knows_nothing_of_the_old() -> None:
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


def test_the_first_clip_may_be_generated_without_a_loss() -> None:
    options = dataclasses.replace(PLAIN, train_first_chunk=False)
    numbers = [(c.sequence, c.number) for c in clips_of(build(options), 5)]
    assert numbers == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]


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
    assert [b.frames for b in clip.blocks] == wanted
    assert torch.equal(clip.text, prompts(clip.samples).text_after)


def saved(sequence: StreamingSequence) -> dict[str, object]:
    """Return a state that went through a file, without code in it."""
    file = io.BytesIO()
    torch.save(sequence.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("after", range(7))
def test_resume_is_exact_anywhere(after: int) -> None:
    """Resume before, inside and between sequences, before and after a switch."""
    options = switching_at(16)
    run = build(options)
    clips_of(run, after)
    stored = saved(run)
    resumed = build(options)
    resumed.load_state_dict(stored)
    for a, b in zip(clips_of(run, 3), clips_of(resumed, 3), strict=True):
        assert torch.equal(a.latents, b.latents) and torch.equal(a.mask, b.mask)
        assert torch.equal(a.text, b.text) and (a.samples, a.number) == (b.samples, b.number)


def test_a_state_without_its_cache_is_rebuilt() -> None:
    run = build(PLAIN)
    clips_of(run, 1)
    stored = saved(run)
    del stored["cache"]
    resumed = build(PLAIN)
    resumed.load_state_dict(stored)
    a, b = clips_of(run, 1)[0], clips_of(resumed, 1)[0]
    torch.testing.assert_close(a.latents, b.latents, rtol=0, atol=1e-12)


def test_stored_states_of_other_runs_are_refused() -> None:
    run = build(PLAIN)
    clips_of(run, 1)
    stored = saved(run)
    with pytest.raises(CheckpointError, match=r"have the shape \[2, 9, 2, 2, 2\], but this run's"):
        build(PLAIN, replica=Replica(seed=1, batch=1)).load_state_dict(stored)
    longer = dataclasses.replace(PLAIN, chunk_frames=12)
    with pytest.raises(CheckpointError, match=r"keeps its last 9 frames, but `chunk_frames` \(12"):
        run.next_clip(trains_generator=False)
        build(longer).load_state_dict(saved(run))
    del stored["sink"]
    with pytest.raises(CheckpointError, match="lacks sink"):
        build(PLAIN).load_state_dict(stored)


def test_prompts_that_do_not_fit_are_refused() -> None:
    def begin(given: Prompts, options: StreamingConfig = OPTIONS) -> None:
        build(options, source=lambda _: given).begin()

    text = torch.zeros(2, 3, 4)
    with pytest.raises(DataError, match="no `text_after`"):
        begin(Prompts(text))
    with pytest.raises(DataError, match=r"`text_after` has the shape \[3, 4\]"):
        begin(Prompts(text, text[0]))
    for frames in (2, 9):
        with pytest.raises(DataError, match="`start` has the shape"):
            begin(Prompts(text, text, torch.zeros(2, frames, 2, 2, 2)))


def test_sequences_that_do_not_fit_the_network_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`block` \(3\) must be that of the network \(1\)"):
        build(PLAIN, window=Window(block=1))
    with pytest.raises(ConfigError, match=r"`capacity_frames` \(11\) must be 12 or more"):
        build(PLAIN, capacity=11)


def test_texts_follow_the_samples() -> None:
    sequence = build(PLAIN, replica=Replica(seed=1, batch=2, dp_rank=1, dp_size=3))
    assert [c.samples for c in clips_of(sequence, 5)[3:]] == [range(2, 4), range(8, 10)]
    assert sequence.state is not None
    assert torch.equal(sequence.state.text[1], text_of(9, "text"))


def test_networks_of_a_tiny_size_depend_on_all_they_should() -> None:
    """Check the network itself: the other tests would pass with one that looks at nothing."""
    net = network(Window())
    x, t = torch.randn(1, 9, 2, 2, 2).double(), torch.full((1, 9), 500.0)
    text = torch.randn(1, 3, 4).double()

    def run(x: Tensor, text: Tensor) -> Tensor:
        return net(x=x, timesteps=t, text=text, cache=Cache(Window(), 9, 2))

    base, moved = run(x, text), x.clone()
    moved[:, 0] += 1
    assert not torch.equal(base[:, 8], run(moved, text)[:, 8])
    assert not torch.equal(base, run(x, text + 1))
    moved = x.clone()
    moved[:, 8] += 1
    assert torch.equal(base[:, :6], run(moved, text)[:, :6])
