"""The lines and the progress bar of a run on a terminal.

Logs get Megatron-LM's long lines (`files.iteration_line`). A terminal gets short ones that fit its
width, with what a person watches, above a bar.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
from datetime import timedelta
from typing import NamedTuple, TextIO

from megatron_ext.train.reporting.lines import LinePrinter, evaluation_title
from megatron_ext.train.reporting.records import EvaluationRecord, IterationRecord

MAX_WIDTH = 110
"""Most columns of a line, even on a wider terminal."""
_BAR_WIDTH = 20
_CLEAR = "\r\x1b[K"
"""Moves the cursor to the first column, and clears the line."""
_ALARM = "\x1b[1;31m"
_USUAL = "\x1b[0m"


class _Part(NamedTuple):
    """A part of a line.

    If the line is too long, the parts with the highest ``rank`` are left out first, and those of
    rank 0 never.
    """

    text: str
    rank: int
    alarming: bool = False


def columns_of(stream: TextIO) -> int:
    """Return the width of the terminal that ``stream`` writes to; 80 if it is not known."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # It is closed, or no terminal.
        columns = 0
    return columns or shutil.get_terminal_size().columns or 80


def short_line(record: IterationRecord, width: int, *, in_color: bool = False) -> str:
    """Return a line on the steps since the last report, of at most ``width`` columns.

    Parts that do not fit are left out, the least important ones first. Skipped steps are never left
    out. With ``in_color``, they and numbers that are not finite are shown in red.
    """
    total = str(record.num_iterations)
    parts = [_Part(f"step {record.iteration:>{len(total)}}/{total}", 0)]
    for rank, (name, value) in zip((1, 6, *range(20, 99)), record.losses.items(), strict=False):
        label = "loss" if rank == 1 else name.removesuffix(" loss")
        parts.append(_Part(f"{label} {value:#.5g}", rank, not math.isfinite(value)))
    rate = f"{record.learning_rate:.2e}".replace("e-0", "e-")
    norm = record.grad_norm
    parts += [
        _Part(f"lr {rate}", 3),
        _Part(f"grad {norm:#.3g}", 4, not math.isfinite(norm)),
        _Part(_seconds(record.seconds), 5),
        _Part(_throughput(record), 7),
    ]
    if record.memory:
        parts.append(_Part(f"{max(record.memory.values()) / 2**30:.1f} GiB", 8))
    left = timedelta(seconds=round((record.num_iterations - record.iteration) * record.seconds))
    parts.append(_Part(f"ETA {re.sub(' days?, ', 'd ', str(left))}", 2))
    if record.skipped:
        nans = f" ({record.nans} NaN)" if record.nans else ""
        parts.append(_Part(f"SKIPPED {record.skipped}{nans}", 0, alarming=True))
    for least in sorted(parts, key=lambda part: -part.rank):
        if least.rank > 0 and sum(len(part.text) + 2 for part in parts) - 2 > width:
            parts.remove(least)
    return "  ".join(
        f"{_ALARM}{part.text}{_USUAL}" if in_color and part.alarming else part.text
        for part in parts
    )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:#.3g} s"


def _throughput(record: IterationRecord) -> str:
    """Return the samples per second if the task names its samples, otherwise tokens per second."""
    if record.sample_name is not None:
        return f"{record.samples_per_second:#.3g} {record.sample_name}/s"
    rate = record.tokens_per_second
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:#.3g}{unit} tok/s"
    return f"{rate:#.3g} tok/s"


def short_evaluation(record: EvaluationRecord, width: int) -> list[str]:
    """Return lines on an evaluation, of at most ``width`` columns each."""
    values = []
    for name, value in record.losses.items():
        perplexity = record.perplexity_of(name)
        known = "" if perplexity is None else f" (perplexity {perplexity:#.4g})"
        values.append(f"{name} {value:#.5g}{known}")
    text = f"{evaluation_title(record)}: {', '.join(values)}"
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def progress_bar(iteration: int, num_iterations: int) -> str:
    """Return a short bar with the share of the steps that are done."""
    share = min(1.0, iteration / max(1, num_iterations))
    done = round(share * _BAR_WIDTH)
    return f"{'━' * done}{'─' * (_BAR_WIDTH - done)} {share:4.0%}"


class TerminalPrinter(LinePrinter):
    """Prints the lines of a run on a terminal, above a bar.

    Each of the two streams may be redirected. The lines go to stdout; they are short if it is a
    terminal, and Megatron-LM's otherwise. The bar is drawn on stderr if that is a terminal.

    Between two lines the cursor stands in the first column of the bar. So whatever another process
    prints there overwrites the bar, instead of being appended to it.
    """

    def __init__(self, *, on_gpu: bool, num_iterations: int, iteration: int) -> None:
        super().__init__(on_gpu=on_gpu)
        self._num_iterations = num_iterations
        self._iteration = iteration
        is_simple = os.environ.get("TERM", "dumb") == "dumb"
        self._shortens = sys.stdout.isatty()
        self._in_color = self._shortens and not is_simple and not os.environ.get("NO_COLOR")
        self._has_bar = sys.stderr.isatty() and not is_simple
        self._draw()

    def _width(self) -> int:
        # A terminal may start a new line after a line that fills its last column.
        return min(MAX_WIDTH, columns_of(sys.stdout) - 1)

    def _draw(self) -> None:
        if self._has_bar and columns_of(sys.stderr) > _BAR_WIDTH + 5:
            bar = progress_bar(self._iteration, self._num_iterations)
            print(f"{_CLEAR}{bar}\r", end="", file=sys.stderr, flush=True)

    def print_lines(self, lines: list[str]) -> None:
        """Print lines in place of the bar, and draw the bar below them."""
        if self._has_bar:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
        super().print_lines(lines)
        self._draw()

    def on_iteration(self, record: IterationRecord) -> None:
        self._iteration = record.iteration
        if self._shortens:
            printed = record.printed or record
            line = short_line(printed, self._width(), in_color=self._in_color)
            self.print_lines([line])
        else:
            super().on_iteration(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        if self._shortens:
            self.print_lines(short_evaluation(record, self._width()))
        else:
            super().on_evaluation(record)

    def close(self) -> None:
        if self._has_bar:
            self._has_bar = False
            print(_CLEAR, end="", file=sys.stderr, flush=True)
