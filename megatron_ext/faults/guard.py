"""Watches a machine from within its ranks, where torchrun and not our launcher supervises them.

Each rank has a thread that looks at the board. The lowest rank whose thread has looked lately acts:
it writes the post-mortem, and ends the rank that hangs if torchrun has restarts left, which then
starts the ranks again. Without restarts the run ends as before, when its time-out is over.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megatron_ext.faults.board import RankRecord
from megatron_ext.faults.events import append_event
from megatron_ext.faults.host import generation
from megatron_ext.faults.postmortem import Case, start_drawing, write_postmortem
from megatron_ext.faults.recorder import Recorder
from megatron_ext.faults.watch import USUAL, Fault, Limits
from megatron_ext.faults.watcher import Watcher

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_OF_A_LOOK = 2.5
"""Time since the last look of a rank's thread from which on the next rank acts."""


def restarts_left() -> int:
    """Return how often torchrun would still start the ranks again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - generation()


@contextmanager
def guard(
    folder: Path | None,
    recorder: Recorder,
    rank: int,
    save: str | None,
    *,
    timeout_minutes: float,
) -> Iterator[None]:
    """Watch the ranks of this machine in a thread, if torchrun has started them."""
    if folder is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    limits = replace(USUAL, boundless=60 * timeout_minutes)
    done = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(folder, recorder, rank, save, limits, done), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()


def _watch(
    folder: Path,
    recorder: Recorder,
    rank: int,
    save: str | None,
    limits: Limits,
    done: threading.Event,
) -> None:
    watcher = Watcher(folder, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), limits)
    while not done.wait(_SECONDS_BETWEEN_LOOKS):
        recorder.looked()
        if rank != acting_rank(watcher.board.read(1), time.monotonic()):
            continue
        with suppress(OSError):
            watcher.tell_slow_ranks(save)
        hangs = [verdict for verdict in watcher.look() if verdict.fault is Fault.HANG]
        if hangs and not done.is_set():
            case = watcher.investigate(hangs[0])
            if case.is_here:
                _act(case, save)
                return


def acting_rank(board: list[RankRecord], now: float) -> int | None:
    """Return the lowest rank of this machine whose thread has looked at the board lately."""
    able = [r.rank for r in board if not r.ended and now - r.looked < _SECONDS_OF_A_LOOK]
    return min(able, default=None)


def _act(case: Case, save: str | None) -> None:
    """Tell about a hang, and end its ranks where torchrun starts them again."""
    tell(case, save)
    if restarts_left() > 0:
        for rank in case.blame.ranks:
            record = case.record(rank)
            if record is not None:
                os.kill(record.pid, signal.SIGKILL)


def tell(case: Case, save: str | None) -> Path | None:
    """Write the post-mortem, the event and a line on stderr; return the post-mortem's folder."""
    first = case.blame.ranks[0] if case.blame.ranks else None
    record = None if first is None else case.record(first)
    append_event(
        save,
        "fault",
        rank=first,
        cause=case.cause,
        where=case.sentence,
        iteration=None if record is None else record.iteration,
        generation=generation(),
        seen_after=None if record is None else round(case.now - record.last_time, 3),
    )
    folder = write_postmortem(case, save)
    if folder is not None:
        print(f"{case.sentence} See {folder}.", file=sys.stderr, flush=True)
        start_drawing(folder)
    return folder
