"""Charts, tables and pages by their numbers, without a browser."""

import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.inspect.pages import page, table
from megatron_ext.inspect.pages.charts import (
    HEIGHT,
    MAX_POINTS,
    WIDTH,
    Axis,
    Curve,
    Mark,
    column_chart,
    decimated,
    line_chart,
    show,
    visible_range,
)
from megatron_ext.inspect.pages.table import Table, moment, text_of

NAN = math.nan


@pytest.mark.parametrize(
    ("value", "shown"),
    [(999.94, "999.9"), (1000.4, "1,000"), (1234.5, "1,234"), (-7.0, "-7"), (999_999.0, "999,999"),
     (1e6, "1e6"), (1e-4, "0.0001"), (9.96e-5, "9.96e-5"), (-1.25e9, "-1.25e9"), (NAN, "nan")],
)  # fmt: skip
def test_numbers_at_the_limits_of_a_form(value: float, shown: str) -> None:
    assert show(value) == shown


def test_axes_cover_their_range_in_round_steps() -> None:
    assert Axis.over(0, 10).ticks == (0, 2, 4, 6, 8, 10)
    assert Axis.over(0, 1, count=4).ticks == (0, 0.25, 0.5, 0.75, 1)
    assert Axis.over(0, 2, whole=True).ticks == (0, 1, 2)
    assert Axis.over(0, 2).ticks == (0, 0.5, 1, 1.5, 2)
    assert Axis.over(0, 12, whole=True).ticks == (0, 3, 6, 9, 12)
    assert (Axis.over(40, 40).low, Axis.over(40, 40).high) == (38, 42)
    assert (Axis.over(0, 0).low, Axis.over(0, 0).high) == (-1, 1)
    assert [Axis(2, 6, ()).at(value) for value in (2, 3, 6)] == [0, 0.25, 1]


def test_rare_peaks_of_a_long_curve_are_cut_and_those_of_a_short_one_are_not() -> None:
    """A curve that rises steadily is shown whole."""

    def range_of(*ys: float) -> tuple[float, float]:
        return visible_range([Curve("a", range(len(ys)), ys, "line")])

    assert range_of(*[1.0, 3.0] * 99, 100.0) == (1, 100)
    assert range_of(*[1.0, 3.0] * 100, 100.0) == (1, 4)
    assert range_of(*range(300)) == (0, 299)
    assert range_of(NAN, 2.0, math.inf) == (2, 2)
    assert range_of(NAN) == (0, 1)
    two = [Curve("a", [0], [5.0], ""), Curve("b", [0], [-3.0], "")]
    assert visible_range(two) == (-3, 5)


def test_a_curve_is_thinned_to_the_ends_of_its_parts() -> None:
    ys = [float(number % 7) for number in range(2 * MAX_POINTS)]
    assert decimated(curve := Curve("a", range(MAX_POINTS), ys[:MAX_POINTS], "")) is curve
    level = decimated(Curve("a", range(2 * MAX_POINTS), [1.0] * (2 * MAX_POINTS), "line"))
    assert list(level.xs) == list(range(0, 2 * MAX_POINTS, 4)) and set(level.ys) == {1.0}
    assert (level.name, level.style) == ("a", "line")
    thin = decimated(Curve("a", range(2 * MAX_POINTS), ys, ""))
    for start in range(0, 2 * MAX_POINTS, 4):
        part = {y for x, y in zip(thin.xs, thin.ys, strict=True) if start <= x < start + 4}
        assert part == {min(ys[start : start + 4]), max(ys[start : start + 4])}


def paths(chart: Any) -> dict[str, list[list[tuple[float, float]]]]:
    """Return the stretches of each curve of a chart, as points of its square."""
    assert chart is not None
    found = re.findall(r'<path class="([^"]*) curve" data-name="[^"]*" d="([^"]*)"', str(chart))
    return {
        style: [
            [(float(x), float(y)) for x, y in (point.split() for point in piece.split("L"))]
            for piece in drawn.split("M")[1:]
        ]
        for style, drawn in found
    }


def test_points_of_a_curve_stand_at_their_values() -> None:
    line = Curve("loss", [0, 1, 2, 3, 4], [4.0, 0.0, NAN, 2.0, NAN], "line")
    dots = Curve("", [0, 4], [1.0, 3.0], "dots")
    marks = [Mark(3, "fault", "a <fault>", "fault-1")]
    chart = line_chart("the loss", [line, dots], marks, x_range=(0, 4), from_zero=True)
    high = 4 * 1.06

    def at(x: float, y: float) -> tuple[float, float]:
        return round(WIDTH * x / 4, 1), round(HEIGHT * (1 - y / high), 1)

    # A line is interrupted where there is no value; dots are not joined; a lone point is a dot.
    assert paths(chart) == {
        "line": [[at(0, 4), at(1, 0)], [at(3, 2), at(3, 2)]],
        "dots": [[at(0, 1), at(0, 1)], [at(4, 3), at(4, 3)]],
    }
    text = str(chart)
    assert f'class="mark fault" d="M{WIDTH * 0.75:.1f} 0.0L{WIDTH * 0.75:.1f} {HEIGHT}.0"' in text
    assert 'style="left:75.00%" href="#fault-1" title="a &lt;fault&gt;"' in text
    assert "the loss from iteration 0 to 4. loss ends at 2." in text
    # A single name needs no legend.
    assert "keys" not in text
    ticks = re.findall(r'tick x" style="left:([\d.]+)%">([^<]+)<', text)
    assert ticks == [("0.00", "0"), ("25.00", "1"), ("50.00", "2"), ("75.00", "3"), ("100.00", "4")]
    short = str(line_chart("the loss", [Curve("a", [0, 2], [1.0, 2.0], "line")], x_range=(0, 2)))
    assert re.findall(r'tick x" style="left:[\d.]+%">([^<]+)<', short) == ["0", "1", "2"]
    assert line_chart("none", [Curve("a", [0], [NAN], "")], x_range=(0, 1)) is None
    two = [Curve(name, [0, 1], [1.0, 2.0], name) for name in ("a", "b")]
    assert str(line_chart("x", two, x_range=(0, 1))).count('class="key"') == 2


def test_a_chart_from_zero_shows_values_below_it() -> None:
    for ys, low in (([-2.0, 2.0], -2.24), ([3.0, 5.0], 0.0), ([0.0, 5.0], 0.0)):
        curve = Curve("a", [0, 1], ys, "line")
        text = str(line_chart("x", [curve], x_range=(0, 1), from_zero=True))
        assert f'data-y0="{low:g}"' in text
    text = str(line_chart("x", [Curve("a", [0, 1], [3.0, 5.0], "")], x_range=(0, 1)))
    assert 'data-y0="2.88" data-y1="5.12"' in text


def test_columns_stand_above_their_labels() -> None:
    columns = [("first", "1", 4.0), ("second", "2", 0.0), ("third", "3", 2.0), ("4th", "4", 1.0)]
    text = str(column_chart("time", columns, unit="s"))
    labels = re.findall(r'tick x" style="left:([\d.]+)%">(\d)<', text)
    assert labels == [("12.50", "1"), ("37.50", "2"), ("62.50", "3"), ("87.50", "4")]
    drawn = re.findall(r'd="M([\d.]+) 300V([\d.]+)H([\d.]+)V300Z"><title>(\w+)', text)
    assert [(name, float(left), float(right)) for left, _, right, name in drawn] == [
        ("first", 15.0, 235.0), ("third", 515.0, 735.0), ("4th", 765.0, 985.0),
    ]  # fmt: skip
    heights = [HEIGHT - float(top) for _, top, _, _ in drawn]
    assert heights == pytest.approx([4 * heights[2], 2 * heights[2], heights[2]], abs=0.3)
    assert "first: 4 s; second: 0 s; third: 2 s; 4th: 1 s" in text
    # A column that is nearly nothing is a line still.
    tiny = str(column_chart("time", [("all", "1", 1e6), ("one", "2", 1.0)], unit="s"))
    assert re.findall(r"300V([\d.]+)H[\d.]+V300Z\"><title>one", tiny) == [f"{HEIGHT - 1}.0"]
    for none in ([], [("a", "a", 0.0)]):
        assert column_chart("x", none, unit="s") is None


def test_a_long_table_keeps_its_newest_rows_and_their_anchors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "MAX_ROWS", 3)
    rows = [[str(number)] for number in range(5)]
    ids = [f"row-{number}" for number in range(5)]
    whole = Table(["n"], rows[:3], ids=ids[:3])
    assert whole.shortened() is whole
    short = Table(["n"], rows, frozenset({"n"}), ids, "A note.").shortened()
    assert (short.rows, short.ids) == (rows[2:], ids[2:])
    assert short.note == "A note. The newest 3 of 5 are shown."
    assert (short.columns, short.numeric) == (["n"], {"n"})


def test_texts_of_cells_are_short_and_on_one_line() -> None:
    assert text_of("a" * 20, 20) == "a" * 20
    assert text_of("a" * 21, 20) == "a" * 19 + "…"
    assert text_of("a\nb\tc\x1b[31m") == "a b c [31m"
    assert text_of(None) == "–" and text_of(0.00003) == "3e-5" and text_of(12) == "12"
    assert text_of({"a": [1, 2.5], "b": None}) == "a: 1, 2.5, b: –"
    assert text_of(list(range(50))) == ", ".join(map(str, range(40)))


def test_moments_are_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert moment(86_399) == "1970-01-01 23:59:59"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert moment("soon") == moment(1e300) == moment(None) == "–"


def test_a_page_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    page.write_page(path, "a lone surrogate \ud800, as in names of files")
    assert path.read_text() == "a lone surrogate ?, as in names of files"

    def fail(source: Any, target: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        page.write_page(path, "newer")
    assert path.read_text().startswith("a lone") and list(tmp_path.iterdir()) == [path]
