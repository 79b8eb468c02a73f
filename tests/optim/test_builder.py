"""Learning-rate schedules against the formulas that Megatron-LM documents."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.optim.builder import build_scheduler, schedule_lengths
from megatron_ext.text.task import TEXT
from tests.training_runs import TINY, mock_data

PEAK, FLOOR, WARMUP, STEPS = 1e-3, 1e-4, 2, 12


def _config(*more: str) -> Any:
    flags = [*TINY, *mock_data(), "--train-iters", str(STEPS), *more]
    return parse_args(flags, TEXT, world_size=1, device="cpu").config


def _rates(*more: str) -> list[float]:
    """Return the rate after each step, as the log shows it."""
    config = _config(*more)
    group: dict[str, Any] = {"params": [], "default_config": True}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    scheduler = build_scheduler(config.optimizer, config.training, optimizer)
    rates = [group["lr"]]
    for _ in range(STEPS):
        scheduler.step(increment=config.training.global_batch_size)
        rates.append(group["lr"])
    return rates


def _decayed(step: int, shape: str) -> float:
    part = (step - WARMUP) / (STEPS - WARMUP)
    factor = {"linear": 1 - part, "cosine": 0.5 * (1 + math.cos(math.pi * part))}[shape]
    return FLOOR + factor * (PEAK - FLOOR)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_decay_follows_its_formula(shape: str) -> None:
    want = [PEAK * step / WARMUP for step in range(WARMUP + 1)]
    want += [_decayed(step, shape) for step in range(WARMUP + 1, STEPS + 1)]
    assert _rates("--lr-decay-style", shape) == pytest.approx(want, rel=1e-12)


def test_constant_stays_at_its_peak() -> None:
    assert _rates("--lr-decay-style", "constant")[WARMUP:] == [PEAK] * (STEPS - WARMUP + 1)


def test_inverse_square_root_follows_its_formula() -> None:
    rates = _rates("--lr-decay-style", "inverse-square-root")
    batch = 16
    for step in range(WARMUP + 1, STEPS + 1):
        want = PEAK * math.sqrt(WARMUP * batch) / math.sqrt(step * batch)
        assert rates[step] == pytest.approx(max(want, FLOOR), rel=1e-12)


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("linear", FLOOR + 0.5 * (PEAK - FLOOR)),
        ("cosine", FLOOR + 0.5 * (PEAK - FLOOR)),
        ("exponential", FLOOR + (2 * 0.5**0.5 - 1) * (PEAK - FLOOR)),
        ("minus_sqrt", FLOOR + (1 - math.sqrt(0.5)) * (PEAK - FLOOR)),
    ],
)
def test_wsd_holds_and_then_falls(style: str, half: float) -> None:
    flags = "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style".split()
    rates = _rates(*flags, style)
    assert rates[WARMUP : STEPS - 3] == [PEAK] * (STEPS - 3 - WARMUP)
    assert rates[STEPS - 2] == pytest.approx(half, rel=1e-9)
    assert rates[STEPS] == pytest.approx(FLOOR, rel=1e-9)


def test_lengths_by_samples_and_by_fraction() -> None:
    words = " ".join(TINY).replace("--lr-warmup-iters 2", "").replace("--lr-decay-iters 12", "")
    more = "--train-samples 480 --lr-decay-samples 320 --lr-warmup-fraction 0.1".split()
    config = parse_args(
        [*words.split(), *mock_data(), *more], TEXT, world_size=1, device="cpu"
    ).config
    lengths = schedule_lengths(config.optimizer, config.training)
    assert (lengths.decay, lengths.warmup, lengths.weight_decay_increment) == (320, 32.0, 480)
