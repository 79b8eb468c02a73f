"""Generator and critic passes, and the clips that the generator gets to see."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest

from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.decisions import (
    aliasing,
    clips_seen,
    num_clips,
    passes,
    warn_of_aliasing,
)
from tests.video.streaming.network import PAPER


def test_passes_of_steps() -> None:
    both, critic = ("generator", "critic"), ("critic",)
    assert [passes(PAPER, s) for s in range(7)] == [both, *[critic] * 4, both, critic]
    assert passes(PAPER, 0, 2) == both * 2 and passes(PAPER, 1, 3) == critic * 3


def test_updates_of_the_paper() -> None:
    kinds = [kind for s in range(3000) for kind in passes(PAPER, s)]
    assert (kinds.count("generator"), kinds.count("critic")) == (600, 3000)


def simulated(clips: int, steps: int, accumulation: int = 1) -> set[int]:
    kinds = [kind for s in range(steps) for kind in passes(PAPER, s, accumulation)]
    return {i % clips for i, kind in enumerate(kinds) if kind == "generator"}


def test_the_generator_sees_all_13_clips_of_the_paper() -> None:
    assert num_clips(PAPER, 240) == 13
    assert simulated(13, 13 * 5) == set(range(13)) == clips_seen(PAPER, 13)
    assert aliasing(PAPER) is None


def with_clips(clips: int) -> StreamingConfig:
    return dataclasses.replace(PAPER, sequence_lengths=(21 + 18 * (clips - 1),))


@pytest.mark.parametrize("clips", range(1, 20))
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_aliasing_is_what_happens(clips: int, accumulation: int) -> None:
    seen = simulated(clips, clips * 5, accumulation)
    assert clips_seen(PAPER, clips, accumulation) == seen
    options = with_clips(clips)
    warns = aliasing(options, accumulation) is not None
    assert warns == (len(seen) < clips)
    if accumulation == 1:
        assert warns == (math.gcd(6, clips) > 1)


def test_a_configuration_that_aliases_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_aliasing(PAPER)
        assert not caplog.records
        warn_of_aliasing(with_clips(12))
    assert "sequences of 12 trained chunks make the generator see only chunks 0, 6" in caplog.text
    assert "no divisor in common with 6" in caplog.text


def test_sequences_of_several_lengths_do_not_alias() -> None:
    lengths = dataclasses.replace(PAPER, sequence_lengths=(219, 99))
    assert aliasing(dataclasses.replace(PAPER, sequence_lengths=(219,))) is not None
    assert aliasing(lengths) is None
    assert aliasing(dataclasses.replace(PAPER, max_new_frames=21, sequence_lengths=(219,))) is None
    skipped = dataclasses.replace(PAPER, train_first_chunk=False)
    assert aliasing(skipped) is not None  # 12 of 13 clips are trained on
