"""Charts, tables and pages by their numbers, without a browser."""

import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.inspect.pages import page, table
from megatron_ext.inspect.pages.charts import HEIGHT, Axis, column_chart, show
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
