"""Draws charts as SVG and HTML that need no script, font or other file.

The SVG holds only lines, in a square of `WIDTH` × `HEIGHT` units that the browser stretches to the
available space. The labels are HTML beside it. So a chart is as readable on a phone as on a large
screen, and takes its colours from the page's style sheet. A small script in the page can show the
values under the pointer; without it the charts are still complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 1000, 300
MAX_POINTS = 800
"""Largest number of points that are drawn of a curve; see `decimated`."""


@dataclass(frozen=True)
class Curve:
    """A curve of a chart: its name, its points, and the style sheet's classes that draw it.

    A curve without a name, such as the dots on a line, is not in the legend.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str


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


def decimated(curve: Curve) -> Curve:
    """Return a curve with at most `MAX_POINTS` points.

    A longer curve is cut into groups of successive points. Each keeps its lowest and highest finite
    point; one without finite points remains a gap.
    """
    count = len(curve.xs)
    if count <= MAX_POINTS:
        return curve
    size = math.ceil(2 * count / MAX_POINTS)
    chosen = list[int]()
    for start in range(0, count, size):
        bucket = range(start, min(start + size, count))
        finite = [i for i in bucket if math.isfinite(curve.ys[i])]
        if not finite:
            chosen.append(start)
            continue
        ends = min(finite, key=curve.ys.__getitem__), max(finite, key=curve.ys.__getitem__)
        chosen += sorted(set(ends))
    xs = [curve.xs[i] for i in chosen]
    ys = [curve.ys[i] for i in chosen]
    return Curve(curve.name, xs, ys, curve.style)


def visible_range(curves: Iterable[Curve]) -> tuple[float, float]:
    """Return the range of the y axis.

    It holds all finite values, except that the highest 1 % of a curve with 200 or more are cut off
    if they are far above the others. It is (0, 1) if there are no finite values.
    """
    low = math.inf
    high = -math.inf
    for curve in curves:
        values = sorted(y for y in curve.ys if math.isfinite(y))
        if not values:
            continue
        bottom = values[0]
        top = values[-1]
        if len(values) >= 200:
            usual = values[int(0.99 * (len(values) - 1))]
            top = min(top, usual + 0.5 * (usual - bottom))
        low = min(low, bottom)
        high = max(high, top)
    return (low, high) if low <= high else (0.0, 1.0)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    x_range: tuple[float, float],
    from_zero: bool = False,
) -> Markup | None:
    """Draw curves over iterations, with marks; return None if no curve has a finite point.

    ``x_range`` has the first and the last iteration. ``from_zero`` makes the y axis include zero.
    """
    curves = [curve for curve in curves if any(map(math.isfinite, curve.ys))]
    if not curves:
        return None
    low, high = visible_range(curves)
    low = min(low, 0.0) if from_zero else low
    margin = 0.06 * (high - low)
    y = Axis.over(low if from_zero and low == 0 else low - margin, high + margin, count=4)
    x = Axis.over(*x_range, whole=True)
    drawn = Markup("").join(_line(decimated(curve), x, y) for curve in curves)
    crossed = Markup("").join(
        _svg_line(WIDTH * x.at(m.x), 0, WIDTH * x.at(m.x), HEIGHT, f"mark {m.kind}") for m in marks
    )
    last = "; ".join(f"{c.name} ends at {_last(c.ys)}" for c in curves if c.name)
    text = f"{title} from iteration {show(x_range[0])} to {show(x_range[1])}. {last}."
    return Markup(
        '<figure class="chart"{data}><figcaption><span class="name">{title}</span>{legend}'
        '<output class="readout" aria-hidden="true"></output></figcaption>'
        '<div class="plot"><svg viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" '
        'aria-label="{text}"><title>{title}</title><desc>{text}</desc>'
        "{grid}{crossed}{drawn}</svg>{flags}{y_labels}{x_labels}</div></figure>"
    ).format(
        data=_data(x, y),
        title=title,
        legend=_legend(curves),
        w=WIDTH,
        h=HEIGHT,
        text=text,
        grid=_grid(y),
        crossed=crossed,
        drawn=drawn,
        flags=flag_links(marks, x),
        y_labels=tick_labels("y", y),
        x_labels=tick_labels("x", x),
    )


def _last(values: Sequence[float]) -> str:
    return show(next(v for v in reversed(values) if math.isfinite(v)))


def _data(x: Axis, y: Axis) -> Markup:
    """Return HTML attributes from which the page's script computes the values under the pointer."""
    values = {"x0": x.low, "x1": x.high, "y0": y.low, "y1": y.high}
    return Markup("").join(Markup(' data-{}="{}"').format(k, f"{v:.9g}") for k, v in values.items())


def _line(curve: Curve, x: Axis, y: Axis) -> Markup:
    """Draw a curve as one path for each stretch of finite points; a lone point becomes a dot."""
    pieces = list(_pieces(curve, x, y))
    path = " ".join("M" + "L".join(piece if len(piece) > 1 else piece * 2) for piece in pieces)
    return Markup('<path class="{} curve" data-name="{}" d="{}"/>').format(
        curve.style, curve.name, path
    )


def _pieces(curve: Curve, x: Axis, y: Axis) -> Iterator[list[str]]:
    alone = "dots" in curve.style.split()
    piece: list[str] = []
    for position, value in zip(curve.xs, curve.ys, strict=True):
        if math.isfinite(value):
            height = min(max(1 - y.at(value), -0.01), 1.01)
            piece.append(f"{WIDTH * x.at(position):.1f} {HEIGHT * height:.1f}")
        if piece and (alone or not math.isfinite(value)):
            yield piece
            piece = []
    if piece:
        yield piece


def _svg_line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return Markup('<path class="{}" d="M{} {}L{} {}"/>').format(
        style, *(f"{value:.1f}" for value in (x1, y1, x2, y2))
    )


def _legend(curves: Sequence[Curve]) -> Markup:
    named = [curve for curve in curves if curve.name]
    if len(named) < 2:
        return Markup("")
    entries = Markup("").join(
        Markup('<span class="key"><i class="{}"></i>{}</span>').format(c.style, c.name)
        for c in named
    )
    return Markup('<span class="keys">{}</span>').format(entries)


def flag_links(marks: Sequence[Mark], x: Axis) -> Markup:
    """Return HTML links, placed above the lines of ``marks`` and leading to their targets."""
    return Markup("").join(
        Markup(
            '<a class="flag {}" style="left:{:.2f}%" href="#{}" title="{}" aria-label="{}"></a>'
        ).format(m.kind, 100 * x.at(m.x), m.target, m.text, m.text)
        for m in marks
    )


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
    return Markup("").join(_svg_line(0, height, WIDTH, height, "grid") for height in heights)
