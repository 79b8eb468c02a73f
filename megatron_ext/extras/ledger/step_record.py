"""The record of a run's steps in its save folder: which samples each step has used.

``data_ledger.jsonl`` has one JSON object per line, of these kinds:

- ``order``: the order of samples in the steps below (`SampleOrder.to_dict`), and which part of each
  source (dataset) is used for training: ``split`` is the setting that divides the sources, and
  ``first_tokens`` has, for each source, the index in its file of the first token of the training
  part. The line is written again whenever it changes.
- ``other_order``: the order of samples in the steps below is unknown, for example Megatron-LM's.
- ``start``: the run begins or resumes after ``iteration`` steps and ``sample`` samples. Steps after
  ``iteration`` in the lines above are then lost. If the run was loaded from another folder, the
  steps recorded there are copied below a line in which ``from`` names that folder. Each start of
  the ranks adds ``time`` and ``generation``, the number of restarts. A start after 0 steps that is
  no restart makes all lines above void.
- ``steps``: steps after ``iteration`` steps and ``sample`` samples, with ``batch`` samples each.
  ``done`` is the last step that has ended, and ``begun`` the last one that has begun. These two
  numbers have a fixed width and are overwritten in each step. So an unbroken run has a single line,
  and the record includes the last step of a killed run. If ``batch`` is null, only the total is
  known: the run has used ``end`` samples after these steps.
- ``left_out``: the steps ``first`` to ``last`` have not contributed to the weights; ``why`` is the
  reason, such as a skipped update.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import is_count, rows_of
from megatron_ext.disk.writing import open_descriptor
from megatron_ext.errors import ConfigError

LEDGER_FILE = "data_ledger.jsonl"
_COUNTS = ', "done": {:15d}, "begun": {:15d}}}\n'
OTHER_ORDER = {"kind": "other_order"}
REWOUND, NO_UPDATE, LOST = "rewound", "no update", "lost by a restart"
"""Reasons why a step is not part of the weights: a rewind, a skipped update, a restart."""


@dataclass(frozen=True)
class Steps:
    """Consecutive steps of a run that are recorded together.

    Attributes:
        iteration, sample: number of steps and of samples in the run before these steps.
        batch: number of samples in each of these steps; None if only their total is known.
        done, begun: the last step that has ended, and the last that has begun.
        end: number of samples in the run after these steps, if ``batch`` is None.
        order: the ``order`` line of the record that applies; None if the order is unknown.
        reason: why the steps are not part of the weights; None if they are.
    """

    iteration: int
    sample: int
    batch: int | None
    done: int
    begun: int
    end: int = 0
    order: Mapping[str, Any] | None = field(default=None, compare=False)
    reason: str | None = None

    @property
    def stop(self) -> int:
        """Return the number of samples in the run up to the last of these steps that has ended."""
        return self.end if self.batch is None else self.sample_at(self.done)

    def sample_at(self, iteration: int) -> int:
        """Return the number of samples that the run has used after step ``iteration``."""
        assert self.batch is not None
        return self.sample + (iteration - self.iteration) * self.batch

    def between(self, first: int, last: int, reason: str | None = None) -> Steps:
        """Return a record of only the steps ``first`` to ``last`` of this one, marked as ended.

        ``reason`` says why these steps are not part of the weights; None means that they are. If
        ``batch`` is None, this record cannot be divided; the result then is a copy of it with this
        reason.
        """
        if self.batch is None:
            return dataclasses.replace(self, reason=reason)
        sample = self.sample_at(first - 1)
        return dataclasses.replace(
            self, iteration=first - 1, sample=sample, done=last, begun=last, reason=reason
        )


@dataclass
class History:
    """The steps that led to a state of a run, and the steps that were lost.

    Attributes:
        steps: the steps in order. Steps whose update is not part of the weights are in separate
            `Steps`, with a reason.
        lost: steps that had begun or ended, but whose work was lost by restarts.
    """

    steps: list[Steps] = field(default_factory=list)
    lost: list[Steps] = field(default_factory=list)

    @property
    def iteration(self) -> int:
        return self.steps[-1].done if self.steps else 0

    @property
    def samples(self) -> int:
        return self.steps[-1].stop if self.steps else 0

    def cut(self, iteration: int) -> None:
        """End the history after step ``iteration``, and move later steps to `lost`."""
        kept = list[Steps]()
        for each in self.steps:
            last = max(each.done, each.begun)
            if last <= iteration or each.batch is None:
                (kept if last <= iteration else self.lost).append(each)
                continue
            if each.iteration < iteration:
                kept.append(each.between(each.iteration + 1, iteration, each.reason))
            first = max(each.iteration, iteration) + 1
            self.lost.append(each.between(first, last, LOST))
        self.steps = kept

    def leave_out(self, first: int, last: int, why: str) -> None:
        """Mark the steps ``first`` to ``last`` as not part of the weights, because of ``why``."""
        steps = []
        for each in self.steps:
            low = max(first, each.iteration + 1)
            high = min(last, each.done)
            if each.batch is None or low > high:
                steps.append(each)
                continue
            if each.iteration + 1 < low:
                steps.append(each.between(each.iteration + 1, low - 1, each.reason))
            steps.append(each.between(low, high, why))
            if high < max(each.done, each.begun):
                rest = each.between(high + 1, each.done, each.reason)
                steps.append(dataclasses.replace(rest, begun=each.begun))
        self.steps = joined(steps)


def joined(steps: Iterable[Steps]) -> list[Steps]:
    """Join consecutive `Steps` with the same batch, order and reason into one."""
    merged = list[Steps]()
    for each in steps:
        before = merged[-1] if merged else None
        if before is not None and before.batch is not None and before.begun == each.iteration:
            alike = before.batch, before.order, before.reason, before.stop
            if alike == (each.batch, each.order, each.reason, each.sample):
                merged[-1] = dataclasses.replace(before, done=each.done, begun=each.begun)
                continue
        merged.append(each)
    return merged


_COUNTS_OF = {
    "start": ("iteration", "sample"),
    "steps": ("iteration", "sample", "done", "begun"),
    "left_out": ("first", "last"),
}
"""Fields that must be whole numbers of at least 0, by the ``kind`` of a line of the record."""


def _is_row(row: Mapping[str, Any]) -> bool:
    """Return whether a line of a record has a known ``kind``, and valid fields for it."""
    kind = row.get("kind")
    if kind == "order":
        tokens = row.get("tokens")
        firsts = row.get("first_tokens", {})
        counted = (each.values() for each in (tokens, firsts) if isinstance(each, dict))
        counts = [*chain(*counted)]
        return isinstance(tokens, dict) and isinstance(firsts, dict) and all(map(is_count, counts))
    if kind == "other_order":
        return True
    if not isinstance(kind, str) or not all(map(is_count, map(row.get, _COUNTS_OF.get(kind, ())))):
        return False
    if kind == "start":
        return isinstance(row.get("from", ""), str)
    if kind == "left_out":
        return isinstance(row.get("why"), str)
    if kind == "steps":
        rises = row["done"] >= row["iteration"] and row["begun"] >= row["iteration"]
        has_batch = is_count(row["batch"]) if row.get("batch") is not None else "batch" in row
        return rises and has_batch and is_count(row.get("end", 0))
    return kind in _COUNTS_OF


class StepRecord:
    """The lines of a folder's ``data_ledger.jsonl``, oldest first; incomplete ones are left out."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LEDGER_FILE
        self.rows: list[dict[str, Any]] = []
        self.rows += rows_of(self.path, _is_row)

    @property
    def taken_from(self) -> str | None:
        """Return the other folder whose record this one continues; None if there is none.

        If there were several, return the last one.
        """
        return next((row["from"] for row in reversed(self.rows) if "from" in row), None)

    @property
    def own_start(self) -> int:
        """Return the number of steps that the run had when it first started in this folder.

        It is above 0 if the run was loaded from another folder, and 0 if it began anew.
        """
        taken_over = [index for index, row in enumerate(self.rows) if "from" in row]
        rows = self.rows[taken_over[-1] :] if taken_over else self.rows
        own = (row for row in rows if row["kind"] == "start" and "time" in row)
        return min((int(row["iteration"]) for row in own), default=0)

    def history(self, iteration: int | None = None) -> History:
        """Return the history of the run up to step ``iteration``; None for the whole record.

        Raises:
            ConfigError: the record does not contain that step.
        """
        if iteration is None:
            return self._replayed(self.rows)
        for index in range(len(self.rows) - 1, -1, -1):
            row = self.rows[index]
            if row["kind"] == "steps" and row["iteration"] < iteration <= row["done"]:
                later = (i for i in range(index, len(self.rows)) if self.rows[i]["kind"] == "start")
                rows = self.rows[: next(later, None)]
                # The requested state was reached before this return to an earlier state.
                relevant = [r for r in rows if r["kind"] != "left_out" or r["last"] <= iteration]
                history = self._replayed(relevant)
                lost = len(history.lost)
                history.cut(iteration)
                del history.lost[lost:]
                if history.iteration == iteration:
                    return history
        raise ConfigError(
            f"{self.path} does not record step {iteration} by itself; the last one that it records "
            f"is {self.history().iteration}."
        )

    def _replayed(self, rows: Sequence[Mapping[str, Any]]) -> History:
        history = History()
        order = None
        for row in rows:
            if row["kind"] == "order":
                order = row
            elif row["kind"] == "other_order":
                order = None
            elif row["kind"] == "start":
                is_new = row["iteration"] == 0 and not row.get("generation")
                if is_new:
                    history = History()
                history.cut(row["iteration"])
                history.lost = joined(history.lost)
            elif row["kind"] == "steps":
                names = ("iteration", "sample", "batch", "done", "begun")
                counts = {name: row[name] for name in names}
                history.steps.append(Steps(**counts, end=row.get("end", 0), order=order))
            elif row["kind"] == "left_out":
                history.leave_out(row["first"], row["last"], row["why"])
        return history


class RecordWriter:
    """Writes the record of a run; only one process of the run has a writer."""

    def __init__(self, folder: str | Path) -> None:
        self._known = record = StepRecord(folder)
        orders = [row for row in record.rows if row["kind"] in ("order", "other_order")]
        self._order = orders[-1] if orders else OTHER_ORDER
        record.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_descriptor(record.path, os.O_RDWR | os.O_CREAT)
        self._end = os.fstat(self._file).st_size
        self._counts = 0
        if self._end and os.pread(self._file, 1, self._end - 1) != b"\n":
            self._append("\n")

    def _append(self, text: str) -> None:
        content = text.encode()
        os.pwrite(self._file, content, self._end)
        self._end += len(content)

    def write(self, kind: str, **facts: Any) -> None:
        self._append(json.dumps({"kind": kind, **facts}, allow_nan=False) + "\n")

    def order(self, order: Mapping[str, Any] | None) -> None:
        """Write the order of samples for all later lines, if it differs from the last one.

        None stands for an unknown order.
        """
        row = OTHER_ORDER if order is None else {**order, "kind": "order"}
        if row != self._order:
            self.write(**row)
            self._order = row

    def steps(self, steps: Steps) -> None:
        """Write a new line of kind ``steps``; `count` later updates its ``done`` and ``begun``."""
        row: dict[str, Any] = {"kind": "steps", "iteration": steps.iteration}
        row |= {"sample": steps.sample, "batch": steps.batch}
        if steps.batch is None:
            row["end"] = steps.end
        self._append(json.dumps(row)[:-1])
        self._counts = self._end
        self._append(_COUNTS.format(steps.done, steps.begun))

    def count(self, done: int, begun: int) -> None:
        """Overwrite ``done`` and ``begun`` (see `Steps`) in the newest line of kind ``steps``."""
        os.pwrite(self._file, _COUNTS.format(done, begun).encode(), self._counts)

    def start(
        self,
        iteration: int,
        sample: int,
        folder: str | Path | None,
        past: Mapping[str, Any] | None,
        **facts: Any,
    ) -> None:
        """Write that the run begins, or resumes after ``iteration`` steps and ``sample`` samples.

        Steps before ``iteration`` that no record covers are written as one line of kind ``steps``.

        Args:
            folder: where the run was loaded from, or None. If it is another folder than that of
                this record, the steps recorded there are copied first.
            past: order of samples of the steps that no record covers; None if unknown.
            facts: further fields of the line about the start.
        """
        history = self._known.history()
        history.cut(iteration)
        other = None if folder is None else os.path.realpath(folder)
        if other not in (None, os.path.realpath(self._known.path.parent), self._known.taken_from):
            history = self._take_over(iteration, sample, str(other))
        elif history.iteration > iteration or history.samples > sample:
            history = History()
        if history.iteration < iteration:
            self.order(past)
            steps = iteration - history.iteration
            samples = sample - history.samples
            batch = samples // steps if samples % steps == 0 else None
            self.write("start", iteration=history.iteration, sample=history.samples)
            missing = history.iteration, history.samples, batch, iteration, iteration
            self.steps(Steps(*missing, end=sample))
        self.write("start", iteration=iteration, sample=sample, **facts)

    def _take_over(self, iteration: int, sample: int, folder: str) -> History:
        """Copy the history up to step ``iteration`` from the record in ``folder``, and return it.

        The history is empty if that record lacks the step, or if the number of samples up to the
        step is not ``sample``.
        """
        try:
            history = StepRecord(folder).history(iteration)
        except ConfigError:
            history = History()
        if history.samples != sample:
            history = History()
        self.write("start", iteration=0, sample=0, **{"from": folder})
        for each in history.steps:
            self.order(each.order)
            self.steps(each)
            if each.reason is not None:
                first = each.iteration + 1
                last = each.done
                self.write("left_out", first=first, last=last, why=each.reason)
        return history

    def close(self) -> None:
        os.close(self._file)
