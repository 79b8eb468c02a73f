"""Detects slow ranks (stragglers) by the time that each rank computes, without its waits.

A rank's own time is the time in the phases `COMPUTES`, less that in collectives until the last rank
arrives. Waits for messages of other pipeline stages are the phase "bubble", which is not among
them. The own time is compared with that of the rank's twins: ranks with the same pipeline rank,
which have equal work. A rank without twins is compared with its own earlier time, multiplied by the
factor by which the other ranks have become slower since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megatron_ext.extras.resilience.flight import Flight
from megatron_ext.parallel.board import EventKind, RankRecord

COMPUTES = frozenset({"forward", "backward", "reduce", "update"})
"""Phases of a step that count as computing. Reading data and writing logs are left out, since only
some ranks do that.
"""
_LEAST_STEPS = 3
"""If all ranks have recorded the beginnings of more steps than this, only whole steps count."""

Span = tuple[float, float]


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes for longer than expected.

    Attributes:
        seconds: how many seconds of a step the rank computes, without waits.
        usual: the expected time; see `SlowRanks._usual`.
    """

    rank: int
    seconds: float
    usual: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: it computes {1e3 * self.seconds:.1f} ms of a step, where "
            f"{1e3 * self.usual:.1f} ms are usual; look at its processor, clock and neighbours"
        )


def own_times(
    board: Sequence[RankRecord], flights: Mapping[int, Flight]
) -> dict[int, float] | None:
    """Return, by rank, how many seconds of an average step the rank computes without waiting.

    The average is over the latest whole steps that the records of all ranks cover; if there are too
    few, over all the time that they cover. Return None if the records of a rank are missing or too
    short. ``board`` has each rank's events, and ``flights`` its latest collectives, by rank.
    """
    step = max((record.mean_step for record in board), default=0.0)
    if not step or any(not r.events or not flights.get(r.rank) for r in board):
        return None
    first = max(*(r.events[0].time for r in board), *(f[0].created for f in flights.values()))
    last = min(*(r.last_time for r in board), *(f[-1].created for f in flights.values()))
    begins = [{e.time for e in r.events if e.kind is EventKind.STEP} for r in board]
    whole = [sorted(time for time in times if first < time < last) for times in begins]
    if min(map(len, whole)) > _LEAST_STEPS:
        first = max(times[0] for times in whole)
        last = min(times[-1] for times in whole)
    if last <= first:
        return None
    arrivals: dict[tuple[str, int], float] = {}
    for flight in flights.values():
        for entry in flight:
            key = entry.group, entry.number
            arrivals[key] = max(arrivals.get(key, 0.0), entry.created)
    seconds = {}
    for record in board:
        computes = _computing(record, (first, last))
        waits = [(e.created, arrivals[e.group, e.number]) for e in flights[record.rank]]
        own = sum(end - start for start, end in computes) - _overlap(computes, waits)
        seconds[record.rank] = own / (last - first) * step
    return seconds


def _computing(record: RankRecord, span: Span) -> list[Span]:
    """Return the time spans within ``span`` in which a rank was in a phase of `COMPUTES`."""
    return [
        (event.time, after.time)
        for event, after in pairwise(record.events)
        if event.phase in COMPUTES and span[0] <= event.time and after.time <= span[1]
    ]


def _overlap(spans: Sequence[Span], waits: Sequence[Span]) -> float:
    """Return how many seconds of ``spans`` lie in ``waits``.

    ``spans`` are sorted and disjoint; ``waits`` may overlap each other.
    """
    total, reached = 0.0, 0.0
    merged: list[Span] = []
    for start, end in sorted(waits):
        start = max(start, reached)
        if end > start:
            merged.append((start, end))
            reached = end
    index = 0
    for start, end in spans:
        while index < len(merged) and merged[index][1] <= start:
            index += 1
        position = index
        while position < len(merged) and merged[position][0] < end:
            total += min(end, merged[position][1]) - max(start, merged[position][0])
            position += 1
    return total


class SlowRanks:
    """Finds slow ranks by repeated measurements of their own times; returns each slow rank once.

    Twins are ranks with the same pipeline rank.

    Args:
        twin_factor: a rank is slow if it computes this many times as long as its twins.
        self_factor: a rank without twins is slow if it computes this many times as long as before.
        times: number of consecutive measurements in which a rank must be slow.
    """

    def __init__(self, twin_factor: float = 1.3, self_factor: float = 1.5, times: int = 2) -> None:
        self._factors = (twin_factor, self_factor)
        self._times = times
        self._seen: dict[int, int] = {}
        self._named: set[int] = set()
        self._before: dict[int, float] = {}

    def judge(self, own: Mapping[int, float], places: Mapping[int, int]) -> list[SlowRank]:
        """Return the ranks that have become slow since the last call.

        Args:
            own: by rank, how many seconds of a step it computes, from `own_times`.
            places: pipeline rank of each rank; ranks with the same one are twins.
        """
        slow = []
        for rank, seconds in own.items():
            usual = self._usual(rank, own, places)
            self._seen[rank] = self._seen.get(rank, 0) + 1 if usual else 0
            if usual and self._seen[rank] >= self._times and rank not in self._named:
                self._named.add(rank)
                slow.append(SlowRank(rank, seconds, usual))
        for rank, seconds in own.items():
            if not self._seen[rank]:
                self._before[rank] = min(seconds, self._before.get(rank, seconds))
        return slow

    def _usual(
        self, rank: int, own: Mapping[int, float], places: Mapping[int, int]
    ) -> float | None:
        """Return the time that was expected of a rank if the rank is slow; None if it is not.

        This is the median of ``own`` over the rank's twins. For a rank without twins, it is the
        least time of the rank while it was not slow, multiplied by the median factor by which other
        ranks have become slower (at least 1).
        """
        twins = [own[r] for r in own if r != rank and places[r] == places[rank]]
        if twins:
            usual = median(twins)
            return usual if own[rank] > self._factors[0] * usual else None
        if rank not in self._before:
            return None
        others = [own[r] / self._before[r] for r in own if r != rank and r in self._before]
        usual = self._before[rank] * max(1.0, median(others)) if others else self._before[rank]
        return usual if own[rank] > self._factors[1] * usual else None
