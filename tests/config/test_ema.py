"""Flags of averaged weights: what is refused, and why."""

from __future__ import annotations

import pytest

from megatron_ext.config import parse_args
from megatron_ext.config.video_rules import VIDEO_DEFAULTS
from megatron_ext.errors import ConfigError
from tests.training_runs import TINY, mock_data

WORDS = [*TINY, *mock_data(), "--train-iters", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ema-decay 1", r"`--ema-decay` \(1\) must be below 1, and 0 or more; use 0.9999, or 0"),
        ("--ema-decay -0.5", r"`--ema-decay` \(-0.5\) must be below 1, and 0 or more"),
        ("--ema-decay 0 --ema-start 5", r"`--ema-start` \(5\) needs `--ema-decay`; give one"),
        ("--ema-decay 0.9 --ema-start 0", r"`--ema-start` \(0\) must be at least 1, the first"),
        ("--ema-start 5", r"`--ema-start` \(5\) needs `--ema-decay`; give one"),
        ("--eval-ema --eval-iters 1", "`--eval-ema` needs `--ema-decay`; give one"),
        ("--ema-decay 0.9 --eval-ema", "`--eval-ema` needs evaluation, but `--eval-iters` is 0"),
    ],
)
def test_refusals_say_what_to_do(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args([*WORDS, *words.split()], world_size=1, device="cpu")


def test_a_run_that_only_evaluates_needs_no_decay() -> None:
    words = [*WORDS, *"--skip-train --eval-ema --eval-iters 1".split()]
    ema = parse_args(words, world_size=1, device="cpu").config.ema
    assert ema.keeps_average(trains=False)
    assert not ema.keeps_average(trains=True)


def test_a_decay_of_0_turns_the_average_of_a_video_run_off() -> None:
    words = "--video-data-path data --train-iters 9 --micro-batch-size 1 --lr-warmup-iters 0"

    def keeps(*more: str) -> bool:
        given = [*words.split(), *more]
        parsed = parse_args(given, world_size=1, device="cpu", defaults=VIDEO_DEFAULTS)
        return parsed.config.ema.keeps_average(trains=True)

    assert keeps()
    assert not keeps("--ema-decay", "0")
