"""Goodput by formula and by simulation, which know nothing of each other."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.extras.chaos import goodput
from megatron_ext.extras.chaos.goodput import (
    RATES,
    Costs,
    Point,
    best_interval,
    expected,
    plot_goodput,
    simulated,
)

COSTS = Costs(step=1.0, snapshot=0.02, save=5.0, restart=3.0)


@pytest.mark.parametrize("faults_per_hour", [6, 60, 240])
def test_the_simulation_meets_daly_s_formula(faults_per_hour: int) -> None:
    mean = 3600 / faults_per_hour
    # With a copy of each step, work of one step is at stake; without, that since the last save.
    found = simulated(COSTS, faults_per_hour, save_interval=10**9, hours=200)
    assert found == pytest.approx(expected(mean, 1.0, 0.02, 3.0), abs=0.005)
    every = round(best_interval(mean, COSTS.save))
    without = dataclasses.replace(COSTS, snapshot=0.0, copied_every=None)
    alone = simulated(without, faults_per_hour, save_interval=every, hours=500)
    assert alone == pytest.approx(expected(mean, every, 5.0, 3.0), abs=0.01)
    some = dataclasses.replace(COSTS, copied_every=5)
    found = simulated(some, faults_per_hour, save_interval=10**9, hours=200)
    assert found == pytest.approx(expected(mean, 5.0, 0.1, 3.0), abs=0.005)


def test_young_s_interval_is_the_best_where_faults_are_rare() -> None:
    mean, keeping = 36_000.0, 5.0
    best = best_interval(mean, keeping)
    assert best == math.sqrt(2 * 5 * 36_000)
    there = expected(mean, best, keeping, 3.0)
    assert there > expected(mean, best / 2, keeping, 3.0)
    assert there > expected(mean, best * 2, keeping, 3.0)


def test_without_faults_only_copies_and_saves_cost_time() -> None:
    found = simulated(COSTS, 0, save_interval=10, hours=1)
    assert found == pytest.approx(10 / (10 * 1.02 + 5), abs=1e-3)


def test_the_plot_compares_copies_with_checkpoints_at_their_best_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints beside copies are written each half an hour, that is after 900 steps of 2 s."""
    asked: dict[str, list[Any]] = {"simulated": [], "expected": []}

    def note(name: str) -> Any:
        def noted(*given: Any, **more: Any) -> float:
            asked[name].append((*given, *more.values()))
            return 0.5

        return noted

    for name in asked:
        monkeypatch.setattr(goodput, name, note(name))
    costs = Costs(step=2.0, snapshot=0.25, save=5.0, restart=3.0, copied_every=4)
    plot_goodput(costs, [], tmp_path / "goodput.png", hours=7)
    assert asked["simulated"] == [(costs, rate, 900, 7) for rate in RATES]
    means = [3600 / rate for rate in RATES]
    alone = [(mean, math.sqrt(2 * 5.0 * mean), 5.0, 3.0) for mean in means]
    assert asked["expected"] == [*alone, *((mean, 8.0, 1.0, 3.0) for mean in means)]


def test_the_plot_is_written(tmp_path: Path) -> None:
    plot_goodput(COSTS, [Point(240, 0.8)], tmp_path / "goodput.png", hours=1)
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
