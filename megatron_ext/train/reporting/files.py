"""The files that a run writes into its save folder: metrics, configuration and progress."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import is_count, lines_of, row_of
from megatron_ext.disk.writing import open_to_append, write_text
from megatron_ext.train.reporting.records import EvaluationRecord, IterationRecord

METRICS_FILE = "metrics.jsonl"
CONFIGURATION_FILE = "config.yaml"
TIME, LAUNCHED, ENDED = "time", "launched", "ended"
"""The kinds of rows that say how time was spent: `TIME` for an interval of steps, `LAUNCHED` for
each start of the ranks, `ENDED` for the end of a launch (which includes all restarts)."""
OF_TIME = (TIME, LAUNCHED, ENDED)
SAME_LAUNCH = 1.0
"""Seconds by which the start times of a launch in two of its rows may differ."""


_NOT_FINITE = {word: float(word) for word in ("NaN", "Infinity", "-Infinity")}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `MetricsFile` up to the first line that is not a valid row.

    Return [] if the file does not exist.

    Raises:
        UnreadableFile: the file cannot be read, or is no regular file.
    """
    rows: list[dict[str, Any]] = []
    if os.path.exists(path):
        for line in lines_of(path):
            row = row_of(line)
            if row is None or not _is_row(row):
                break
            rows.append(with_numbers(row))
    return rows


def _is_row(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("kind"), str) and is_count(row.get("iteration"))


def with_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which words that stand for non-finite numbers, such as "NaN", are floats."""
    words = [k for k, v in row.items() if isinstance(v, str) and v in _NOT_FINITE]
    return row | {name: _NOT_FINITE[row[name]] for name in words} if words else row


def as_json(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON; non-finite numbers become words such as "NaN"."""
    numbers = {name: value for name, value in row.items() if isinstance(value, float)}
    words = {k: json.dumps(v) for k, v in numbers.items() if not math.isfinite(v)}
    return json.dumps({**row, **words}, allow_nan=False) + "\n"


def number(value: object) -> float:
    """Return a value from a file as a float; raise a ValueError if it is no finite number."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number")
    try:
        parsed = float(value)
    except OverflowError:
        parsed = math.inf
    if not math.isfinite(parsed):
        raise ValueError(f"{parsed} is not finite")
    return parsed


def launch_time(row: Mapping[str, Any]) -> float:
    """Return when the launch that wrote ``row`` began, in seconds since 1970; NaN if not stored."""
    try:
        return number(row.get("launched_at"))
    except ValueError:
        return math.nan


def is_launch(row: Mapping[str, Any], started: float) -> bool:
    """Return whether a row is of the launch that began at ``started``, in seconds since 1970."""
    return abs(launch_time(row) - started) <= SAME_LAUNCH


class MetricsFile:
    """Appends to ``metrics.jsonl``; a resumed run first removes the steps that it will repeat.

    Rows that say how time was spent (`OF_TIME`) are kept. A run that starts from iteration 0 keeps
    only those of its own launch, written before the ranks were restarted. ``launched_at`` is when
    this launch began, in seconds since 1970; with the default, no earlier row belongs to it.

    Each line is strict JSON: a number that is not finite, such as the gradient norm of a skipped
    step, is the word ``NaN``, ``Infinity`` or ``-Infinity``, as in Protocol Buffers' JSON.
    """

    def __init__(self, folder: Path, resumed_at: int, launched_at: float = math.inf) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_FILE
        # A resumed run keeps all time rows: the time was spent, even on steps that are repeated.
        kept = [
            row
            for row in read_metrics(self.path)
            if (
                resumed_at or is_launch(row, launched_at)
                if row["kind"] in OF_TIME
                else row["iteration"] <= resumed_at and not row.get("final")
            )
        ]
        temporary = self.path.with_suffix(".jsonl.tmp")
        write_text(temporary, "".join(map(as_json, kept)))
        os.replace(temporary, self.path)
        self._file = open_to_append(self.path)
        if resumed_at and kept:
            self._write({"kind": "resumed", "iteration": resumed_at})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(as_json(row))
        self._file.flush()

    def on_iteration(self, record: IterationRecord) -> None:
        row: dict[str, Any] = {
            "kind": "train",
            "iteration": record.iteration,
            "consumed_samples": record.consumed_samples,
            **record.losses,
            "learning_rate": record.learning_rate,
            "grad_norm": record.grad_norm,
            **record.logits,
            "loss_scale": record.loss_scale,
            "global_batch_size": record.global_batch_size,
            "seconds_per_iteration": record.seconds,
            "tokens_per_second": record.tokens_per_second,
            "skipped_iterations": record.skipped,
            "nan_iterations": record.nans,
            "total_skipped_iterations": record.total_skipped,
            **record.common,
        }
        optional = {"num_zeros": record.num_zeros, "params_norm": record.params_norm}
        optional["failed_saves"] = record.failed_saves or None
        self._write(row | {name: value for name, value in optional.items() if value is not None})

    def on_evaluation(self, record: EvaluationRecord) -> None:
        names = ("split", "iteration", "consumed_samples", "final")
        row = {"kind": "evaluation"} | {name: getattr(record, name) for name in names}
        self._write({**row, **record.losses, **record.common})

    def close(self) -> None:
        self._file.close()


def write_configuration(content: str, folder: Path) -> None:
    """Write a run's configuration to its save folder, replacing an earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{CONFIGURATION_FILE}.tmp"
    write_text(temporary, content)
    os.replace(temporary, folder / CONFIGURATION_FILE)


class ProgressFile:
    """Appends a line for each report to ``progress.txt`` in the save folder."""

    def __init__(self, folder: Path, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "progress.txt"
        self._world_size = world_size
        self._append(f"started on {world_size} ranks")

    def _append(self, text: str) -> None:
        with open_to_append(self._path) as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\t{text}\n")

    def on_iteration(self, record: IterationRecord) -> None:
        self._append(
            f"iteration {record.iteration}\tsamples {record.consumed_samples}\t"
            f"{record.tokens_per_second:.0f} tokens/s"
        )

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._append(f"evaluation at iteration {record.iteration}\t{record.losses}")

    def close(self) -> None:
        self._append("ended")
