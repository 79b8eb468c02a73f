"""Draws charts as SVG and HTML that need no script, font or other file.

The SVG holds only lines, in a square of `WIDTH` × `HEIGHT` units that the browser stretches to the
available space. The labels are HTML beside it. So a chart is as readable on a phone as on a large
screen, and takes its colours from the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 1000, 300


@dataclass(frozen=True)
class Axis:
    """The range of an axis and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, low: float, high: float, *, count: int = 5, whole: bool = False) -> Axis:
        """Return an axis from ``low`` to ``high`` with about ``count`` ticks at round numbers.

        ``whole`` allows ticks only at integers. An empty range is widened.
        """
        if not low < high:
            margin = abs(low) * 0.05 or 1.0
            low = low - margin
            high = high + margin
        rough = (high - low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(k * power for k in (1, 2, 2.5, 5, 10) if k * power >= rough * 0.999)
        if whole:
            step = max(1.0, math.ceil(step))
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        return cls(low, high, tuple(i * step for i in range(first, last + 1)))

    def at(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def show(value: float) -> str:
    """Return a short form of a number, such as "2.35", "1,024" or "3.0e-05"."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def tick_labels(which: str, axis: Axis) -> Markup:
    side = "left" if which == "x" else "bottom"
    return Markup("").join(
        Markup('<span class="tick {}" style="{}:{:.2f}%">{}</span>').format(
            which, side, 100 * axis.at(tick), show(tick)
        )
        for tick in axis.ticks
    )


def column_chart(
    title: str, columns: Sequence[tuple[str, str, float]], *, unit: str
) -> Markup | None:
    """Draw columns that start at zero; return None if no height is above zero.

    Args:
        title: the text above the chart.
        columns: name, short label and height of each column.
        unit: the unit of the heights.
    """
    if not columns or max(height for _, _, height in columns) <= 0:
        return None
    y = Axis.over(0.0, max(height for _, _, height in columns) * 1.04, count=4, whole=True)
    width = WIDTH / len(columns)
    drawn = Markup("")
    labels = Markup("")
    for index, (name, label, height) in enumerate(columns):
        left = (index + 0.06) * width
        right = (index + 0.94) * width
        top = HEIGHT * (1 - y.at(height))
        if height > 0:
            drawn += Markup(
                '<path class="columns" d="M{:.1f} {}V{:.1f}H{:.1f}V{}Z"><title>{}</title></path>'
            ).format(left, HEIGHT, min(top, HEIGHT - 1), right, HEIGHT, f"{name}: {show(height)}")
        labels += Markup('<span class="tick x" style="left:{:.2f}%">{}</span>').format(
            100 * (index + 0.5) / len(columns), label
        )
    text = "; ".join(f"{name}: {show(height)} {unit}" for name, _, height in columns)
    return Markup(
        '<figure class="chart"><figcaption><span class="name">{}</span></figcaption>'
        '<div class="plot"><svg viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}"><desc>{}</desc>{}{}</svg>{}{}</div></figure>'
    ).format(title, WIDTH, HEIGHT, title, text, _grid(y), drawn, tick_labels("y", y), labels)


def _grid(y: Axis) -> Markup:
    """Draw a horizontal line across the chart at each tick of the y axis."""
    heights = (HEIGHT * (1 - y.at(tick)) for tick in y.ticks)
    return Markup("").join(
        Markup('<path class="grid" d="M0.0 {:.1f}L{:.1f} {:.1f}"/>').format(height, WIDTH, height)
        for height in heights
    )
