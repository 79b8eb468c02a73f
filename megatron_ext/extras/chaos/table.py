"""Formats the outcomes of injected faults as tables, as lines of text and for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from megatron_ext.extras.chaos.outcome import Outcome, Result


def outcomes(results: Sequence[Result]) -> Table:
    """Return a table with a row for each fault of each run."""
    table = Table(title="Faults injected", title_justify="left")
    names = "layout seed fault where told".split()
    for name in (*names, "seen after", "new step after", "steps lost", "from", "weights", ""):
        table.add_column(name, overflow="fold")
    for result in results:
        weights = "equal" if result.weights_equal else "DIFFER"
        for outcome in result.outcomes:
            survived = not (outcome.problems or result.problems)
            table.add_row(
                result.case.layout.name,
                str(result.case.seed),
                outcome.fault.kind,
                outcome.where or "nowhere",
                outcome.told or "nothing",
                _seconds(outcome.seen_after),
                _seconds(outcome.resumed_after),
                "-" if outcome.steps_lost is None else str(outcome.steps_lost),
                outcome.restored_from or "-",
                weights,
                "PASS" if survived else "FAIL",
                style=None if survived else "red",
            )
    return table


def summary(results: Sequence[Result]) -> list[list[str]]:
    """Return the rows of a table: headings, and counts and times of each kind over all runs.

    Times are medians and, after a slash, maxima in seconds.
    """
    headings = (
        "fault", "cases", "survived", "told rightly", "weights equal", "steps lost at most",
        "seen after (s)", "new step after (s)",
    )  # fmt: skip
    rows = [list(headings)]
    cases = [(result, outcome) for result in results for outcome in result.outcomes]
    for kind in dict.fromkeys(outcome.fault.kind for _, outcome in cases):
        mine = [(r, o) for r, o in cases if o.fault.kind == kind]
        counts = [
            len(mine),
            sum(not (r.problems or o.problems) for r, o in mine),
            sum(not o.problems for _, o in mine),
            sum(r.weights_equal for r, _ in mine),
            max((o.steps_lost or 0 for _, o in mine), default=0),
        ]
        times = [_spread([getattr(o, x) for _, o in mine]) for x in ("seen_after", "resumed_after")]
        rows.append([kind, *map(str, counts), *times])
    return rows


def _spread(values: Sequence[float | None]) -> str:
    times = [value for value in values if value is not None]
    return f"{statistics.median(times):.2f} / {max(times):.2f}" if times else "-"


def problems(results: Sequence[Result]) -> list[str]:
    """Return a line for each problem of a run or a fault, and each process of a run that hung."""
    lines = []
    for result in results:
        name = f"{result.case.layout.name}, seed {result.case.seed}"
        lines += [f"{name}: {text} (see {result.folder})" for text in result.problems]
        lines += [f"{name}: {process}" for process in result.ended.processes]
        for outcome in result.outcomes:
            fault = outcome.where or f"step {outcome.fault.iteration}"
            lines += [f"{name}: {outcome.fault.kind} ({fault}): {x}" for x in outcome.problems]
    return lines


def as_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a dictionary for each fault of each run, with the columns of `outcomes`, for JSON."""
    return [_row(result, outcome) for result in results for outcome in result.outcomes]


def _row(result: Result, outcome: Outcome) -> dict[str, Any]:
    return {
        "layout": result.case.layout.name,
        "seed": result.case.seed,
        "fault": outcome.fault.kind,
        "where": outcome.where,
        "told": outcome.told,
        "seen_after": outcome.seen_after,
        "new_step_after": outcome.resumed_after,
        "steps_lost": outcome.steps_lost,
        "restored_from": outcome.restored_from,
        "weights_equal": result.weights_equal,
        "problems": [*result.problems, *outcome.problems],
    }


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
