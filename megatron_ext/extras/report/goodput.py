"""Divides the wall time of a run into categories, and computes its goodput.

Goodput is the share of wall time spent in training steps whose results no restart threw away, as in
Google's ml-goodput-measurement (https://pypi.org/project/ml-goodput-measurement/). The rest is lost
to starting, waiting for data, saving, evaluating, faults and restarts. The communication and the
pipeline bubbles of steps belong to goodput, but have their own categories.

The wall time of a run is the sum over its launches, each from the start to the end of the launcher.
Each row of kind "time" in metrics.jsonl holds the seconds of each phase since the row before it.
Ranks that fail write no row for their last seconds, which leaves a gap. Each moment belongs to
exactly one row or gap, so no second is counted twice or left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from megatron_ext.train.reporting.files import (
    ENDED,
    SAME_LAUNCH,
    TIME,
    is_launch,
    number,
)

Row = Mapping[str, Any]
Seconds = dict[str, float]

PREFIX = "seconds/"
"""Prefix of the keys that hold a phase's seconds in a row of kind "time" of metrics.jsonl."""

CATEGORIES = {
    "computing": "computing",
    "reduce": "communication",
    "bubble": "pipeline bubbles",
    "data": "waiting for data",
    "save": "saving",
    "evaluate": "evaluation",
    "start": "starting",
    "lost": "lost steps",
    "restart": "restarting",
    "other": "other",
}
"""The categories of time -> their names in the report; the first three make up goodput."""
PRODUCTIVE = ("computing", "reduce", "bubble")
_OF_PHASES = {"forward": "computing", "backward": "computing", "update": "computing"}
_OUTSIDE_STEPS = ("start", "save", "restart")
"""Categories of time outside steps; it does not count as lost if the steps of its row are lost."""


@dataclass(frozen=True)
class Interval:
    """A part of a run's wall time, from ``start`` to ``end`` in seconds since the epoch.

    Attributes:
        seconds: seconds by category of `CATEGORIES`; they sum to ``end - start``.
        iteration: the last step that ended before ``end``.
    """

    start: float
    end: float
    seconds: Seconds
    iteration: int


@dataclass
class Goodput:
    """The account of a run's wall time.

    Attributes:
        intervals: parts of the time in order, each divided into categories.
        launches: start and end time of each launch of the run.
    """

    intervals: list[Interval] = field(default_factory=list)
    launches: list[tuple[float, float]] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Return the wall time in seconds: the sum over all launches."""
        return sum(end - start for start, end in self.launches)

    @cached_property
    def seconds(self) -> Seconds:
        """Return the seconds of each category over the whole run."""
        totals = dict.fromkeys(CATEGORIES, 0.0)
        for interval in self.intervals:
            for name, value in interval.seconds.items():
                totals[name] += value
        return totals

    @property
    def share(self) -> float:
        """Return goodput as a fraction from 0 to 1; 0 for a run without any time."""
        seconds = self.seconds
        return sum(seconds[name] for name in PRODUCTIVE) / self.wall if self.wall > 0 else 0.0

    def elapsed(self, moment: float) -> float:
        """Return the wall time, in seconds, that the launches had used at time ``moment``."""
        return sum(min(max(moment - start, 0.0), end - start) for start, end in self.launches)

    def losses(self) -> list[tuple[str, float]]:
        """Return the categories outside goodput with their seconds, the largest first."""
        lost = [(k, v) for k, v in self.seconds.items() if k not in PRODUCTIVE and v > 0]
        return sorted(lost, key=lambda entry: -entry[1])

    def sentence(self) -> str:
        """Return a sentence with the goodput, and with the three largest categories outside it."""
        parts = [
            f"{CATEGORIES[name]} {show_seconds(value)} ({value / self.wall:.1%})"
            for name, value in self.losses()[:3]
        ]
        losses = f"; the largest losses: {', '.join(parts)}" if parts else ""
        return f"goodput {self.share:.1%} of {show_seconds(self.wall)}{losses}"


def show_seconds(seconds: float) -> str:
    """Return a duration in words, such as "0.31 s", "42.0 s", "12 min 5 s" or "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


@lru_cache(1024)
def _category_of(name: str, *, restarted: bool) -> str:
    """Return the category of a phase; ``name`` is its key in a row of kind "time" of metrics.jsonl.

    For ranks that were restarted (``restarted``), the phase "start" counts as "restart".
    """
    phase = name.removeprefix(PREFIX)
    if phase == "start" and restarted:
        return "restart"
    return _OF_PHASES.get(phase, phase if phase in CATEGORIES else "other")


@dataclass(frozen=True)
class _TimeRow:
    """A row of kind "time" of metrics.jsonl with checked fields; ``seconds`` are by category."""

    start: float
    end: float
    before: int
    iteration: int
    launched_at: float
    generation: int
    seconds: Seconds

    @classmethod
    def of(cls, row: Row) -> _TimeRow:
        """Check a row from a file; raise a ValueError or KeyError if it is damaged."""
        generation = int(number(row.get("generation", 0)))
        seconds: Seconds = {}
        for name, value in row.items():
            if name.startswith(PREFIX):
                category = _category_of(name, restarted=generation > 0)
                seconds[category] = seconds.get(category, 0.0) + max(0.0, number(value))
        return cls(
            start=number(row["from"]),
            end=number(row["to"]),
            before=int(number(row["before"])),
            iteration=int(number(row["iteration"])),
            launched_at=number(row["launched_at"]),
            generation=generation,
            seconds=seconds,
        )


def account(rows: Sequence[Row], events: Sequence[Row] = ()) -> Goodput:
    """Return the account of a run from the rows of metrics.jsonl and the events of its faults.

    Damaged rows are left out; their time becomes a gap. A launch whose end no row records, because
    it is still running or its launcher was killed, ends at its last row or event.
    """
    times = list(_checked(rows))
    kept = _kept_iterations(times)
    faults = sorted(_faults(events), key=lambda fault: fault.time)
    goodput = Goodput()
    starts = sorted({row.launched_at for row in times})
    launches = [s for i, s in enumerate(starts) if not i or s - starts[i - 1] > SAME_LAUNCH]
    for index, launched_at in enumerate(launches):
        limit = launches[index + 1] if index + 1 < len(launches) else math.inf
        chosen = [
            (row, keep)
            for row, keep in zip(times, kept, strict=True)
            if launched_at <= row.launched_at <= launched_at + SAME_LAUNCH
        ]
        mine = [fault for fault in faults if launched_at <= fault.time < limit]
        last = max(row.end for row, _ in chosen)
        ends = list(_ends(rows, launched_at))
        end = max([last, *(time for time, _ in ends), *(fault.time for fault in mine)])
        launch = _Launch(launched_at, min(end, limit), mine, ends)
        goodput.launches.append((launched_at, min(end, limit)))
        goodput.intervals += launch.intervals(chosen)
    return goodput


def _checked(rows: Sequence[Row]) -> Iterator[_TimeRow]:
    for row in rows:
        if row.get("kind") == TIME:
            try:
                yield _TimeRow.of(row)
            except (ValueError, KeyError):
                continue


def _ends(rows: Sequence[Row], launched_at: float) -> Iterator[tuple[float, bool]]:
    """Yield the recorded ends of the launch that began at ``launched_at``.

    The reporting rank and the launcher each may record one. Each is (time, whether it failed).
    """
    for row in rows:
        if row.get("kind") == ENDED and is_launch(row, launched_at):
            try:
                yield number(row["time"]), bool(number(row.get("exit_code", 0)))
            except (ValueError, KeyError):
                continue


def _kept_iterations(times: Sequence[_TimeRow]) -> list[float]:
    """Return, for each row, the last iteration whose work no restart after the row threw away.

    This is the lowest iteration after which a later row begins; ``math.inf`` for the last row. If
    it is below the row's own last iteration, the run went back, and the steps between were lost.
    """
    kept = []
    lowest = math.inf
    for row in reversed(times):
        kept.append(lowest)
        lowest = min(lowest, row.before)
    return kept[::-1]


@dataclass(frozen=True)
class _Fault:
    """A fault that was detected at ``time``, ``seen_after`` seconds after it happened."""

    time: float
    seen_after: float
    iteration: int | None


def _faults(events: Sequence[Row]) -> Iterator[_Fault]:
    for event in events:
        if event.get("kind") == "fault":
            try:
                time = number(event["time"])
                iteration = event.get("iteration")
                seen_after = number(event.get("seen_after") or 0.0)
                step = None if iteration is None else int(number(iteration))
            except (ValueError, KeyError):
                continue
            yield _Fault(time, max(0.0, seen_after), step)


class _Launch:
    """Divides one launch of a run into intervals, from its start to its end."""

    def __init__(
        self,
        start: float,
        end: float,
        faults: Sequence[_Fault],
        told_ends: Sequence[tuple[float, bool]],
    ) -> None:
        self._cursor = start
        self._end = end
        self._faults = faults
        self._failed = any(failed for _, failed in told_ends)
        self._stops = [time for time, failed in told_ends if not failed]
        self._found: list[Interval] = []
        self._before: _TimeRow | None = None
        self._steps: _TimeRow | None = None

    def intervals(self, rows: Sequence[tuple[_TimeRow, float]]) -> list[Interval]:
        """Return intervals that cover the launch without overlap.

        ``rows`` are pairs of a row and its last kept iteration (`_kept_iterations`).
        """
        for row, kept in rows:
            if row.start > self._cursor:
                self._gap(row.start, row)
            self._row(row, kept)
        if self._end > self._cursor:
            self._gap(self._end, None)
        return self._found

    def _add(self, end: float, seconds: Mapping[str, float], iteration: int) -> None:
        """Add an interval from the end of the last one to ``end``, with ``seconds`` by category.

        If ``seconds`` add up to more than the interval's length, they are scaled down; if to less,
        the rest counts as "other".
        """
        end = min(end, self._end)
        length = end - self._cursor
        if length <= 0:
            return
        total = sum(seconds.values())
        if total > length:
            seconds = {name: value * length / total for name, value in seconds.items()}
        filled = dict(seconds)
        filled["other"] = filled.get("other", 0.0) + max(0.0, length - total)
        self._found.append(Interval(self._cursor, end, filled, iteration))
        self._cursor = end

    def _row(self, row: _TimeRow, kept: float) -> None:
        """Add the interval of a row; its steps after iteration ``kept`` count as lost."""
        done = row.iteration - row.before
        again = min(1.0, max(0.0, (row.iteration - kept) / done)) if done > 0 else 0.0
        seconds: Seconds = {}
        for name, value in row.seconds.items():
            lost = 0.0 if name in _OUTSIDE_STEPS else again * value
            seconds[name] = seconds.get(name, 0.0) + value - lost
            seconds["lost"] = seconds.get("lost", 0.0) + lost
        self._add(row.end, seconds, row.iteration)
        self._before = row
        self._steps = row if done > 0 else self._steps

    def _gap(self, end: float, after: _TimeRow | None) -> None:
        """Add intervals for a gap, the time without a row from the last row to ``end``.

        If the gap contains a fault, the time before the fault is divided by `_unreported`; the time
        until its detection is lost; the rest counts as restart, or as lost if no row follows.

        Args:
            end: the time at which the gap ends, in seconds since the epoch.
            after: the row that follows the gap; None if it ends with the launch.
        """
        faults = [f for f in self._faults if self._cursor <= f.time <= end]
        restarted = after is not None and after.generation > 0
        same = self._before is not None and after is not None
        same = same and self._before.generation == after.generation  # type: ignore[union-attr]
        iteration = self._before.iteration if self._before is not None else 0
        failed = after is None and self._failed
        if not faults and not failed and (same or not restarted):
            name = "start" if self._before is None else "other"
            self._add(end, {name: end - self._cursor}, iteration)
            return
        if not faults and any(self._cursor - 0.01 <= stop <= end for stop in self._stops):
            # The ranks ended on purpose, to restart with another number of ranks.
            self._add(end, {"lost" if failed else "restart": end - self._cursor}, iteration)
            return
        first = faults[0] if faults else _Fault(end, 0.0, None)
        happened = max(self._cursor, first.time - first.seen_after)
        self._unreported(happened, iteration, first, after)
        self._add(first.time, {"lost": first.time - self._cursor}, iteration)
        # If nothing continues a launch, it ends with its fault.
        name = "lost" if after is None else "restart"
        self._add(end, {name: end - self._cursor}, iteration)

    def _unreported(
        self, end: float, iteration: int, fault: _Fault, after: _TimeRow | None
    ) -> None:
        """Add an interval from the last row to a fault at ``end``, divided into kept and lost time.

        Steps that the restart restored from memory were kept, but no row has their seconds. Their
        time is divided like that of the latest steps in a row. All other time was lost.

        Args:
            iteration: the last step before the interval.
            after: the row that follows the gap; None if nothing follows.
        """
        length = end - self._cursor
        kept = after.before - iteration if after is not None else 0
        if length <= 0 or kept <= 0 or self._steps is None:
            self._add(end, {"lost": length}, iteration)
            return
        like = self._steps.seconds
        total = sum(v for k, v in like.items() if k not in _OUTSIDE_STEPS) or 1.0
        each = total / (self._steps.iteration - self._steps.before)
        if fault.iteration is not None and fault.iteration > iteration:
            share = min(1.0, kept / (fault.iteration - iteration))
        else:
            share = min(1.0, kept * each / length)
        seconds = {
            k: v / total * share * length for k, v in like.items() if k not in _OUTSIDE_STEPS
        }
        seconds["lost"] = seconds.get("lost", 0.0) + (1 - share) * length
        self._add(end, seconds, iteration + kept)
