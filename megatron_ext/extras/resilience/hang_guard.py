"""Reports hangs and slow ranks under torchrun, and ends hangs if torchrun restarts ranks.

torchrun's agent notices only processes that have ended. So a thread in each rank reads the board
of its machine (`parallel.board`): shared memory in which all local ranks record what they do. After
a hang, the thread of the lowest rank whose thread still runs writes a report. If torchrun restarts
ranks, this thread also kills the ranks that stopped first, so that torchrun notices.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ext.config.run import RunConfig
from megatron_ext.disk.host_folder import (
    generation,
    host_folder,
    is_under_torchrun,
    restarts_by_torchrun,
)
from megatron_ext.extras.resilience.fault_supervisor import Fault, append_fault
from megatron_ext.extras.resilience.postmortem import start_drawing, write_postmortem
from megatron_ext.extras.resilience.watch import Fault as Kind
from megatron_ext.extras.resilience.watch import Verdict
from megatron_ext.extras.resilience.watchdog import watchdog
from megatron_ext.extras.resilience.watcher import Watcher, open_watcher
from megatron_ext.parallel.board import Slot, Word
from megatron_ext.train.exit_codes import EXIT_CODE_NO_ANSWER

_SECONDS_BETWEEN_LOOKS = 0.25
_SECONDS_OF_A_SIGN = 2.0
"""Seconds without a check for hangs by a rank's thread until the next rank's thread takes over."""


@contextmanager
def hang_guard(config: RunConfig, rank: int) -> Iterator[None]:
    """Run a thread in the block that tells other processes what this rank does (`watchdog`).

    Under torchrun, a second thread watches the local ranks for hangs and slow ranks.
    """
    folder = host_folder()
    with watchdog(folder, rank), _watching(config, folder):
        yield


@contextmanager
def _watching(config: RunConfig, folder: Path | None) -> Iterator[None]:
    """Inside the block, watch the ranks of this machine in a thread if torchrun has started them.

    Do nothing if our own launcher has forked and watches the ranks, or if there is no `Board`.
    """
    minutes = config.parallel.distributed_timeout_minutes
    size = os.environ.get("LOCAL_WORLD_SIZE")
    watcher = open_watcher(folder, int(size or 1), minutes) if is_under_torchrun() else None
    if watcher is None:
        yield
        return
    over = threading.Event()
    guard = _Guard(watcher, config.checkpoint.save, over)
    thread = threading.Thread(target=guard.run, name="hang guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Guard:
    """The thread that watches all ranks of a machine; it reports only if no lower rank does."""

    def __init__(self, watcher: Watcher, save: str | None, over: threading.Event) -> None:
        self._watcher = watcher
        self._save = save
        self._over = over
        self._place = int(os.environ.get("LOCAL_RANK", "0"))
        self._slot: Slot = watcher.board.slot(self._place)
        self._ends_hangs = restarts_by_torchrun() > 0

    def run(self) -> None:
        """Watch the ranks of this machine until the run ends on this rank.

        Report slow ranks and at most one hang, but only while no lower rank of the machine watches.
        """
        has_reported = False
        while not self._over.wait(_SECONDS_BETWEEN_LOOKS):
            # Keep looking after a reported hang; otherwise another rank would report it again.
            self._slot.set(Word.LOOKED, time.monotonic_ns())
            hangs = [v for v in self._watcher.look() if v.fault is Kind.HANG]
            if has_reported or not self._is_my_turn():
                continue
            if hangs:
                has_reported = self._tell(hangs[0])
            else:
                self._watcher.tell_slow_ranks(self._save)

    def _is_my_turn(self) -> bool:
        """Return whether no lower rank of this machine is watching for hangs."""
        since = time.monotonic() - _SECONDS_OF_A_SIGN
        lower = (self._watcher.board.read_slot(place, 1) for place in range(self._place))
        return not any(record is not None and record.looked > since for record in lower)

    def _tell(self, hang: Verdict) -> bool:
        """Report a hang if a rank of this machine stopped first; return whether it was reported.

        If torchrun restarts ranks, also kill the ranks that stopped first: torchrun notices only
        ranks that have ended, and then restarts all.
        """
        case = self._watcher.investigate(hang)
        culprits = [record for record in case.board if record.rank in case.blame.ranks]
        if not culprits:
            return False
        folder = write_postmortem(case, self._save)
        first = culprits[0]
        fault = Fault(
            first.rank,
            "hang",
            case.now,
            iteration=max(record.iteration for record in case.board),
            where=case.where(first.rank),
            seen_after=round(hang.silent, 4),
        )
        append_fault(self._save, fault, generation=generation(), postmortem=folder)
        print(f"> {case.sentence}", flush=True)
        if folder is not None:
            start_drawing(folder)
        for record in culprits if self._ends_hangs else ():
            if record.pid == os.getpid():
                os._exit(EXIT_CODE_NO_ANSWER)
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
        return True
