"""Terminal text: colours by weight, and marks where there are none."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_ext.inspect.preview.text import SpanSplitter, Terminal, grade
from tests.inspect.preview.rows import packed
from tests.inspect.preview.test_spans import chatml


def printed(folder: Path, console: Console, heaviest: float = 1.0) -> list[str]:
    """Return the token lines of "abcd<|im_end|>", with the weights 0, 1/4, 1 and 1."""
    made = chatml(folder)
    ids = made.tokenize("abcd<|im_end|>")
    terminal = Terminal(console, SpanSplitter(made), made.eod, heaviest)
    terminal.row(packed([(ids, [0, 0.25, 1, 1])], 6))
    assert isinstance(console.file, io.StringIO)
    return [text for text in console.file.getvalue().splitlines() if "│" in text]


def test_colours_follow_the_weight(tmp_path: Path) -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False, width=80
    )
    (text,) = printed(tmp_path, console)
    low = "\x1b[38;2;177;183;64m"  # shade 2 of 8: a seventh of the way from yellow to green
    full = "38;2;40;200;90m"
    assert text.endswith(
        f"\x1b[2;4ma\x1b[0m\x1b[2mb\x1b[0m{low}c\x1b[0m\x1b[{full}d\x1b[0m"
        f"\x1b[1;{full}<|im_end|>\x1b[0m"
    )


def test_marks_stand_in_for_colours(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    assert printed(tmp_path, console) == ["      0 │ ab⟦0.25|c⟧⟦d<|im_end|>⟧"]


def test_no_color_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    (text,) = printed(tmp_path, console)
    assert "38;2" not in text and "⟦0.25|" in text


def test_lines_are_cut_at_the_width_and_begin_with_their_position(tmp_path: Path) -> None:
    made = chatml(tmp_path)
    ids = made.tokenize("x" * 45)
    console = Console(file=io.StringIO(), width=30)
    Terminal(console, SpanSplitter(made), made.eod, 1.0).row(packed([(ids, [0] * 44)], 44))
    assert isinstance(console.file, io.StringIO)
    lines = [text for text in console.file.getvalue().splitlines() if "│" in text]
    assert lines == [
        f"      0 │ {'x' * 20}",
        f"     20 │ {'x' * 20}",
        f"     40 │ {'x' * 5}",
    ]


@pytest.mark.parametrize(
    ("weight", "heaviest", "shade"),
    [(0, 1, 0), (float("nan"), 1, 0), (1e-9, 1, 1), (0.25, 1, 2), (0.5, 0.5, 8), (2, 1, 8)],
)
def test_shades(weight: float, heaviest: float, shade: int) -> None:
    assert grade(weight, heaviest) == shade
