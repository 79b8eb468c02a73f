"""Schedules of the learning rate by their formulas, from the start and when a run goes on."""

import math
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.optim import resumed_schedule, schedule
from megatron_ext.optim.resumed_schedule import go_on
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
    go_on(scheduler, config, at, 16 * at)
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


BY_SAMPLES = without(without(TINY, "--lr-warmup-iters"), "--lr-decay-iters")


def test_lengths_of_each_phase_by_samples_and_by_steps() -> None:
    words = "--train-iters 30 --lr-decay-iters 20 --lr-warmup-iters 3"
    words += " --lr-decay-style WSD --lr-wsd-decay-iters 5"
    config = config_of([*BY_SAMPLES, *mock_data(), *words.split()])
    assert schedule.schedule_lengths(config) == {
        "lr_warmup_steps": 3 * 16,
        "lr_decay_steps": 20 * 16,
        "wd_incr_steps": 30 * 16,
        schedule.WSD: 5 * 16,
    }
    words = "--train-samples 480 --lr-decay-samples 320 --lr-warmup-samples 48"
    words += " --lr-decay-style WSD --lr-wsd-decay-samples 80"
    config = config_of([*BY_SAMPLES, *mock_data(), *words.split()])
    assert schedule.schedule_lengths(config) == {
        "lr_warmup_steps": 48,
        "lr_decay_steps": 320,
        "wd_incr_steps": 480,
        schedule.WSD: 80,
    }


@pytest.mark.parametrize(
    ("words", "iteration", "consumed", "left"),
    [
        ("--train-samples 480 --lr-decay-samples 320 --lr-warmup-samples 16", 5, 80, 240),
        ("--train-samples 480 --lr-warmup-samples 16", 5, 80, 400),
        ("--train-samples 480 --lr-decay-samples 320 --lr-warmup-samples 16", 25, 400, 0),
        ("--train-iters 30 --lr-decay-iters 20", 5, 80, 15 * 16),
        ("--train-iters 30", 5, 80, 25 * 16),
        ("--train-iters 30 --lr-decay-iters 20", 20, 320, 0),
        ("--train-iters 30 --lr-decay-iters 20", 25, 400, 0),
        # Another batch before: the steps that are left have this run's batch.
        ("--train-iters 30 --lr-decay-iters 20", 5, 40, 15 * 16),
        ("--train-iters 30 --rampup-batch-size 4 4 24", 1, 4, 4 + 8 + 12 + 26 * 16),
    ],
)
def test_samples_that_are_left_of_the_decay(
    words: str, iteration: int, consumed: int, left: int
) -> None:
    config = config_of([*BY_SAMPLES, *mock_data(), *words.split()])
    assert resumed_schedule.samples_of_decay_left(config, iteration, consumed) == left


def _rate_at(style: str, place: resumed_schedule.Place, done: float) -> float:
    """Return megatron-core's rate after ``done`` samples, for a peak of 1 and a floor of 0."""
    if place.warmup and done <= place.warmup:
        return done / place.warmup
    if style == "constant":
        return 1.0
    if done > place.decay:
        return 0.0
    if style == "inverse-square-root":
        return math.sqrt(max(place.warmup, 1) / max(done, 1))
    start = place.decay - place.last_phase if style == "WSD" else place.warmup
    over = max(0.0, done - start) / (place.decay - start)
    return 0.5 * (1 + math.cos(math.pi * over)) if style == "cosine" else 1 - over


def _check_place(style: str, warmup: int, done: int, left: int) -> None:
    theirs = resumed_schedule.Place(warmup, 160, 60, done)
    ours = resumed_schedule.Place(warmup, done + left, 60, -1)
    place = resumed_schedule.continued(style, theirs, ours, left)
    if done >= 160 and style != "constant":
        # A decay that has ended stays ended, at the floor.
        assert place.done > place.decay > place.warmup
        return
    assert _rate_at(style, place, place.done) == pytest.approx(_rate_at(style, theirs, done))
    assert 0 <= place.warmup < place.decay
    if style == "constant":
        return
    # A warm-up is followed by at least one sample of the decay.
    assert place.decay - place.done == pytest.approx(max(left, place.warmup + 1 - place.done))
    if style == "WSD" and warmup <= done <= 100:
        assert place.last_phase == min(60, left)
    rates = [_rate_at(style, place, place.done + step) for step in range(left + 1)]
    if done >= warmup:
        assert all(later <= now + 1e-12 for now, later in pairwise(rates))
    if style != "inverse-square-root" and left > warmup:
        assert rates[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("style", [*SHAPES, "WSD"])
def test_a_schedule_goes_on_at_the_same_rate_and_ends_on_time(style: str) -> None:
    """From a decay of 160 samples, the last 60 of which are WSD's last phase."""
    for warmup in (0, 32):
        for done in (0, 16, 32, 40, 100, 150, 159, 160, 161):
            for left in (20, 80, 400):
                _check_place(style, warmup, done, left)


def test_a_warm_up_that_the_flags_no_longer_have_is_over() -> None:
    theirs = resumed_schedule.Place(32, 160, 60, 16)
    place = resumed_schedule.continued("linear", theirs, resumed_schedule.Place(0, 320, 60, 0), 304)
    assert (place.warmup, place.done, place.decay) == (0, 16, 320)


def _scheduler(words: str) -> tuple[Any, dict[str, Any], schedule.Schedule]:
    """Return the configuration, the only group of parameters and the schedule of some flags."""
    config = config_of([*TINY, *mock_data(), *words.split()])
    group: dict[str, Any] = {"params": [], "default_config": True}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    return config, group, schedule.build_scheduler(config, optimizer)


def _note(before: str, after: str, at: int) -> tuple[str | None, dict[str, Any]]:
    """Return the note of a schedule that goes on after ``at`` steps, and its group."""
    _, _, scheduler = _scheduler(before)
    scheduler.step(16 * at)
    state = scheduler.state_dict()
    config, group, scheduler = _scheduler(f"{after} --override-opt-param-scheduler")
    scheduler.load_state_dict(state)
    return go_on(scheduler, config, at, 16 * at), group


def test_who_overrides_a_schedule_is_told_where_it_goes_on() -> None:
    before = "--lr-decay-style linear --train-iters 12"
    after = "--lr-decay-style linear --lr-decay-iters 20 --train-iters 20"
    assert _note(before, before, 7)[0] is None
    note, group = _note(before, after, 7)
    assert note == (
        f"The schedule goes on at the checkpoint's place, with a learning rate of {group['lr']:g}, "
        "and its decay ends where the flags say."
    )
    for at in (12, 13):
        note, group = _note(before, after, at)
        assert group["lr"] == FLOOR
        assert note == (
            "The decay of the checkpoint's learning rate has ended, so that it stays at `--min-lr` "
            "(0.0001); give another one, or `--finetune` for a schedule that starts anew."
        )
    constant = "--lr-decay-style constant --lr-decay-iters {0} --train-iters {0}"
    note, group = _note(constant.format(12), constant.format(20), 12)
    assert note is not None and "has ended" not in note and group["lr"] == PEAK


def test_a_last_phase_of_another_length_alone_is_a_change() -> None:
    flags = "--lr-decay-style WSD --train-iters 12 --lr-wsd-decay-style linear"
    note, group = _note(f"{flags} --lr-wsd-decay-iters 4", f"{flags} --lr-wsd-decay-iters 6", 10)
    assert note is not None
    assert group["lr"] == pytest.approx(FLOOR + 0.5 * (PEAK - FLOOR))


def test_megatron_lms_checkpoints_lack_the_length_of_the_last_phase() -> None:
    """It is the same share of the decay as that of the flags."""
    flags = "--lr-decay-style WSD --lr-wsd-decay-style linear"
    _, group, scheduler = _scheduler(f"{flags} --train-iters 12 --lr-wsd-decay-iters 3")
    scheduler.step(16 * 11)
    rate, state = group["lr"], scheduler.state_dict()
    del state[schedule.WSD]
    more = "--lr-decay-iters 20 --train-iters 20 --lr-wsd-decay-iters 5"
    config, group, scheduler = _scheduler(f"{flags} {more} --override-opt-param-scheduler")
    scheduler.load_state_dict(state)
    go_on(scheduler, config, 11, 16 * 11)
    assert group["lr"] == pytest.approx(rate) and FLOOR < rate < PEAK


def test_a_checkpoints_schedule_keeps_the_length_of_its_last_phase() -> None:
    flags = "--lr-decay-style WSD --lr-wsd-decay-style linear --train-iters 12"
    _, group, scheduler = _scheduler(f"{flags} --lr-wsd-decay-iters 4")
    scheduler.step(16 * 10)
    rate, state = group["lr"], scheduler.state_dict()
    other = f"{flags} --lr-wsd-decay-iters 8 --use-checkpoint-opt-param-scheduler"
    _, group, scheduler = _scheduler(other)
    scheduler.load_state_dict(state)
    scheduler.step(0)
    assert scheduler.wsd_decay_steps == 16 * 4 and group["lr"] == pytest.approx(rate)
    _, _, scheduler = _scheduler(f"{flags} --lr-wsd-decay-iters 8 --override-opt-param-scheduler")
    scheduler.load_state_dict(state)
    assert scheduler.wsd_decay_steps == 16 * 8


def test_a_weight_decay_that_has_grown_stays() -> None:
    flags = (
        "--lr-decay-style linear --start-weight-decay 0 --end-weight-decay 0.1 "
        "--weight-decay-incr-style linear"
    )
    before = f"{flags} --lr-decay-iters 8 --train-iters 8"
    _, group = _note(before, f"{flags} --lr-decay-iters 20 --train-iters 20", 12)
    assert group["weight_decay"] == pytest.approx(0.1)


def test_a_warm_up_begins_at_its_own_rate() -> None:
    rates = _rates("--lr-warmup-init", "2e-4")
    assert rates[: WARMUP + 1] == pytest.approx([2e-4, 6e-4, 1e-3])


def test_an_override_takes_the_flags_warm_up_of_a_constant_rate() -> None:
    flags = without(without(TINY, "--lr-warmup-iters"), "--lr-decay-iters")
    flags += [*mock_data(), *"--lr-decay-style constant --override-opt-param-scheduler".split()]

    def build(iterations: int) -> schedule.Schedule:
        words = [*flags, "--train-iters", str(iterations)]
        config = config_of(words, defaults={"usual_warmup_iters": 1000})
        optimizer: Any = SimpleNamespace(param_groups=[{"params": [], "default_config": True}])
        return schedule.build_scheduler(config, optimizer)

    longer = build(400)
    own = longer.lr_warmup_steps
    shorter = build(40)
    assert shorter.lr_warmup_steps < own
    longer.load_state_dict(shorter.state_dict())
    assert longer.lr_warmup_steps == own
