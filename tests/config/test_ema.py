"""Flags of averaged weights: what is refused, and why."""

from __future__ import annotations

import pytest

from megatron_ext.config.optimizer import EmaConfig
from megatron_ext.config.parser import parse_args
from megatron_ext.config.rules.optimizer import ema_errors
from megatron_ext.errors import ConfigError
from megatron_ext.text.task import TEXT
from tests.training_runs import TINY, mock_data

WORDS = [*TINY, *mock_data(), "--train-iters", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ema-decay 1", r"`--ema-decay` \(1.0\) must be at least 0 and below 1; use 0.9999"),
        ("--ema-decay -0.1", r"`--ema-decay` \(-0.1\) must be at least 0 and below 1"),
        ("--ema-decay 0 --ema-start 5", r"`--ema-start` \(5\) needs `--ema-decay`"),
        ("--ema-decay 0 --eval-ema --eval-iters 1", "`--eval-ema` needs `--ema-decay`"),
        ("--ema-decay 0.9 --ema-start 0", r"`--ema-start` \(0\) must be at least 1; use 1"),
        ("--ema-start 5", r"`--ema-start` \(5\) needs `--ema-decay`; give one"),
        ("--eval-ema --eval-iters 1", "`--eval-ema` needs `--ema-decay`; give one"),
        ("--ema-update-every 2", r"`--ema-update-every` \(2\) needs `--ema-decay`; give one"),
        (
            "--ema-decay 0.9 --ema-update-every 0",
            r"`--ema-update-every` \(0\) must be at least 1; 1 is the default",
        ),
        ("--ema-decay 0.9 --eval-ema", "`--eval-ema` needs evaluation, but `--eval-iters` is 0"),
    ],
)
def test_refusals_say_what_to_do(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args([*WORDS, *words.split()], TEXT, world_size=1, device="cpu")


def test_a_run_that_only_evaluates_needs_no_decay() -> None:
    words = [*WORDS, *"--skip-train --eval-ema --eval-iters 1".split()]
    ema = parse_args(words, TEXT, world_size=1, device="cpu").config.ema
    assert ema.keeps_average(trains=False)
    assert not ema.keeps_average(trains=True)


@pytest.mark.parametrize(
    ("words", "start"), [("--ema-decay 0.9", 1), ("--ema-decay 0.9 --ema-start 7", 7), ("", None)]
)
def test_the_first_averaged_step(words: str, start: int | None) -> None:
    config = parse_args([*WORDS, *words.split()], TEXT, world_size=1, device="cpu").config
    assert config.ema.ema_start == start
    assert ema_errors(EmaConfig(0.0).resolved(), config.training) == []
