"""Draws how the time of a run was spent: as a single bar, and over the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from markupsafe import Markup, escape

from megatron_ext.extras.report.goodput import CATEGORIES, Goodput
from megatron_ext.inspect.pages.charts import HEIGHT, WIDTH, Axis, tick_labels

_UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0))
BINS = 80
"""Number of columns in the chart over the run."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at ``x`` that marks an event in a chart.

    Attributes:
        kind: the style sheet's class for this kind of event.
        text: the description of the event.
        target: the id of the page's element that the mark links to.
    """

    x: float
    kind: str
    text: str
    target: str


def share_bar(seconds: dict[str, float]) -> Markup:
    """Draw one bar, divided by the seconds of the categories, in the order of `CATEGORIES`."""
    total = sum(seconds.values()) or 1.0
    parts = Markup("").join(
        Markup('<i class="c-{}" style="width:{:.3f}%" title="{}"></i>').format(
            name, 100 * seconds[name] / total, f"{label}: {seconds[name] / total:.1%}"
        )
        for name, label in CATEGORIES.items()
        if seconds.get(name, 0.0) > 0
    )
    text = "; ".join(
        f"{label} {seconds[name] / total:.1%}"
        for name, label in CATEGORIES.items()
        if seconds.get(name, 0.0) > 0
    )
    return Markup('<div class="bar" role="img" aria-label="{}">{}</div>').format(text, parts)


def time_chart(goodput: Goodput, marks: Sequence[Mark] = ()) -> Markup | None:
    """Draw how the categories of time changed over the run, as stacked columns of equal wall time.

    The x of each of ``marks`` is in seconds since the epoch. Time between launches takes no space.
    Return None for a run without any time.
    """
    wall = goodput.wall
    if wall <= 0:
        return None
    unit, length = next((u, n) for u, n in _UNITS if wall < 120 * n or u == "hours")
    x = Axis(0.0, wall / length, Axis.over(0.0, wall / length, count=6).ticks)
    placed = [replace(mark, x=goodput.elapsed(mark.x) / length) for mark in marks]
    return Markup(
        '<figure class="chart"><figcaption><span class="name">Share in percent over wall time '
        'in {}</span></figcaption><div class="plot"><svg viewBox="0 0 {} {}" '
        'preserveAspectRatio="none" role="img" aria-label="{}"><desc>{}</desc>{}</svg>{}{}{}</div>'
        "</figure>"
    ).format(
        unit,
        WIDTH,
        HEIGHT,
        "What the time was spent on over the run; the table has the sums.",
        "Each column is a stretch of wall time, divided by what it was spent on.",
        Markup("").join(_stacked(_columns(goodput))),
        flag_links(placed, x),
        tick_labels("y", Axis(0.0, 100.0, (0.0, 50.0, 100.0))),
        tick_labels("x", x),
    )


def flag_links(marks: Sequence[Mark], x: Axis) -> Markup:
    """Return HTML links, placed above the lines of ``marks`` and leading to their targets."""
    return Markup("").join(
        Markup(
            '<a class="flag {}" style="left:{:.2f}%" href="#{}" title="{}" aria-label="{}"></a>'
        ).format(m.kind, 100 * x.at(m.x), m.target, m.text, m.text)
        for m in marks
    )


def _columns(goodput: Goodput) -> list[dict[str, float]]:
    """Return the seconds of each category in each of `BINS` equal parts of the wall time."""
    columns = [dict.fromkeys(CATEGORIES, 0.0) for _ in range(BINS)]
    width = goodput.wall / BINS
    for interval in goodput.intervals:
        first = goodput.elapsed(interval.start) / width
        last = goodput.elapsed(interval.end) / width
        for index in range(int(first), min(BINS, math.ceil(last))):
            part = max(0.0, min(last, index + 1) - max(first, index)) / max(last - first, 1e-12)
            for name, value in interval.seconds.items():
                columns[index][name] += part * value
    return columns


def _stacked(columns: Sequence[dict[str, float]]) -> Iterator[Markup]:
    """Yield an SVG path for each category: its part of every column, stacked on the others."""
    floors = [0.0] * len(columns)
    edges = [WIDTH * i / len(columns) for i in range(len(columns) + 1)]
    for name, label in CATEGORIES.items():
        path = ""
        for index, ((left, right), column) in enumerate(zip(pairwise(edges), columns, strict=True)):
            total = sum(column.values())
            if total <= 0 or column[name] <= 0:
                continue
            low = floors[index]
            high = floors[index] + column[name] / total
            floors[index] = high
            top = HEIGHT * (1 - high)
            bottom = HEIGHT * (1 - low)
            path += f"M{left:.1f} {bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}Z"
        if path:
            yield Markup('<path class="c-{}" d="{}"><title>{}</title></path>').format(
                name, path, escape(label)
            )
