"""Lines on a terminal fit its width, and the bar below them breaks none."""

import fcntl
import math
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.train.reporting import build, terminal
from megatron_ext.train.reporting.records import EvaluationRecord
from tests.train.reporting.made_up import VALIDATION
from tests.train.reporting.made_up import record_of as _record
from tests.training_runs import TINY, config_of, mock_data

LONG: dict[str, Any] = {
    "iteration": 123456,
    "num_iterations": 500000,
    "losses": {"lm loss": 10.43256, "mtp_1 loss": 9.87654, "load_balancing_loss": 1.0023},
    "seconds": 2.3456,
    "tokens": 4.2e6,
    "grad_norm": 1234.5,
    "memory": {"allocated": 40.0 * 2**30, "reserved": 71.25 * 2**30},
}


@pytest.mark.parametrize("width", [40, 79, 109, 110])
def test_a_line_fits_and_keeps_what_matters_most(width: int) -> None:
    record = _record(**LONG, skipped=2, nans=1)
    line = terminal.short_line(record, width)
    assert len(line) <= width
    assert "SKIPPED 2 (1 NaN)" in line and line.startswith("step 123456/500000")
    if width >= 79:
        assert "  loss 10.433  lr 9.14e-4  " in line
    usual = terminal.short_line(_record(**LONG), width)
    assert len(usual) <= width and "SKIPPED" not in usual
    if width >= 109:
        for part in ("mtp_1 9.8765", "grad 1.23e+03", "2.35 s", "ETA 10d 5:20:22"):
            assert part in usual


def test_a_wide_line_has_everything_in_its_units() -> None:
    assert terminal.short_line(_record(**LONG), 1000) == (
        "step 123456/500000  loss 10.433  mtp_1 9.8765  load_balancing_loss 1.0023  lr 9.14e-4  "
        "grad 1.23e+03  2.35 s  1.79M tok/s  71.2 GiB  ETA 10d 5:20:22"
    )
    line = terminal.short_line(_record(sample_name="images", seconds=0.0123), 1000)
    assert line.startswith("step  12/100  loss 7.4225  lr 9.14e-4  grad 0.684  12 ms  1.30e+03 im")
    assert "tok/s" not in line and "GiB" not in line
    assert "  64.0 tok/s  " in terminal.short_line(_record(seconds=16.0), 1000)


def test_what_is_wrong_is_red() -> None:
    bad = _record(losses={"lm loss": math.nan}, grad_norm=math.inf, skipped=1)
    line = terminal.short_line(bad, 80, in_color=True)
    red = re.findall(r"\x1b\[1;31m(.*?)\x1b\[0m", line)
    assert red == ["loss nan", "grad inf", "SKIPPED 1"]
    assert "\x1b" not in terminal.short_line(_record(), 80, in_color=True)


def test_an_evaluation_is_wrapped() -> None:
    losses = {"lm loss": 2.0, **{f"task {number} score": 0.5 for number in range(9)}}
    lines = terminal.short_evaluation(EvaluationRecord("validation", 5, losses), 70)
    assert lines[0].startswith("validation loss at iteration 5: lm loss 2.0000 (perplexity 7.389)")
    assert len(lines) > 2 and max(map(len, lines)) <= 70
    assert " ".join(line.strip() for line in lines).count("score 0.50000") == 9


def screen(shown: str) -> list[str]:
    """Return the lines of a terminal of endless width that shows a program's output."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.|\r|\n", shown):
        if part == "\x1b[K":
            del lines[row][column:]
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines.append([])
        elif not part.startswith("\x1b"):
            lines[row] += " " * (column + 1 - len(lines[row]))
            lines[row][column] = part
            column += 1
    return ["".join(line) for line in lines]


class Terminal:
    """A terminal that shows what is written to stdout and stderr."""

    def __init__(self, columns: int) -> None:
        self._reader, self.writer = pty.openpty()
        self.resize(columns)

    def resize(self, columns: int) -> None:
        """Give the terminal another width."""
        fcntl.ioctl(self.writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def shown(self) -> str:
        """Return what has been written since the last call."""
        os.write(self.writer, b"\0")
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(self._reader, 4096)
        return text[:-1].decode()


@contextmanager
def on_terminal(columns: int, *streams: str) -> Iterator[Terminal]:
    """Let the given ``streams`` of this process write to a terminal."""
    made = Terminal(columns)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(made.writer, "w") as stream:
        patch.setenv("TERM", "xterm")
        for name in streams:
            patch.setattr(sys, name, stream)
        yield made


def _printer() -> terminal.TerminalPrinter:
    return terminal.TerminalPrinter(on_gpu=False, num_iterations=100, iteration=0)


@pytest.mark.parametrize("columns", [80, 110, 200])
def test_lines_stand_above_a_bar_at_any_width(columns: int) -> None:
    long = {**LONG, "num_iterations": 100}
    with on_terminal(columns, "stdout", "stderr") as shows:
        with build.Reporters([_printer()]) as reporters:
            reporters.on_iteration(_record(**{**long, "iteration": 25}))
            during = shows.shown()
            print("a note of another process, which knows of no bar", flush=True)
            reporters.say("a sentence of this run")
            reporters.on_evaluation(EvaluationRecord("validation", 12, {"lm loss": 3.5}))
            shows.resize(90)
            reporters.on_iteration(_record(**{**long, "iteration": 50}))
        lines = screen(during + shows.shown())
    assert screen(during)[-1] == "━━━━━───────────────  25%"
    first, note, sentence, evaluation, last, empty = lines
    assert len(first) <= min(columns - 1, 110) and first.startswith("step  25/100  loss 10.433  ")
    assert len(first) > min(columns - 1, 100) - 16
    assert note == "a note of another process, which knows of no bar"
    assert sentence == "> a sentence of this run"
    assert evaluation.startswith("validation loss at iteration 12: lm loss 3.5000 (perplexity 33.1")
    assert len(last) <= 89 and last.startswith("step  50/100  ")
    assert empty == ""


def test_a_log_keeps_megatron_lms_line_beside_a_terminal_with_a_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with on_terminal(80, "stderr") as shows:
        printer = _printer()
        printer.on_iteration(_record(25))
        printer.on_evaluation(VALIDATION)
        assert screen(shows.shown()) == ["━━━━━───────────────  25%"]
        printer.close()
    log = capsys.readouterr().out.splitlines()
    assert " iteration       25/     100 | consumed samples:" in log[0]
    assert log[1] == log[3] == "-" * len(log[1])


def test_a_log_beside_it_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(80, "stdout") as shows:
        printer = _printer()
        printer.on_iteration(_record(25, grad_norm=math.nan))
        printer.close()
        assert "grad \x1b[1;31mnan" not in (text := shows.shown())
        assert "\x1b[1;31mgrad nan\x1b[0m" in text and "━" not in text
        monkeypatch.setenv("NO_COLOR", "1")
        _printer().on_iteration(_record(25, grad_norm=math.nan))
        assert "\x1b" not in shows.shown()
    with on_terminal(80, "stdout", "stderr") as shows:
        monkeypatch.setenv("TERM", "dumb")
        _printer().on_iteration(_record(25, grad_norm=math.nan))
        assert "\x1b" not in shows.shown()


def test_a_terminal_of_unknown_width_has_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with on_terminal(0, "stdout"):
        assert terminal.columns_of(sys.stdout) == 80
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setenv("COLUMNS", "77")
        assert terminal.columns_of(file) == 77


def test_a_run_prints_short_lines_on_a_terminal_alone() -> None:
    config = config_of([*TINY, *mock_data(), "--train-iters", "2"])
    assert type(build._printer(config, 2, 0)).__name__ == "LinePrinter"
    with on_terminal(80, "stdout"):
        assert type(build._printer(config, 2, 0)).__name__ == "TerminalPrinter"
