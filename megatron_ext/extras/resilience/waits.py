"""Finds out which rank waits for which in a run that hangs, and which rank stopped first.

A rank that waits for no other has stopped by itself. If ranks wait for each other in a circle, one
of them has left out a collective or a message: its actions in this step are not a prefix of its
actions in the previous step.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_ext.extras.resilience.flight import Collective, Flight
from megatron_ext.extras.resilience.process import GONE, ProcessState
from megatron_ext.extras.resilience.watchdog import Evidence
from megatron_ext.parallel.board import Event, EventKind, RankRecord

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_WHOLE = re.compile(r" in <module>$|^  \.\.\.$", re.MULTILINE)
"""Matches the end of a complete main thread's stack; faulthandler ends a deep one with dots."""
_WAIT = "wait: "
_SENT_BY = {"receive input": ("send output", -1), "receive gradient": ("send gradient", 1)}
"""For each kind of receive: the matching kind of send, and sender's minus receiver's stage."""
_WAITS_IN = ("torch/distributed/", "torch\\distributed\\")


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Wait:
    """A rank that waits for others, in a collective or for a message.

    Attributes:
        on: the ranks that it waits for; empty if all have arrived, or if they are not known.
        what: the collective or message.
        passed: whether the ranks in ``on`` have already gone past the collective or message, so
            that the wait is in vain.
    """

    rank: int
    on: tuple[int, ...]
    what: str
    passed: bool = False


@dataclass(frozen=True)
class Blame:
    """The ranks that stopped first, the reason, and the waits of other ranks.

    Attributes:
        reason: why these ranks are named: a clause that follows "rank 3 ".
    """

    ranks: tuple[int, ...]
    reason: str
    waits: tuple[Wait, ...]


def main_stack(stack: str) -> list[Frame]:
    """Return the main thread's stack from faulthandler's output, innermost frame first."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", stack)
    # A slow process may not have written more than a helper thread's stack so far.
    main = next((text for text in reversed(threads) if _WHOLE.search(text)), "")
    return [Frame(f["file"], int(f["line"]), f["name"]) for f in _FRAME.finditer(main)]


def blame(
    board: Sequence[RankRecord],
    evidence: Mapping[int, Evidence],
    states: Mapping[int, ProcessState],
) -> Blame:
    """Find out which ranks stopped first, and which ranks wait for which.

    If nothing shows which ranks stopped first, the result names none. ``board`` has what each rank
    recorded in shared memory, ``evidence`` its stacks and collectives by rank, and ``states`` the
    processes by id.
    """
    records = {record.rank: record for record in board if not record.ended}
    flights = {rank: own.flight for rank, own in evidence.items() if own.flight is not None}
    waits = []
    for record in records.values():
        if _awaits(record, states):
            wait = _message(record, records) or _collective(record, records, evidence, flights)
            if wait is not None:
                waits.append(wait)
    ranks, reason = _first(records, states, waits, flights)
    return Blame(ranks, reason, tuple(waits))


def _awaits(record: RankRecord, states: Mapping[int, ProcessState]) -> bool:
    """Return whether a rank's process is alive and not stopped, so that it may be waiting."""
    state = states.get(record.pid, ProcessState())
    return state != GONE and not state.stopped


def _message(record: RankRecord, records: Mapping[int, RankRecord]) -> Wait | None:
    """Return the pipeline message that a rank waits for; None if it waits for none."""
    last = record.last
    if last is None or last.kind is not EventKind.BEGIN or not last.name.startswith(_WAIT):
        return None
    kind = last.name.removeprefix(_WAIT)
    what = f"{kind} of micro-batch {last.microbatch}, stage {last.stage}"
    peer = records.get(last.peer)
    passed = False
    if peer is not None and kind in _SENT_BY:
        sent, offset = _SENT_BY[kind]
        key = EventKind.END, sent, last.microbatch, last.stage + offset
        passed = key in _messages(peer, last.iteration)
    return Wait(record.rank, (last.peer,), what, passed)


def _messages(record: RankRecord, iteration: int) -> set[tuple[EventKind, str, int, int]]:
    """Return what a rank has finished in step ``iteration``, such as sends of pipeline messages.

    These are the recorded actions on a micro-batch, without one that the rank has only begun. Each
    is a tuple (`EventKind.END`, name such as "send output", micro-batch, stage).
    """
    begun = [e for e in record.events if e.iteration == iteration and e.microbatch >= 0]
    return {(EventKind.END, e.name, e.microbatch, e.stage) for e in begun if e is not record.last}


def _collective(
    record: RankRecord,
    records: Mapping[int, RankRecord],
    evidence: Mapping[int, Evidence],
    flights: Mapping[int, Flight],
) -> Wait | None:
    """Return the collective that a rank waits for; None if it waits for none."""
    pending = [entry for entry in flights.get(record.rank, ()) if not entry.over]
    if not pending or not _stands_in_wait(main_stack(evidence[record.rank].stack)):
        return None
    latest = pending[-1]
    missing = tuple(rank for rank in latest.ranks if not _arrived(latest, flights.get(rank)))
    ahead = tuple(r for r in missing if r in records and records[r].iteration > record.iteration)
    return Wait(record.rank, ahead or missing, str(latest), passed=bool(ahead))


def _stands_in_wait(stack: Sequence[Frame]) -> bool:
    """Return whether a rank's main thread waits for other ranks; True if its stack is unknown.

    ``stack`` begins with the innermost frame.
    """
    if not stack:
        return True
    code = linecache.getline(stack[0].file, stack[0].line)
    return any(place in stack[0].file for place in _WAITS_IN) or ".wait(" in code


def _arrived(collective: Collective, flight: Flight | None) -> bool:
    """Return whether a rank, whose latest collectives are ``flight``, has called ``collective``."""
    numbers = [entry.number for entry in flight or () if entry.group == collective.group]
    return bool(numbers) and max(numbers) >= collective.number


def _first(
    records: Mapping[int, RankRecord],
    states: Mapping[int, ProcessState],
    waits: Sequence[Wait],
    flights: Mapping[int, Flight],
) -> tuple[tuple[int, ...], str]:
    """Return the ranks that stopped first, and the reason why they are named.

    If several reasons apply, the most reliable one is returned, with its ranks.
    """
    of = {record.rank: states.get(record.pid, ProcessState()) for record in records.values()}
    if dead := [rank for rank in records if of[rank] == GONE]:
        return _earliest(dead, records), "has ended"
    if stopped := tuple(rank for rank in records if of[rank].stopped):
        return stopped, "is stopped by a signal"
    if passed := sorted({rank for wait in waits for rank in wait.on if wait.passed}):
        return tuple(passed), "has gone on past what others wait for"
    waiting = {wait.rank: wait for wait in waits}
    awaited = {rank for wait in waits for rank in wait.on}
    if idle := [rank for rank in records if rank not in waiting]:
        named = [rank for rank in idle if rank in awaited] or idle
        return _earliest(named, records), "waits for no other rank"
    if elsewhere := sorted(awaited - records.keys()):
        return tuple(elsewhere), "is on another machine, and is waited for"
    deviating = [r for r in records if _deviates(records[r], flights.get(r, ()))]
    if 0 < len(deviating) < len(records):
        return tuple(deviating), "has left out what it did in the step before"
    return _earliest(list(records), records), "wrote its last event before the others, which wait"


def _earliest(ranks: Sequence[int], records: Mapping[int, RankRecord]) -> tuple[int, ...]:
    return (min(ranks, key=lambda rank: records[rank].last_time),) if ranks else ()


def _deviates(record: RankRecord, flight: Flight) -> bool:
    """Return whether a rank seems to have left out an action or collective in this step.

    This is so if its actions in this step, or the collectives in ``flight``, are not a prefix of
    those in the previous step.
    """
    begins = [event.time for event in record.events if event.kind is EventKind.STEP][-2:]
    if len(begins) < 2:
        return False
    events = [e for e in record.events if e.kind is EventKind.BEGIN]
    lists = (
        _two_steps([(e.time, _signature(e)) for e in events], begins),
        _two_steps([(c.created, f"{c.group} {c.name} {c.shape}") for c in flight], begins),
    )
    return any(now != before[: len(now)] for before, now in lists)


def _two_steps(
    entries: Sequence[tuple[float, str]], begins: Sequence[float]
) -> tuple[list[str], list[str]]:
    """Return the names of the entries in the previous step, and those in the present step.

    ``entries`` are a rank's actions or collectives as (time, name), and ``begins`` the times at
    which the two steps began.
    """
    spans = pairwise((*begins, float("inf")))
    last, this = ([name for time, name in entries if start <= time < end] for start, end in spans)
    return last, this


def _signature(event: Event) -> str:
    return f"{event.name} {event.microbatch} {event.stage} {event.peer}"
