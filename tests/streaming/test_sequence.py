"""Sequences against the lengths, masks and switches of the specification."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.losses.noise_schedule import NoiseConfig
from megatron_ext.streaming.chunk import StreamChunk
from megatron_ext.streaming.network import Prompts
from megatron_ext.streaming.options import StreamingOptions
from megatron_ext.streaming.rollout import Generator
from megatron_ext.streaming.sequence import Replica, StreamingSequence
from tests.streaming.tiny import OPTIONS, PAPER, Cache, Window, build, network, prompts, text_of

PLAIN = dataclasses.replace(OPTIONS, switch_prompts=False)
PAPER_WINDOW = Window(window=12)


def paper(options: StreamingOptions = PAPER, **others: object) -> StreamingSequence:
    """The sequence of the paper on latents of one number."""
    others.setdefault("replica", Replica(seed=1))
    return build(options, window=PAPER_WINDOW, shape=(1, 1, 1), **others)


def switching_at(frame: int, options: StreamingOptions = OPTIONS) -> StreamingOptions:
    return dataclasses.replace(options, switch_frames=(frame,))


def cache_of(sequence: StreamingSequence) -> Cache:
    cache = sequence.generator.cache
    assert isinstance(cache, Cache)
    return cache


def chunks_of(sequence: StreamingSequence, number: int) -> list[StreamChunk]:
    return [sequence.next_chunk(trains_generator=False) for _ in range(number)]


def new_of(chunk: StreamChunk) -> Tensor:
    return chunk.latents[:, -(chunk.end - chunk.first_new) :]


def test_criterion_14_ends_masks_and_previous_frames_of_the_paper() -> None:
    # A codec hook that changes the first frame shows that previous frames are the generated ones.
    sequence = paper(first_frame=lambda latents: latents[:, -1:] + 100)
    generated, ends = torch.empty(1, 0, 1, 1, 1, dtype=torch.float64), []
    for number in range(13):
        assert number == 0 or sequence.can_generate_more
        chunk = sequence.next_chunk(trains_generator=number % 2 == 0)
        ends.append(chunk.end)
        generated = torch.cat([generated, new_of(chunk)], dim=1)
        assert chunk.latents.shape == (1, 21, 1, 1, 1) and chunk.mask.shape == (1, 21)
        assert chunk.mask[0].tolist() == [number == 0 or i >= 3 for i in range(21)]
        assert sequence.state is not None
        assert torch.equal(sequence.state.previous, generated[:, -21:])
        assert not sequence.state.previous.requires_grad
        first = generated[:, -21] + (100 if number else 0)
        assert torch.equal(chunk.latents[:, 0], first)
        assert torch.equal(chunk.latents[:, 1:], generated[:, -20:])
    assert ends == list(range(21, 238, 18))
    assert not sequence.can_generate_more
    assert sequence.next_chunk(trains_generator=False).sequence == 1


def test_the_range_of_the_seed_document_draws_21_new_frames_too() -> None:
    options = dataclasses.replace(PAPER, max_new_frames=21, switch_prompts=False)
    sequence = paper(options, first_frame=lambda latents: latents[:, -1:])
    chunks = chunks_of(sequence, 12)
    growth = {(c.number, c.end - c.first_new) for c in chunks}
    assert {n for number, n in growth if number} == {18, 21}
    full = next(c for c in chunks if c.number and c.end - c.first_new == 21)
    # All frames are new, but the first is no generated one any more.
    assert full.mask[0].tolist() == [i >= 1 for i in range(21)]


def test_the_last_chunk_never_passes_the_end() -> None:
    options = dataclasses.replace(PLAIN, max_new_frames=9, sequence_lengths=(27,))
    sequence = build(options, replica=Replica(seed=3))
    for _ in range(12):
        chunk = sequence.next_chunk(trains_generator=False)
        assert chunk.end <= 27 and chunk.end - chunk.first_new in (6, 9)


@pytest.mark.parametrize("whole", [True, False])
def test_what_the_codec_decodes(whole: bool) -> None:
    seen: list[Tensor] = []

    def hook(latents: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        seen.append(latents)
        return latents[:, -1:]

    options = dataclasses.replace(PLAIN, decode_history=whole)
    sequence = build(options, first_frame=hook)
    chunks = chunks_of(sequence, 2)
    known = torch.cat([chunks[0].latents, new_of(chunks[1])], dim=1)
    # 15 frames are known; the chunk begins at frame 6.
    assert len(seen) == 1
    assert torch.equal(seen[0], known[:, :7] if whole else known[:, 6:7])


def test_criterion_15_a_new_sequence_knows_nothing_of_the_old() -> None:
    sequence = build(PLAIN)
    chunks_of(sequence, 4)
    sequence.begin()
    assert cache_of(sequence).end == 0 and not cache_of(sequence).held
    after = chunks_of(sequence, 4)

    fresh = build(PLAIN)
    fresh.begin()
    fresh.begin()
    assert fresh.state is not None and fresh.state.sequence == 1
    for a, b in zip(after, chunks_of(fresh, 4), strict=True):
        assert torch.equal(a.latents, b.latents)


def test_the_first_chunk_may_be_generated_without_a_loss() -> None:
    options = dataclasses.replace(PLAIN, train_first_chunk=False)
    numbers = [(c.sequence, c.number) for c in chunks_of(build(options), 5)]
    assert numbers == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]


def with_prompts(which: str, shift: float) -> tuple[StreamingSequence, list[StreamChunk]]:
    """A run whose first or second prompts are moved."""

    def source(samples: Sequence[int]) -> Prompts:
        given = prompts(samples)
        assert given.text_after is not None
        text = given.text + shift if which == "text" else given.text
        return Prompts(text, given.text_after + shift if which == "after" else given.text_after)

    sequence = build(switching_at(15), source=source)
    return sequence, chunks_of(sequence, 4)


def test_criterion_17_output_follows_the_current_prompt() -> None:
    _, base = with_prompts("text", 0.0)
    _, other_after = with_prompts("after", 1.0)
    # 9, 15, 21, 27: the third chunk is the first under the second prompt.
    for i in (0, 1):
        assert torch.equal(base[i].latents, other_after[i].latents)
        assert torch.equal(base[i].text, other_after[i].text)
    assert not torch.equal(new_of(base[2]), new_of(other_after[2]))
    for i in (2, 3):
        assert torch.equal(base[i].text, prompts(base[i].samples).text_after)


def test_criterion_17_after_the_switch_the_first_prompt_acts_through_frames_only() -> None:
    """With the frames before it set to those of another run, the first prompt has no part left."""
    outputs = []
    for shift in (0.0, 1.0):

        def source(samples: Sequence[int], shift: float = shift) -> Prompts:
            given = prompts(samples)
            return Prompts(given.text + shift, given.text_after)

        sequence = build(switching_at(15), source=source)
        chunks_of(sequence, 2)
        assert sequence.state is not None
        sequence.state.previous = torch.linspace(-1, 1, 2 * 9 * 8).view(2, 9, 2, 2, 2).double()
        sequence.state.sink = sequence.state.previous[:, :3]
        outputs.append(torch.cat([new_of(c) for c in chunks_of(sequence, 2)], dim=1))
    assert torch.equal(*outputs)


def test_criterion_18_recache_with_the_same_prompt_reproduces_the_cache() -> None:
    sequence = build(dataclasses.replace(PLAIN, recache_frames=9))
    chunks_of(sequence, 1)
    before = copy.deepcopy(cache_of(sequence).held)
    sequence.rebuild_cache()
    after = cache_of(sequence).held
    assert after.keys() == before.keys() == set(range(9))
    for frame, layers in before.items():
        for old, new in zip(layers, after[frame], strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=1e-12)


def test_criterion_18_holds_with_context_noise_too() -> None:
    sequence = build(PLAIN, NoiseConfig(context_noise=100.0))
    chunks_of(sequence, 1)
    before = copy.deepcopy(cache_of(sequence).held)
    sequence.rebuild_cache()
    torch.testing.assert_close(cache_of(sequence).held, before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sink", ["rebuild", "keep"])
@pytest.mark.parametrize("frame", [9, 15, 21])
def test_trap_1_the_sinks_after_a_switch(sink: str, frame: int) -> None:
    """They are those of the frames that were generated, under the second prompt or the first."""
    options = dataclasses.replace(switching_at(frame), sink_at_switch=sink, recache_frames=6)
    sequence = build(options)
    first = chunks_of(sequence, 1)[0]
    under_first = copy.deepcopy(cache_of(sequence).held)
    chunks_of(sequence, (frame - 9) // 6)
    assert sequence.state is not None and not sequence.state.has_switched
    chunks_of(sequence, 1)
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


def test_trap_3_recached_frames_see_their_own_past_only() -> None:
    """Frames that are recached do not depend on later ones."""
    keys = []
    for moved in (0.0, 1.0):
        sequence = build(switching_at(15))
        chunks_of(sequence, 2)
        assert sequence.state is not None
        sequence.state.previous[:, -3:] += moved
        sequence._switch(15, [])
        keys.append(cache_of(sequence).held)
    assert all(torch.equal(keys[0][f][1][0], keys[1][f][1][0]) for f in range(6, 12))
    assert not any(torch.equal(keys[0][f][0][0], keys[1][f][0][0]) for f in range(12, 15))


def test_criterion_19_and_trap_13_a_switch_inside_a_chunk() -> None:
    """Frames under the first prompt neither count nor are trained."""
    sequence = build(switching_at(10))  # takes effect at 12, inside the chunk [9, 15)
    first = sequence.next_chunk(trains_generator=True)
    assert bool(first.mask.all()) and len(first.blocks) == 3
    chunk = sequence.next_chunk(trains_generator=True)
    assert chunk.mask[0].tolist() == [False] * 6 + [True] * 3
    assert [b.step.first_frame for b in chunk.blocks] == [12]
    assert chunk.blocks[0].frames == slice(6, 9)
    after = prompts(chunk.samples).text_after
    assert after is not None
    assert torch.equal(chunk.text, after) and torch.equal(chunk.blocks[0].step.text, after)


def test_a_switch_at_the_last_frames_of_a_chunk_waits_for_the_next_block() -> None:
    sequence = build(switching_at(8))
    chunk = sequence.next_chunk(trains_generator=True)
    assert bool(chunk.mask.all()) and torch.equal(chunk.text, prompts(chunk.samples).text)
    assert sequence.next_chunk(trains_generator=True).mask[0].tolist() == [False] * 3 + [True] * 6


def test_default_switch_points_are_those_of_the_paper() -> None:
    assert PAPER.switch_candidates(240) == tuple(range(21, 202, 18))
    assert OPTIONS.switch_candidates(9) == ()
    assert switching_at(15).switch_candidates(15) == ()


def test_given_first_frames_are_the_past_of_the_first_chunk() -> None:
    start = torch.randn(2, 3, 2, 2, 2, dtype=torch.float64)
    sequence = build(switching_at(3), source=lambda s: dataclasses.replace(prompts(s), start=start))
    sequence.begin()
    assert sorted(cache_of(sequence).held) == [0, 1, 2]
    chunk = sequence.next_chunk(trains_generator=True)
    assert torch.equal(chunk.latents[:, :3], start)
    assert chunk.mask[0].tolist() == [False] * 3 + [True] * 6
    assert [b.frames for b in chunk.blocks] == [slice(3, 6), slice(6, 9)]


def test_trap_7_frames_of_the_past_are_noised_alike() -> None:
    """Write-back, given frames and recache: clean by default."""
    for noise, sigma in (
        (NoiseConfig(), 0.0),
        (NoiseConfig(context_noise_from_table=True), 4.98e-3),
    ):
        sequence = build(PLAIN, noise)
        seen: list[tuple[Tensor, bool]] = []
        model = sequence.generator.network

        def spy(model=model, seen=seen, **arguments):  # type: ignore[no-untyped-def]
            if bool((arguments["timesteps"] == 0).all()):
                seen.append(
                    (
                        arguments["x"],
                        arguments.get("update_cache", True),
                    )
                )
            return model(**arguments)

        sequence.generator = Generator(spy, cache_of(sequence), sequence.generator.schedule)
        chunk = chunks_of(sequence, 1)[0]
        written = torch.cat([x for x, _ in seen], dim=1)
        assert all(updates for _, updates in seen)
        error = (written - chunk.latents).abs().mean()
        assert float(error) == pytest.approx(sigma, rel=0.5, abs=0 if sigma else 1e-15)
        seen.clear()
        sequence.rebuild_cache()
        assert torch.equal(torch.cat([x for x, _ in seen], dim=1), chunk.latents)


def saved(sequence: StreamingSequence) -> dict[str, object]:
    """Through a file, without code in it."""
    file = io.BytesIO()
    torch.save(sequence.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("after", range(7))
def test_criterion_26_resume_is_exact_anywhere(after: int) -> None:
    """Before, inside and between sequences, before and after a switch."""
    options = switching_at(16)
    run = build(options)
    chunks_of(run, after)
    stored = saved(run)
    resumed = build(options)
    resumed.load_state_dict(stored)
    for a, b in zip(chunks_of(run, 3), chunks_of(resumed, 3), strict=True):
        assert torch.equal(a.latents, b.latents) and torch.equal(a.mask, b.mask)
        assert torch.equal(a.text, b.text) and (a.samples, a.number) == (b.samples, b.number)


def test_a_state_without_its_cache_is_rebuilt() -> None:
    run = build(PLAIN)
    chunks_of(run, 1)
    stored = saved(run)
    del stored["cache"]
    resumed = build(PLAIN)
    resumed.load_state_dict(stored)
    a, b = chunks_of(run, 1)[0], chunks_of(resumed, 1)[0]
    torch.testing.assert_close(a.latents, b.latents, rtol=0, atol=1e-12)


def test_stored_states_of_other_runs_are_refused() -> None:
    run = build(PLAIN)
    chunks_of(run, 1)
    stored = saved(run)
    with pytest.raises(CheckpointError, match=r"have the shape \[2, 9, 2, 2, 2\], but this run's"):
        build(PLAIN, replica=Replica(seed=1, batch=1)).load_state_dict(stored)
    del stored["sink"]
    with pytest.raises(CheckpointError, match="lacks sink"):
        build(PLAIN).load_state_dict(stored)


def test_prompts_that_do_not_fit_are_refused() -> None:
    def begin(given: Prompts, options: StreamingOptions = OPTIONS) -> None:
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
    assert [c.samples for c in chunks_of(sequence, 5)[3:]] == [range(2, 4), range(8, 10)]
    assert sequence.state is not None
    assert torch.equal(sequence.state.text[1], text_of(9, "text"))


def test_networks_of_a_tiny_size_depend_on_all_they_should() -> None:
    """The tests above would pass with a network that looks at nothing."""
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
