"""Schedules of the learning rate by their formulas, from the start and when a run goes on."""

import math
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.optim import schedule
from tests.training_runs import TINY, config_of, mock_data, train_steps, without

PEAK, FLOOR, WARMUP, STEPS = 1e-3, 1e-4, 2, 12


def _rates(*more: str, sizes: Sequence[int] = (16,) * STEPS) -> list[float]:
    config = config_of([*TINY, *mock_data(), "--train-iters", str(STEPS), *more])
    group: dict[str, Any] = {"params": [], "default_config": True}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    scheduler = schedule.build_scheduler(config, optimizer)
    rates = [group["lr"]]
    for size in sizes:
        scheduler.step(increment=size)
        rates.append(group["lr"])
    return rates


SHAPES: dict[str, Callable[[int], float]] = {
    "linear": lambda step: 1 - (step - WARMUP) / (STEPS - WARMUP),
    "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))),
    "constant": lambda step: 1.0,
    "inverse-square-root": lambda step: (
        (max(PEAK * math.sqrt(WARMUP / step), FLOOR) - FLOOR) / (PEAK - FLOOR)
    ),
}
"""The share of the way from floor to peak by step."""


@pytest.mark.parametrize("shape", SHAPES)
def test_decay_follows_its_formula(shape: str) -> None:
    want = [PEAK * step / WARMUP for step in range(WARMUP + 1)]
    want += [FLOOR + SHAPES[shape](step) * (PEAK - FLOOR) for step in range(WARMUP + 1, STEPS + 1)]
    assert _rates("--lr-decay-style", shape) == pytest.approx(want, rel=1e-12)


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


RAMPS = {
    "--rampup-batch-size 4 4 24": [4, 4, 8, 12, *[16] * 8],
    # Sequences of 64 tokens: batch 8 from 12 samples on, 16 from 40 on.
    "--step-batch-size-schedule '0:4 768:8 2560:16'": [4, 4, 4, 8, 8, 8, 8, *[16] * 5],
}
"""Flags of a growing batch, and the sizes of the first steps, counted by hand."""
WSD = {
    "WSD linear": lambda share: 1 - share,
    "WSD cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "WSD exponential": lambda share: 2 * 0.5**share - 1,
    "WSD minus_sqrt": lambda share: 1 - math.sqrt(share),
}
"""The share of the way from floor to peak, by the share of the last phase that is over."""


def _share(style: str, done: int, warmup: int, hold: int, end: int) -> float:
    """Return the share of the way from floor to peak after ``done`` samples, after the warm-up."""
    if style in WSD:
        return 1.0 if done <= hold else WSD[style]((done - hold) / (end - hold))
    if style == "inverse-square-root":
        return (max(PEAK * math.sqrt(warmup / done), FLOOR) - FLOOR) / (PEAK - FLOOR)
    over = (done - warmup) / (end - warmup)
    shapes = {"linear": 1 - over, "cosine": 0.5 * (1 + math.cos(math.pi * over)), "constant": 1.0}
    return shapes[style]


@pytest.mark.parametrize("style", [*SHAPES, *WSD])
@pytest.mark.parametrize("ramp", RAMPS)
def test_lengths_in_iterations_count_the_samples_of_a_growing_batch(ramp: str, style: str) -> None:
    sizes = RAMPS[ramp]
    name, *last_phase = style.split()
    flags = f"--lr-decay-style {name}"
    if last_phase:
        flags += f" --lr-wsd-decay-iters 7 --lr-wsd-decay-style {last_phase[0]}"
    consumed = [sum(sizes[:step]) for step in range(STEPS + 1)]
    warmup, end, hold = consumed[WARMUP], consumed[STEPS], consumed[STEPS - 7]
    want = [
        PEAK * done / warmup
        if step <= WARMUP
        else FLOOR + _share(style, done, warmup, hold, end) * (PEAK - FLOOR)
        for step, done in enumerate(consumed)
    ]
    assert _rates(*flags.split(), *shlex.split(ramp), sizes=sizes) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("ramp", RAMPS)
def test_iterations_and_their_samples_are_the_same_run(ramp: str, tmp_path: Path) -> None:
    """Megatron-LM takes the growing batch with samples alone; losses are the same bits."""
    words = " ".join(TINY).replace("--lr-warmup-iters 2", "").replace("--lr-decay-iters 12", "")
    flags = [*words.split(), *mock_data(), *shlex.split(ramp)]
    flags += "--num-layers 1 --global-batch-size 16 --micro-batch-size 4".split()
    total, warmup = sum(RAMPS[ramp][:7]), sum(RAMPS[ramp][:2])
    by_steps = train_steps([*flags, *"--train-iters 7 --lr-warmup-iters 2".split()], tmp_path / "a")
    samples = f"--train-samples {total} --lr-warmup-samples {warmup}".split()
    by_samples = train_steps([*flags, *samples], tmp_path / "b")
    for key in ("lm loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [row[key] for row in by_steps] == [row[key] for row in by_samples], key
    assert len(by_steps) == 7 and by_steps[-1]["learning_rate"] == pytest.approx(FLOOR)


def test_lengths_by_samples_and_by_fraction() -> None:
    words = " ".join(TINY).replace("--lr-warmup-iters 2", "").replace("--lr-decay-iters 12", "")
    more = "--train-samples 480 --lr-decay-samples 320 --lr-warmup-fraction 0.1".split()
    config = config_of([*words.split(), *mock_data(), *more])
    lengths = schedule.schedule_lengths(config)
    names = ("lr_decay_steps", "lr_warmup_steps", "wd_incr_steps")
    assert [lengths[name] for name in names] == [320, 32.0, 480]


def _goes_on(
    before: str, after: str, at: int, batch: int = 16, name: str = "lr"
) -> tuple[float, list[float]]:
    """Return the rate of a schedule at a step, and those of one that goes on from there.

    Args:
        before, after: flags of the two runs.
        at: the step of the first run at which it is saved.
        batch: the samples of a step of the second run.
        name: the setting of a group of parameters that is returned instead of the rate.
    """

    def build(flags: str) -> tuple[Any, dict[str, Any], schedule.Schedule]:
        config = config_of([*TINY, *mock_data(), *flags.split()])
        group: dict[str, Any] = {"params": [], "default_config": True}
        optimizer: Any = SimpleNamespace(param_groups=[group])
        return config, group, schedule.build_scheduler(config, optimizer)

    _, group, scheduler = build(before)
    for _ in range(at):
        scheduler.step(increment=16)
    value, state = group[name], scheduler.state_dict()
    config, group, scheduler = build(f"{after} --override-opt-param-scheduler")
    scheduler.load_state_dict(state)
    scheduler.step(0)
    scheduler.go_on(config, at, 16 * at)
    values = [group[name]]
    for _ in range(20 - at):
        scheduler.step(increment=batch)
        values.append(group[name])
    return value, values


ENDS = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
}


@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize("style", [*SHAPES, "WSD"])
def test_a_longer_run_goes_on_from_its_rate(style: str, at: int) -> None:
    """From a decay of 12 steps to one of 20, with 2 of warm-up; the formula is followed."""
    flags = f"--lr-decay-style {style}"
    flags += " --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear" if style == "WSD" else ""
    words = f"{flags} --lr-decay-iters 12 --train-iters 12"
    rate, rates = _goes_on(words, words.replace("12", "20"), at)
    assert rates[0] == pytest.approx(rate, rel=1e-12)
    assert all(later <= PEAK + 1e-12 for later in rates)
    if at >= WARMUP:
        assert all(later <= now + 1e-12 for now, later in pairwise(rates)), "the rate rises"
    if style in ENDS:
        # The share of the decay that is over, which the steps that are left bring to 1.
        over = max(0.0, (at - WARMUP) / 10)
        first = max(at, WARMUP)
        for step in range(first, 21):
            share = over + (1 - over) * (step - first) / (20 - first)
            want = FLOOR + ENDS[style](share) * (PEAK - FLOOR)
            assert rates[step - at] == pytest.approx(want, rel=1e-9), step
    if style == "WSD":
        assert rates[-1] == pytest.approx(FLOOR, rel=1e-9)


def test_a_constant_rate_needs_no_flag_to_go_on() -> None:
    """Keep the warm-up of the shorter run, as long as no flag gives another one."""

    def build(words: str) -> tuple[dict[str, Any], schedule.Schedule]:
        flags = without(without(TINY, "--lr-warmup-iters"), "--lr-decay-iters")
        flags += [*mock_data(), "--lr-decay-style", "constant", *words.split()]
        config = config_of(flags, defaults={"usual_warmup_iters": 1000})
        group: dict[str, Any] = {"params": [], "default_config": True}
        optimizer: Any = SimpleNamespace(param_groups=[group])
        return group, schedule.build_scheduler(config, optimizer)

    def rates(group: dict[str, Any], scheduler: schedule.Schedule, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(group["lr"])
            scheduler.step(increment=16)
        return found

    for at in (3, 12):
        group, scheduler = build("--train-iters 40")
        wanted = rates(group, scheduler, at)
        state = scheduler.state_dict()
        wanted += rates(group, scheduler, 20 - at)
        assert wanted[:5] == pytest.approx([0, PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK])
        longer, scheduler = build("--train-iters 400")
        scheduler.load_state_dict(state)
        assert rates(longer, scheduler, 20 - at) == pytest.approx(wanted[at:], rel=1e-12)
    with pytest.raises(AssertionError, match="warmup iterations do not match"):
        build("--train-iters 400 --lr-warmup-iters 5")[1].load_state_dict(state)


@pytest.mark.parametrize("at", [1, 5, 11])
@pytest.mark.parametrize("style", ["linear", "cosine", "constant", "WSD", "inverse-square-root"])
def test_another_batch_changes_no_rate_of_an_iteration(style: str, at: int) -> None:
    flags = f"--lr-decay-style {style} --lr-decay-iters 20 --train-iters 20"
    flags += " --lr-wsd-decay-iters 12" if style == "WSD" else ""
    _, want = _goes_on(flags, flags, at)
    _, rates = _goes_on(flags, f"{flags} --global-batch-size 32", at, batch=32)
    assert rates == pytest.approx(want, rel=1e-9)


def test_a_decay_that_has_ended_stays_ended() -> None:
    flags = "--lr-decay-style cosine --lr-decay-iters 12 --train-iters 12"
    rate, rates = _goes_on(flags, flags.replace("12", "20"), 12)
    assert rates == pytest.approx([rate] * 9) == [pytest.approx(FLOOR)] * 9


@pytest.mark.parametrize("at", [1, 5, 9])
@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
def test_a_weight_decay_that_grows_goes_on_from_its_value(style: str, at: int) -> None:
    """From a run of 12 steps to one of 20; in both, the decay grows from 0 to 0.1."""
    flags = (
        f"--lr-decay-style {style} --lr-decay-iters 12 --train-iters 12 --start-weight-decay 0"
        " --end-weight-decay 0.1 --weight-decay-incr-style linear"
    )
    decay, decays = _goes_on(flags, flags.replace("12", "20"), at, name="weight_decay")
    assert decays[0] == pytest.approx(decay, rel=1e-9)
    assert decay == pytest.approx(0.1 * at / 12, rel=1e-9)
    assert all(now <= later for now, later in pairwise(decays)), "the weight decay falls"
    assert decays[1] > decays[0] and decays[-1] == pytest.approx(0.1, rel=1e-9)
