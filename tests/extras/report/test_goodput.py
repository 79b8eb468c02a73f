"""Every second of a run is accounted for, whatever faults, gaps and restarts it had."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.extras.report.goodput import Goodput, account, show_seconds
from megatron_ext.extras.report.run_folder import read_run_folder
from megatron_ext.train.reporting import files
from tests.extras.report.made_runs import (
    BEGAN,
    STEP,
    Row,
    faulty_run,
    resumed,
    steps_of,
    time_row,
)


def _sums(goodput: Goodput) -> None:
    """Check that intervals follow each other without overlap, and that their seconds fill them."""
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall, rel=1e-9, abs=1e-6)
    covered = sum(part.end - part.start for part in goodput.intervals)
    assert covered == pytest.approx(goodput.wall, rel=1e-9, abs=1e-6)
    for part in goodput.intervals:
        assert sum(part.seconds.values()) == pytest.approx(part.end - part.start, abs=1e-6)
        assert min(part.seconds.values()) >= 0


def test_a_run_without_faults_is_what_its_rows_say() -> None:
    rows: list[Row] = [
        time_row(BEGAN, BEGAN + 5, 0, 0, start=4.5),
        time_row(BEGAN + 5, BEGAN + 17, 0, 10, **steps_of(10), evaluate=1.5, save=0.5),
        {"kind": "ended", "iteration": 10, "time": BEGAN + 18, "launched_at": BEGAN},
    ]
    goodput = account(rows)
    _sums(goodput)
    assert goodput.wall == pytest.approx(18)
    expected = {"computing": 8.3, "reduce": 0.5, "bubble": 1.0, "data": 0.2, "start": 4.5}
    expected |= {"evaluate": 1.5, "save": 0.5, "other": 1.5}
    assert {k: v for k, v in goodput.seconds.items() if v} == pytest.approx(expected, abs=1e-5)
    assert goodput.share == pytest.approx(9.8 / 18, abs=1e-6)
    assert goodput.sentence() == (
        "goodput 54.4% of 18.0 s; the largest losses: starting 4.50 s (25.0%), evaluation 1.50 s "
        "(8.3%), other 1.50 s (8.3%)"
    )


def test_steps_that_are_done_again_are_lost_and_those_of_memory_are_not(tmp_path: Path) -> None:
    wall = faulty_run(tmp_path)
    run = read_run_folder(tmp_path)
    goodput = account(run.rows, run.events)
    _sums(goodput)
    assert goodput.wall == pytest.approx(wall, abs=1e-3)
    # Each fault loses the time until it was seen and its steps, each of a second.
    lost = (0.06 + 1) + (2.1 + 1) + (0.05 + 5)
    assert goodput.seconds["lost"] == pytest.approx(lost, abs=0.01)
    assert goodput.seconds["restart"] == pytest.approx(3 * 1.5, abs=0.01)
    assert goodput.seconds["save"] == pytest.approx(4 * 2.0, abs=0.01)
    kept = 400 * (sum(STEP.values()) - STEP["data"])
    assert goodput.share * wall == pytest.approx(kept, rel=1e-3)


def test_steps_reported_before_the_restart_point_lose_the_share_behind_it() -> None:
    rows = [
        time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10)),
        time_row(BEGAN + 12, BEGAN + 12.5, 7, 7, generation=1, start=0.5),
        time_row(BEGAN + 12.5, BEGAN + 22.5, 7, 17, generation=1, **steps_of(10)),
    ]
    goodput = account(rows)
    _sums(goodput)
    # No event tells the fault: the gap of 2 s is lost, and 3 of 10 steps are.
    assert goodput.seconds["lost"] == pytest.approx(3 * sum(STEP.values()) + 2, abs=1e-6)
    assert goodput.seconds["restart"] == pytest.approx(0.5)
    assert goodput.seconds["computing"] == pytest.approx(17 * 0.83)


def test_a_restart_may_do_the_steps_of_several_reports_again() -> None:
    rows = [
        time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10)),
        time_row(BEGAN + 10, BEGAN + 20, 10, 20, **steps_of(10)),
        time_row(BEGAN + 22, BEGAN + 22.5, 7, 7, generation=1, start=0.5),
        time_row(BEGAN + 22.5, BEGAN + 35.5, 7, 20, generation=1, **steps_of(13)),
        time_row(BEGAN + 35.5, BEGAN + 45.5, 20, 30, generation=1, **steps_of(10)),
    ]
    goodput = account(rows)
    _sums(goodput)
    assert goodput.seconds["lost"] == pytest.approx(13 * sum(STEP.values()) + 2, abs=1e-6)
    assert goodput.seconds["computing"] == pytest.approx(30 * 0.83)


def test_a_launch_that_fails_loses_what_it_did_not_report() -> None:
    rows: list[Row] = [
        time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10)),
        {"kind": "ended", "iteration": 10, "time": BEGAN + 14, "launched_at": BEGAN},
    ]
    assert account(rows).seconds["other"] == pytest.approx(4, abs=1e-6)
    rows[1]["exit_code"] = 1
    goodput = account(rows)
    _sums(goodput)
    assert goodput.seconds["lost"] == pytest.approx(4)


def test_ranks_that_end_to_become_more_or_fewer_lose_nothing() -> None:
    rows: list[Row] = [
        time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10)),
        {"kind": "ended", "iteration": 10, "time": BEGAN + 10, "launched_at": BEGAN},
        time_row(BEGAN + 12, BEGAN + 13, 10, 10, generation=1, start=1.0),
        time_row(BEGAN + 13, BEGAN + 23, 10, 20, generation=1, **steps_of(10)),
    ]
    goodput = account(rows)
    _sums(goodput)
    assert goodput.seconds["lost"] == 0
    assert goodput.seconds["restart"] == pytest.approx(3)


def test_time_between_two_launches_is_not_of_the_run() -> None:
    later = BEGAN + 3600
    rows = [
        time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10)),
        time_row(later, later + 3, 10, 10, launched_at=later, start=3.0),
        time_row(later + 3, later + 13, 10, 20, launched_at=later, **steps_of(10)),
    ]
    goodput = account(rows)
    _sums(goodput)
    assert goodput.wall == pytest.approx(23)
    assert goodput.seconds["lost"] == 0


def test_a_resumed_run_keeps_the_time_of_the_steps_that_it_repeats(tmp_path: Path) -> None:
    rows = [time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10))]
    step = {"kind": "train", "iteration": 10, "lm loss": 3.0}
    (tmp_path / "metrics.jsonl").write_text("".join(map(files.as_json, [step, *rows])))
    resumed(tmp_path, 5)
    kept = files.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["kind"] for row in kept] == ["time", "resumed"]
    files.MetricsFile(tmp_path, 0, launched_at=BEGAN).close()
    assert [r["kind"] for r in files.read_metrics(tmp_path / "metrics.jsonl")] == ["time"]
    files.MetricsFile(tmp_path, 0, launched_at=BEGAN + 60).close()
    assert files.read_metrics(tmp_path / "metrics.jsonl") == []


SECONDS = st.floats(0, 50, allow_nan=False)
LEAPS = st.tuples(SECONDS, SECONDS, st.integers(-20, 20), st.integers(0, 3), SECONDS)


@settings(max_examples=80, deadline=None)
@given(st.lists(LEAPS, max_size=12), st.lists(st.tuples(SECONDS, SECONDS), max_size=4))
def test_any_rows_and_faults_fill_the_wall_time(
    leaps: list[tuple[float, float, int, int, float]], faults: list[tuple[float, float]]
) -> None:
    now, iteration, generation = BEGAN, 0, 0
    rows, events = list[Row](), list[Row]()
    for gap, length, steps, more, spent in leaps:
        generation += more == 0
        before = max(0, iteration + min(steps, 0))
        iteration = before + max(steps, 0)
        rows.append(
            time_row(now + gap - 5, now + gap + length, before, iteration,
                     generation=generation, forward=spent, unheard_of=0.5)
        )  # fmt: skip
        now += gap + length
    for at, seen_after in faults:
        events.append({"kind": "fault", "time": BEGAN + 5 * at, "seen_after": seen_after})
    _sums(account(rows, events))


def test_damaged_rows_are_gaps() -> None:
    bad: list[Row] = [
        time_row(BEGAN, math.inf, 0, 10),
        {"kind": "time", "iteration": 3},
        {**time_row(BEGAN, BEGAN + 1, 0, 1), "launched_at": "<b>"},
        {**time_row(BEGAN, BEGAN + 1, 0, 1), "seconds/forward": 10**400},
    ]
    good = time_row(BEGAN + 2, BEGAN + 12, 0, 10, **steps_of(10))
    goodput = account([*bad, good], [{"kind": "fault", "time": None}, {"kind": "fault"}])
    _sums(goodput)
    assert goodput.wall == pytest.approx(12)
    assert account([]).wall == 0 and account([]).share == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.314, "0.31 s"), (42.04, "42.0 s"), (725, "12 min 5 s"), (12000, "3 h 20 min")],
)
def test_durations_are_short(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown
