"""Prepares the curves of one or more runs for a page, where a script draws them with uPlot."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megatron_ext.disk.reading import read_text
from megatron_ext.extras.report.curves import (
    MAX_POINTS,
    NOT_SMOOTHED,
    TRAINED,
    Curve,
    Panel,
    Progress,
    panels_of,
    progress_of,
    thinned,
)
from megatron_ext.extras.report.goodput import Goodput
from megatron_ext.extras.report.run_folder import RunFolder
from megatron_ext.extras.report.time_charts import Mark
from megatron_ext.inspect.pages.charts import show
from megatron_ext.inspect.pages.table import NOTHING, Table

COLOURS = ("computing", "restart", "evaluate", "save", "lost", "reduce", "data", "start")
"""Names of the style sheet's colours for curves, in order; then they repeat with dashes."""
_DASHES = ((), (6, 3), (2, 3), (9, 3, 2, 3))
_LISTED = 12
"""Number of curves whose last values the description of a chart names."""


@dataclass(frozen=True)
class PlottedRun:
    """A run whose curves are drawn; ``name`` tells it from the others of the page."""

    name: str
    folder: RunFolder
    goodput: Goodput
    panels: list[Panel]
    progress: Progress

    @classmethod
    def of(cls, name: str, folder: RunFolder, goodput: Goodput) -> PlottedRun:
        """Return the curves of a run; ``goodput`` is the account of its time."""
        return cls(name, folder, goodput, panels_of(folder), progress_of(folder, goodput))


@dataclass(frozen=True)
class Figure:
    """The texts of a chart: its title, and a description for those who do not see it."""

    title: str
    description: str


@dataclass(frozen=True)
class ChartData:
    """The charts of a page, with their curves and texts.

    Attributes:
        figures: the charts, in order.
        axes: the units of the x axis that can be chosen.
        json: the curves, as JSON for a data block of HTML.
        values: a table of the last and extreme values of each curve.
        is_long: whether the curves have so many points that they are smoothed at first.
        num_thinned: number of curves with more than ``max_points`` points, which are thinned.
    """

    figures: list[Figure]
    axes: list[str]
    json: Markup
    values: Table
    is_long: bool
    num_thinned: int
    max_points: int = MAX_POINTS


SMOOTHED_FROM = 200
"""Number of points from which a page smooths the curves at first."""


def chart_data(runs: Sequence[PlottedRun], marks: Iterable[Mark] = ()) -> ChartData:
    """Return the charts of ``runs``; each panel shows the curves of all runs that have it.

    ``marks`` are vertical lines at iterations.
    """
    titles = list(dict.fromkeys(panel.title for run in runs for panel in run.panels))
    figures = list[Figure]()
    panels = list[dict[str, Any]]()
    columns = (
        "value", "last", "last at", "first", "lowest", "lowest at", "highest", "highest at",
        "not finite",
    )  # fmt: skip
    values = Table(columns, numeric=frozenset(columns[1:]))
    for title in titles:
        shown = list[dict[str, Any]]()
        ends = list[str]()
        by_run = [
            [curve for panel in run.panels if panel.title == title for curve in panel.curves]
            for run in runs
        ]
        same = len({curve.label for curves in by_run for curve in curves}) == 1
        for index, (run, curves) in enumerate(zip(runs, by_run, strict=True)):
            for place, curve in enumerate(curves):
                label = curve.label
                if len(runs) > 1:
                    label = run.name if same else f"{run.name}: {label}"
                style = (place, 0) if len(runs) == 1 else (index, place)
                shown.append(_series(label, index, curve, *style))
                ends.append(_end(label, curve))
                named = curve.label if len(runs) == 1 else f"{run.name}: {curve.label}"
                values.rows.append(_row(named, curve))
        figures.append(Figure(title, _description(title, ends)))
        panels.append({"title": title, "smooth": title not in NOT_SMOOTHED, "series": shown})
    axes = ["iteration"]
    axes += ["samples"] if all(run.progress.samples for run in runs) else []
    if all(run.progress.hours for run in runs):
        longest = max((hours for run in runs for hours in run.progress.hours), default=0.0)
        axes.append("hours" if longest >= 2 else "minutes")
    content = {
        "panels": panels,
        "marks": [vars(mark) for mark in marks],
        "progress": [
            {
                "iteration": run.progress.iterations,
                "samples": _short(run.progress.samples),
                "hours": _short(run.progress.hours),
                "minutes": _short(60 * hours for hours in run.progress.hours),
            }
            for run in runs
        ],
    }
    first = [len(c.xs) for run in runs for panel in run.panels[:1] for c in panel.curves]
    is_long = max(first, default=0) >= SMOOTHED_FROM
    num_thinned = sum("means" in series for panel in panels for series in panel["series"])
    return ChartData(figures, axes, as_data_block(content), values, is_long, num_thinned)


def _series(label: str, run: int, curve: Curve, colour: int, dash: int) -> dict[str, Any]:
    points = thinned(curve)
    repeat = dash + colour // len(COLOURS)
    series: dict[str, Any] = {
        "name": label,
        "run": run,
        "colour": COLOURS[colour % len(COLOURS)],
        "dash": _DASHES[repeat % len(_DASHES)],
        "dots": curve.source != TRAINED,
        "x": points.xs,
        "y": _short(points.ys),
    }
    if points.means is not None:
        series |= {"means": {"x": _short(points.means[0]), "y": _short(points.means[1])}}
    return series


def _short(values: Iterable[float]) -> list[float | None]:
    """Return values with 6 digits; None for one that is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _end(label: str, curve: Curve) -> str:
    facts = curve.facts
    return f"{label} is never finite" if facts is None else f"{label} ends at {show(facts.last)}"


def _description(title: str, ends: Sequence[str]) -> str:
    more = f"; and {len(ends) - _LISTED} more" if len(ends) > _LISTED else ""
    return f"{title}. {'; '.join(ends[:_LISTED])}{more}. The table of values has more."


def _row(label: str, curve: Curve) -> tuple[str, ...]:
    facts = curve.facts
    if facts is None:
        return label, *[NOTHING] * 7, f"{len(curve.ys):,}"
    return (
        label,
        show(facts.last),
        f"{facts.last_at:,.0f}",
        show(facts.first),
        show(facts.lowest),
        f"{facts.lowest_at:,.0f}",
        show(facts.highest),
        f"{facts.highest_at:,.0f}",
        f"{facts.num_odd:,}" if facts.num_odd else NOTHING,
    )


def as_data_block(content: object) -> Markup:
    """Return JSON for a ``script`` element of type application/json.

    HTML ends such an element at the text ``</script``, so that each "<" is written as an escape.
    """
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


@cache
def _asset(name: str) -> str:
    return read_text(Path(__file__).parent / name).strip()


def chart_style() -> Markup:
    """Return the CSS of uPlot."""
    return Markup(_asset("uplot/uPlot.min.css"))


def scripts(*, live: bool) -> list[Markup]:
    """Return the scripts of a page: uPlot with its licence, ours, and for a server's page one more.

    ``live`` adds the script that asks the server for changes.
    """
    licence = _asset("uplot/LICENSE").replace("*/", "")
    texts = [f"/*\n{licence}\n*/\n{_asset('uplot/uPlot.iife.min.js')}", _asset("charts.js")]
    texts += [_asset("live.js")] if live else []
    return [Markup(text) for text in texts]


def policy(texts: Iterable[str], *, live: bool) -> str:
    """Return a Content-Security-Policy that lets a browser run the scripts ``texts`` and no others.

    A page that is not ``live`` may connect to nothing; pictures are only those within the page.
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    rules = ["default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'"]
    rules += ["img-src data:", "base-uri 'none'", "form-action 'none'"]
    return "; ".join([*rules, "connect-src 'self'"] if live else rules)
