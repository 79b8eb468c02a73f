"""Decisions that all ranks share, noise that replicas do not, and which clips a network sees."""

import dataclasses
import logging
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.train.run import Run
from megatron_ext.video.data.randomness import sample_numbers
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.decisions import (
    aliasing,
    clips_seen,
    num_clips,
    passes,
    warn_of_aliasing,
)
from megatron_ext.video.streaming.rollout import StreamClip
from tests.video.streaming.network import PAPER
from tests.video.streaming.runs import after_each_step, observed, on_each_clip, runner_of
from tests.video.streaming.test_prompts import configured

OPTIONS = dataclasses.replace(PAPER, max_new_frames=21, sequence_lengths=(99, 120, 240))
LIKE = torch.empty(0)


def drawn_for(seed: int, sequence: int) -> tuple[object, ...]:
    return (
        decisions.sequence_length(OPTIONS, seed, sequence),
        decisions.switch_frame(OPTIONS, seed, sequence),
        decisions.new_frames(OPTIONS, seed, sequence, 3, remaining=100),
        decisions.exit_steps(OPTIONS, seed, sequence, 3, blocks=6, steps=4),
    )


def test_decisions_depend_on_their_numbers_alone_and_all_choices_are_drawn_alike() -> None:
    first = [drawn_for(7, n) for n in range(30)]
    torch.rand(5)
    assert first == [drawn_for(7, n) for n in range(30)]
    assert first != [drawn_for(8, n) for n in range(30)]
    n = 2000
    lengths = Counter(decisions.sequence_length(OPTIONS, 0, i) for i in range(n))
    growth = Counter(decisions.new_frames(OPTIONS, 0, i, 1, remaining=99) for i in range(n))
    exits = Counter(decisions.exit_steps(OPTIONS, 0, 0, i, blocks=2, steps=4)[0] for i in range(n))
    for counts, choices in ((lengths, (99, 120, 240)), (growth, (18, 21)), (exits, range(4))):
        assert set(counts) == set(choices)
        assert all(abs(c / n - 1 / len(choices)) < 0.04 for c in counts.values())
    switches = {decisions.switch_frame(PAPER, 0, i) for i in range(200)}
    assert switches == set(range(21, 202, 18)) == {*decisions.switch_candidates(PAPER, 240)}
    assert decisions.switch_candidates(PAPER, 21) == ()
    given = dataclasses.replace(PAPER, switch_frames=(15,))
    assert decisions.switch_candidates(given, 15) == ()
    # Growth ends at the end of the sequence.
    drawn = {decisions.new_frames(OPTIONS, 0, i, 1, remaining=20) for i in range(50)}
    assert drawn == {18}


def test_every_draw_differs_by_sequence_clip_and_use() -> None:
    """Draw often enough that two independent draws do not agree by chance."""
    options = dataclasses.replace(PAPER, min_new_frames=3, max_new_frames=21)
    every = range(40)
    exits = partial(decisions.exit_steps, options, 7, blocks=1, steps=4)
    growth = partial(decisions.new_frames, options, 7, remaining=99)
    for draw in (exits, growth):
        of_sequences = [draw(sequence, 3) for sequence in every]
        of_clips = [draw(3, clip) for clip in every]
        assert len({*of_sequences}) > 1 and len({*of_clips}) > 1
        assert of_sequences != of_clips
    several = dataclasses.replace(PAPER, sequence_lengths=(60, 240), switch_frames=(21, 39))
    lengths = [decisions.sequence_length(several, 7, sequence) == 60 for sequence in every]
    switches = [decisions.switch_frame(several, 7, sequence) == 21 for sequence in every]
    assert lengths != switches and len({*switches}) == 2
    names = [f"{kind} chunk {i} timestep" for kind in ("generator", "critic") for i in (0, 1)]
    uniforms = torch.stack([decisions.uniforms(7, every, name) for name in names])
    assert uniforms.unique().numel() == uniforms.numel()


def test_exit_steps_of_blocks() -> None:
    each = dataclasses.replace(OPTIONS, same_exit_across_blocks=False)
    drawn = [decisions.exit_steps(each, 0, 0, i, blocks=6, steps=4) for i in range(50)]
    assert {x for exits in drawn for x in exits} == set(range(4))
    assert any(len(set(exits)) > 1 for exits in drawn)
    same = [decisions.exit_steps(OPTIONS, 0, 0, i, blocks=6, steps=4) for i in range(50)]
    assert all(exits == (first[0],) * 6 for exits, first in zip(same, drawn, strict=True))
    last = dataclasses.replace(each, last_step_only=True)
    assert decisions.exit_steps(last, 0, 0, 1, blocks=3, steps=4) == (3, 3, 3)


def test_noise_of_a_sample_is_the_same_in_any_layout_and_differs_by_its_use() -> None:
    noise = partial(decisions.block_noise, 1, like=LIKE)
    whole = noise(range(4), (3, 2, 2, 2), 6, 1)
    parts = [noise(sample_numbers(0, 0, 2, r, 2), (3, 2, 2, 2), 6, 1) for r in range(2)]
    assert torch.equal(whole, torch.cat(parts))
    assert whole.unique().numel() == whole.numel()
    size = (3, 1, 1, 1)
    uses = [noise([0], size, f, s) for f in (0, 3, 12) for s in (-1, 0, 1, 2, 3)]
    names = [f"{kind} chunk {i} noise" for kind in ("generator", "critic") for i in (0, 1)]
    uses += [decisions.noise(1, [0], size, name) for name in names]
    together = torch.stack(uses)
    assert together.unique().numel() == together.numel()


DRAWN = "--max-new-frames 9 --sequence-lengths 21 27 --no-same-exit-across-blocks"
"""Flags under which growth, lengths, switches and exit steps are drawn."""


def _drawn(run: Run) -> dict[str, Any]:
    """Note a rank's decisions, and the noise that clips and blocks get."""
    sequence = runner_of(run).sequence
    generator = sequence.generator
    generate = type(generator).generate
    content: dict[str, Any] = {"replica": run.context.dp_rank, "decisions": [], "noise": []}

    def note(clip: StreamClip, trains_generator: bool) -> None:
        state = sequence.state
        assert state is not None
        numbers = clip.sequence, clip.number, clip.end
        switch = state.switch_frame, state.has_switched
        content["decisions"].append((trains_generator, *numbers, state.max_length, *switch))
        content.update(latents=clip.latents, text=clip.text)

    def log(result: Any) -> None:
        content["losses"] = {name: float(value) for name, value in result.losses.items()}

    def counted(self: Any, first_frame: int, text: Tensor, noise: Any, **options: Any) -> Any:
        content["decisions"].append((first_frame, options["exit_step"]))
        content["noise"].append(noise(first_frame, 0))
        return generate(self, first_frame, text, noise, **options)

    after_each_step(run, log)
    on_each_clip(run, note)
    type(generator).generate = counted  # type: ignore[method-assign]
    return content


@pytest.mark.parametrize(
    ("ranks", "batch", "layout"),
    [
        (2, 2, ""),
        pytest.param(2, 1, "--context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(4, 2, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_but_for_noise(tmp_path: Path, ranks: int, batch: int, layout: str) -> None:
    words = f"--train-iters 5 {DRAWN} {layout}"
    _, seen = observed(tmp_path, words, _drawn, ranks=ranks, batch=batch)
    first = seen[0]["decisions"]
    assert len({x[4] for x in first if len(x) > 2}) == 2 and any(x[-1] for x in first)
    for found in seen:
        assert found["decisions"] == first
        assert found["losses"] == seen[0]["losses"]
        for name in ("noise", "text", "latents"):
            pairs = zip(found[name], seen[0][name], strict=True)
            same = all(torch.equal(a, b) for a, b in pairs)
            assert same == (found["replica"] == seen[0]["replica"]), name
    assert len({found["replica"] for found in seen}) == batch
    assert "generator grad norm" in seen[0]["losses"]


def simulated(clips: int, steps: int, accumulation: int = 1) -> set[int]:
    kinds = [kind for s in range(steps) for kind in passes(PAPER, s, accumulation)]
    return {i % clips for i, kind in enumerate(kinds) if kind == "generator"}


def test_passes_of_steps_and_the_13_clips_of_the_paper() -> None:
    both, critic = ("generator", "critic"), ("critic",)
    assert [passes(PAPER, s) for s in range(7)] == [both, *[critic] * 4, both, critic]
    assert passes(PAPER, 0, 2) == both * 2 and passes(PAPER, 1, 3) == critic * 3
    kinds = [kind for s in range(3000) for kind in passes(PAPER, s)]
    assert (kinds.count("generator"), kinds.count("critic")) == (600, 3000)
    assert num_clips(PAPER, 240) == 13
    assert simulated(13, 13 * 5) == set(range(13)) == clips_seen(PAPER, 13)
    assert aliasing(PAPER) is None


def with_clips(clips: int) -> StreamingConfig:
    return dataclasses.replace(PAPER, sequence_lengths=(21 + 18 * (clips - 1),))


@pytest.mark.parametrize("clips", range(1, 20))
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_aliasing_is_what_happens(clips: int, accumulation: int) -> None:
    seen = simulated(clips, clips * 5, accumulation)
    assert decisions.clips_seen(PAPER, clips, accumulation) == seen
    options = with_clips(clips)
    warns = decisions.aliasing(options, accumulation) is not None
    assert warns == (len(seen) < clips)
    if accumulation == 1:
        assert warns == (math.gcd(6, clips) > 1)


@pytest.mark.parametrize(("batch", "seen"), [(1, 4), (2, 2)])
def test_a_run_tells_which_clips_its_micro_batches_take(
    batch: int, seen: int, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Train the generator in one of 2 steps, on 1 clip of 3 or on 2 of 6."""
    with caplog.at_level(logging.WARNING):
        configured(tmp_path, f"--global-batch-size {batch}")
    said = capsys.readouterr().out.splitlines()
    of = f"on {seen} of the 4 trained chunks of a sequence"
    assert said[:1] == [f"> the generator is trained in one of 2 steps, {of}"]
    assert said[1:] == ["> the teacher has random weights; give `--teacher-checkpoint`"]
    assert ("make the generator see only chunks 0, 2" in caplog.text) == (seen < 4)


def test_a_configuration_that_aliases_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_aliasing(PAPER)
        assert not caplog.records
        warn_of_aliasing(with_clips(12))
    assert "sequences of 12 trained chunks make the generator see only chunks 0, 6" in caplog.text
    assert "no divisor in common with 6" in caplog.text
    # Sequences of several lengths, or that grow by several, do not alias.
    one = dataclasses.replace(PAPER, sequence_lengths=(219,))
    assert decisions.aliasing(one) is not None
    assert decisions.aliasing(dataclasses.replace(PAPER, sequence_lengths=(219, 99))) is None
    assert decisions.aliasing(dataclasses.replace(one, max_new_frames=21)) is None
    # Then 12 of 13 clips are trained on.
    assert decisions.aliasing(dataclasses.replace(PAPER, train_first_chunk=False)) is not None
