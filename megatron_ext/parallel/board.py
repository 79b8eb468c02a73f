"""The board: shared memory where each rank of a machine records its progress for other processes.

It serves to notice hangs and to report where the time of a run went. Each rank has one slot of
the board, with a header, the names that its events use, and a ring of the latest events.
Only the rank itself writes its slot, without locks: first an event, then, in the header, how many
events there are. A reader copies the slot and ignores entries that may have been overwritten since.
All times are of CLOCK_MONOTONIC, which is the same for all processes of a machine.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from megatron_ext.disk.writing import open_descriptor

START, OTHER = "start", "other"
PHASES = (
    OTHER, START, "data", "forward", "backward", "bubble", "reduce", "update", "save", "evaluate",
)  # fmt: skip
"""Phases of a run. "bubble" is the wait for a pipeline message, "reduce" sums gradients over
replicas, "start" lasts until the first step, and "other" is time without a phase."""
BOUNDLESS = frozenset({OTHER, START, "save", "evaluate"})
"""Phases that may last longer than a step, and count as a hang only much later."""

BOARD = "board"
"""Name of the board's file in the host folder (see `disk.host_folder`)."""
RING, MAX_NAMES = 512, 64
"""Numbers of events that a slot keeps, and of different names that its events may use."""
_NAME_BYTES = 48
_SECONDS_AT, _NAMES_AT, _RING_AT = 512, 1024, 4096
"""Offsets in bytes, within a slot, of the phases' seconds, the names and the ring of events."""
_ENTRY = struct.Struct("8q")
SLOT_BYTES = _RING_AT + RING * _ENTRY.size


class Word(IntEnum):
    """Positions of the numbers in a slot's header; each number takes 8 bytes."""

    PID = 0
    RANK = 1
    WORLD_SIZE = 2
    PIPELINE_RANK = 3
    GENERATION = 4
    COUNT = 5
    ITERATION = 6
    STEP_TIME = 7
    STEPS = 8
    STARTED = 9
    ENDED = 10
    LOOKED = 11


class EventKind(IntEnum):
    """Kinds of events: a phase begins or ends, a step begins, or a mark (`Recorder.mark`)."""

    BEGIN = 0
    END = 1
    STEP = 2
    MARK = 3


@dataclass(frozen=True)
class Event:
    """One event of a rank.

    Attributes:
        number: position of the event among all events of the rank, counted from 1.
        time: seconds of CLOCK_MONOTONIC.
        name: a phase, a kind of pipeline action such as "F" (forward) or "receive input", a wait
            such as "wait: receive input", "step", or a mark (`Recorder.mark`).
        phase: the phase that the rank is in after the event.
        microbatch, stage: of the action or message, otherwise -1.
        peer: rank at the other end of a message, otherwise -1.
    """

    number: int
    time: float
    iteration: int
    kind: EventKind
    name: str
    phase: str
    microbatch: int = -1
    stage: int = -1
    peer: int = -1


@dataclass(frozen=True)
class RankRecord:
    """The progress of a rank, copied from its slot of the board; times as in `Event`.

    Attributes:
        pipeline_rank: position of the rank in its pipeline; ranks with the same position have the
            same work.
        generation: how many times the run had been restarted when the rank started.
        iteration: step that the rank is in, 0 before the first.
        mean_step: mean seconds of a step, without the phases of `BOUNDLESS` such as saving; 0.0
            before the first step has ended.
        steps: number of steps that this process has begun.
        started: time at which the process opened its slot.
        ended: whether the rank has closed its slot because its run is over.
        looked: time at which the rank's own watchdog last read the board; 0.0 if it never did.
        seconds: total time of each phase by its name, at the last event.
        events: the latest events, oldest first.
    """

    rank: int
    pid: int
    events: tuple[Event, ...]
    world_size: int = 1
    pipeline_rank: int = 0
    generation: int = 0
    iteration: int = 0
    mean_step: float = 0.0
    steps: int = 0
    started: float = 0.0
    ended: bool = False
    looked: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def last(self) -> Event | None:
        """Return the last event, None if there was none."""
        return self.events[-1] if self.events else None

    @property
    def phase(self) -> str:
        """Return the phase that the rank is in."""
        return self.events[-1].phase if self.events else START

    @property
    def last_time(self) -> float:
        """Return the time of the last event; if there is none, when the slot was opened."""
        return self.events[-1].time if self.events else self.started


class Slot:
    """The slot of one rank on the board, as that rank writes it.

    Attributes:
        seconds: the total seconds of each phase; the index is the number of the phase's name.
    """

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._memory = memory
        self._offset = index * SLOT_BYTES
        part = memoryview(memory)[self._offset : self._offset + SLOT_BYTES]
        self._words = part.cast("q")
        # At each event a rank writes the phases' total seconds here directly, without a function
        # call.
        self.seconds = part.cast("d")[_SECONDS_AT // 8 : _SECONDS_AT // 8 + MAX_NAMES]
        self._ring = self._offset + _RING_AT
        self._count = 0

    def clear(self) -> None:
        """Erase what an earlier process of this rank has written into the slot."""
        self._words[Word.COUNT] = 0
        self._memory[self._offset : self._offset + SLOT_BYTES] = bytes(SLOT_BYTES)

    def set(self, word: Word, value: int) -> None:
        """Set one number of the slot's header; ``word`` is its position."""
        self._words[word] = value

    def name(self, number: int, name: str) -> None:
        """Store a name; events refer to it by ``number``."""
        encoded = name.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")
        offset = self._offset + _NAMES_AT + number * _NAME_BYTES
        self._memory[offset : offset + _NAME_BYTES] = encoded

    def write(
        self, now: int, iteration: int, kind_and_name: int, phase: int, detail: tuple[int, int, int]
    ) -> None:
        """Append an event to the slot's ring.

        Args:
            now: time in nanoseconds.
            kind_and_name: ``number of the name << 2 | EventKind``.
            phase: number of the name of the phase after the event.
            detail: (micro-batch, stage, peer), each -1 if there is none.
        """
        count = self._count
        _ENTRY.pack_into(
            self._memory, self._ring + count % RING * 64, now, iteration, kind_and_name, phase,
            *detail, count + 1,
        )  # fmt: skip
        self._count = self._words[5] = count + 1  # Word.COUNT; its name would cost time


class Board:
    """A file in memory in which the ranks of one machine record their progress, a slot for each.

    Any process may be the first to open the file: its size depends only on the number of ranks, and
    a new file is all zeros, which is an empty board.
    """

    def __init__(self, path: Path, num_slots: int) -> None:
        self.num_slots = num_slots
        size = num_slots * SLOT_BYTES
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Reserve the memory now. If it were missing later, the process would be killed.
            os.posix_fallocate(descriptor, 0, size)
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    @classmethod
    def of_machine(cls, folder: Path) -> Board:
        """Open, on a rank, the board in the host folder ``folder``, with LOCAL_WORLD_SIZE slots.

        Raises:
            OSError: there is not enough memory.
        """
        return cls(folder / BOARD, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def slot(self, index: int) -> Slot:
        """Return the slot of this machine's rank ``index``, for that rank to write."""
        return Slot(self._memory, index)

    def read(self, num_events: int = RING) -> list[RankRecord]:
        """Return a copy of each opened slot, with at most the latest ``num_events`` events."""
        slots = (self.read_slot(index, num_events) for index in range(self.num_slots))
        return [record for record in slots if record is not None]

    def read_slot(self, index: int, num_events: int = RING) -> RankRecord | None:
        """Return a copy of rank ``index``'s slot, None if no process has opened it."""
        return _record(self._memory, index * SLOT_BYTES, num_events)


def _record(memory: mmap.mmap, offset: int, num_events: int) -> RankRecord | None:
    """Return a copy of the slot that begins at byte ``offset``; None if no rank has opened it."""
    copy = memory[offset : offset + SLOT_BYTES]
    header = struct.unpack_from("12q", copy)
    if not header[Word.PID]:
        return None
    # Entries are copied after the header, so those that the rank has overwritten since are dropped.
    (after,) = struct.unpack_from("q", memory, offset + 8 * Word.COUNT)
    count = header[Word.COUNT]
    oldest = max(0, after + 1 - RING, count - num_events)
    names = _names(copy)
    events = [_event(copy, number, names) for number in range(oldest, count)]
    seconds = struct.unpack_from(f"{len(names)}d", copy, _SECONDS_AT)
    return RankRecord(
        rank=header[Word.RANK],
        pid=header[Word.PID],
        world_size=header[Word.WORLD_SIZE],
        pipeline_rank=header[Word.PIPELINE_RANK],
        generation=header[Word.GENERATION],
        iteration=header[Word.ITERATION],
        mean_step=header[Word.STEP_TIME] / 1e9,
        steps=header[Word.STEPS],
        started=header[Word.STARTED] / 1e9,
        ended=bool(header[Word.ENDED]),
        looked=header[Word.LOOKED] / 1e9,
        seconds={name: sum_ for name, sum_ in zip(names, seconds, strict=True) if sum_},
        events=tuple(event for event in events if event is not None),
    )


def _names(copy: bytes) -> Sequence[str]:
    """Return the names stored in ``copy``, a copy of a slot, in the order of their numbers."""
    names = list[str]()
    for number in range(MAX_NAMES):
        offset = _NAMES_AT + number * _NAME_BYTES
        cell = copy[offset : offset + _NAME_BYTES].rstrip(b"\0")
        if not cell:
            break
        names.append(cell.decode(errors="replace"))
    return names


def _event(copy: bytes, number: int, names: Sequence[str]) -> Event | None:
    """Return an event from ``copy``, a copy of a slot; None if a later event has overwritten it.

    ``number`` counts the rank's events from 0, unlike `Event.number`.
    """
    time, iteration, code, phase, microbatch, stage, peer, written = _ENTRY.unpack_from(
        copy, _RING_AT + number % RING * _ENTRY.size
    )
    if written != number + 1:
        return None
    kind = EventKind(code & 3)
    name = _name(names, code >> 2)
    return Event(
        written, time / 1e9, iteration, kind, name, _name(names, phase), microbatch, stage, peer
    )


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else "..."
