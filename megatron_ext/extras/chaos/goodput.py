"""The share of time that a run spends on steps that are kept, as a function of the fault rate.

`expected` is the formula of J. T. Daly ("A higher order estimate of the optimum checkpoint interval
for restart dumps", Future Generation Computer Systems 22, 2006). `best_interval` is the formula of
J. W. Young ("A first order approximation to the optimum checkpoint interval", 1974). `simulated`
draws individual faults, which may also occur during a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from megatron_ext.disk.figures import new_figure


@dataclass(frozen=True)
class Costs:
    """Measured times of a run, in seconds.

    Attributes:
        step: time of a step without faults, snapshots and saves.
        snapshot: mean time that snapshots add to a step.
        save: time for which a checkpoint stops the run.
        restart: time from a fault to the first new step, including the time to detect the fault.
        copied_every: steps between snapshots; None without snapshots.
    """

    step: float
    snapshot: float
    save: float
    restart: float
    copied_every: int | None = 1


@dataclass(frozen=True)
class Point:
    """A measured goodput: faults per hour, and the share of time on steps that were kept."""

    faults_per_hour: float
    goodput: float


def expected(mean_time_between: float, work: float, keeping: float, restart: float) -> float:
    """Return the expected share of useful time if faults occur at random, by Daly's formula.

    All times have the same unit.

    Args:
        mean_time_between: mean time between faults.
        work: useful time between two saved states; a fault loses all work since the last one.
        keeping: time to save a state.
        restart: time of a restart.
    """
    mean = mean_time_between
    total = mean * math.exp(restart / mean) * math.expm1((work + keeping) / mean)
    return work / total


def best_interval(mean_time_between: float, keeping: float) -> float:
    """Return the best useful time between two checkpoints, by Young's formula.

    The formula is ``sqrt(2 * keeping * mean_time_between)``, where ``keeping`` is the time to save
    a checkpoint and ``mean_time_between`` the mean time between faults, all in the same unit.
    """
    return math.sqrt(2.0 * keeping * mean_time_between)


def simulated(
    costs: Costs, faults_per_hour: float, *, save_interval: int, hours: float, seed: int = 0
) -> float:
    """Return the share of useful time in a simulated run of about ``hours`` hours.

    A fault loses all steps since the last snapshot or checkpoint. ``save_interval`` is the number
    of steps between checkpoints, and ``seed`` determines the times of the faults.
    """
    random = Random(seed)
    rate = faults_per_hour / 3600.0
    step = costs.step + costs.snapshot
    copied_every = costs.copied_every or save_interval

    def next_fault() -> float:
        return random.expovariate(rate) if rate else math.inf

    clock = 0.0
    done = 0
    kept = 0
    fault = next_fault()
    while clock < 3600.0 * hours:
        saves = (done + 1) % save_interval == 0
        end = clock + step + (costs.save if saves else 0.0)
        if end <= fault:
            clock = end
            done = done + 1
            kept = done if saves or done % copied_every == 0 else kept
            continue
        clock = fault
        done = kept
        fault = clock + next_fault()
        while fault < clock + costs.restart:
            clock, fault = fault, fault + next_fault()
        clock += costs.restart
    return done * costs.step / clock


RATES = (1, 2, 3, 6, 10, 20, 30, 60, 120, 240)
"""Faults per hour that are plotted."""


def plot_goodput(costs: Costs, measured: Sequence[Point], path: Path, hours: float = 100.0) -> None:
    """Plot goodput against the fault rate to the PNG file ``path``, with the ``measured`` points.

    The curves are for a run with snapshots, simulated and by Daly's formula, and for one with
    checkpoints alone, by the formula. The simulated run lasts ``hours``, and writes a checkpoint
    every half hour.
    """
    figure = new_figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    every = round(1800 / costs.step)
    with_copies = [simulated(costs, r, save_interval=every, hours=hours) for r in RATES]
    without = [
        expected(3600 / r, best_interval(3600 / r, costs.save), costs.save, costs.restart)
        for r in RATES
    ]
    copied = costs.copied_every or every
    at_stake = costs.step * copied, costs.snapshot * copied
    formula = [expected(3600 / r, *at_stake, costs.restart) for r in RATES]
    axes.plot(RATES, with_copies, "o-", color="tab:blue", label="copies in memory, simulated")
    axes.plot(RATES, formula, "--", color="tab:blue", label="copies in memory, by Daly's formula")
    label = "checkpoints alone at Young's interval, by Daly's formula"
    axes.plot(RATES, without, ":", color="tab:gray", label=label)
    if measured:
        rates = [p.faults_per_hour for p in measured]
        values = [p.goodput for p in measured]
        axes.plot(rates, values, "D", color="tab:red", label="measured")
    axes.set_xscale("log")
    axes.set_xticks(RATES, [str(rate) for rate in RATES])
    axes.set_xlabel("faults per hour")
    axes.set_ylabel("share of time on steps that count")
    axes.set_title(
        f"step {costs.step:.3g} s, copies in memory {costs.snapshot * 1e3:.2g} ms a step, "
        f"save {costs.save:.3g} s, fault to new step {costs.restart:.3g} s"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=120)
