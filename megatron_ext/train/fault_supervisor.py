"""Watches the forked ranks of a run that goes on after faults: sees a fault, and tells of it.

After a fault all ranks are killed at once, as they are to be forked anew.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import EXIT_CODE_INTERRUPTED
from megatron_ext.faults.postmortem import write_postmortem
from megatron_ext.faults.watch import Fault as Kind
from megatron_ext.faults.watch import Verdict
from megatron_ext.faults.watcher import Watcher
from megatron_ext.train.exit_codes import (
    EXIT_CODE_NO_ANSWER,
    EXIT_CODE_RESIZED,
    EXIT_CODE_SIGNAL,
    EXIT_CODE_USER_ERROR,
    FOLLOWS,
    cause_of,
)
from megatron_ext.train.supervisor import GRACE_SECONDS, SignalForwarder, Supervisor

_SECONDS_BETWEEN_LOOKS = 0.1
"""Time between looks at the board, of which one takes about 0.1 ms."""
_SECONDS_FOR_EVIDENCE = 0.3
"""Longest time for which ranks are asked what they do before they are killed."""
_LASTING = (0, EXIT_CODE_USER_ERROR, EXIT_CODE_INTERRUPTED, EXIT_CODE_SIGNAL)
"""Statuses of a rank that ended on purpose, or that would end in the same way again."""


@dataclass(frozen=True)
class Fault:
    """The end of a run's ranks that nobody asked for.

    Attributes:
        rank: the rank that failed first.
        cause: such as "SIGKILL", "exception" or "hang".
        iteration: the newest step that any rank was in; None if it is not known.
        where: what the rank did last, as text.
        seen_after: most seconds that it can have taken to see the fault.
        time: when the fault was seen, in seconds of CLOCK_MONOTONIC.
    """

    rank: int
    cause: str
    time: float
    iteration: int | None = None
    where: str | None = None
    seen_after: float | None = None


class RestartSupervisor(Supervisor):
    """Waits for the ranks of one generation; after a fault it kills all at once.

    Attributes:
        fault: what ended the ranks; None if they ended on purpose, or in a way that would repeat.
        postmortem: the folder of its post-mortem; None if there is none.
    """

    seconds_for_the_cause = 0.2

    def __init__(
        self,
        forwarder: SignalForwarder,
        timeout_minutes: float,
        *,
        watcher: Watcher | None,
        save: str | None,
        look_for_wish: Callable[[], None],
    ) -> None:
        super().__init__(forwarder, timeout_minutes)
        self._watcher, self._save, self._look_for_wish = watcher, save, look_for_wish
        self._pids: dict[int, int] = {}
        self._polled = self._watched = time.monotonic()
        self._contact_lost: int | None = None
        self.fault: Fault | None = None
        self.postmortem: Path | None = None

    def wait(self) -> int:
        """Wait for all ranks, and return the exit code as `Supervisor.wait` does."""
        self._pids = {rank: pid for pid, rank in self._children.items()}
        code = super().wait()
        if self.fault is None and code in FOLLOWS and self._contact_lost is not None:
            self._note(Verdict(Kind.DEAD, (self._contact_lost,), 0.0), cause_of(code))
        return code

    def _reap(self) -> bool:
        found = super()._reap()
        self._polled = time.monotonic()
        return found

    def _look(self, now: float) -> None:
        super()._look(now)
        ends = self._kill_at is not None or self._code != 0
        if self._watcher is None or ends or now < self._watched + _SECONDS_BETWEEN_LOOKS:
            return
        self._watched = now
        for verdict in self._watcher.look(self._pids):
            # The end of a process is seen by itself, and with its cause.
            if verdict.fault is Kind.HANG and self.fault is None:
                self._code = EXIT_CODE_NO_ANSWER
                self._note(verdict, "hang")
                self._end_all()
        if self.fault is None:
            self._watcher.tell_slow_ranks(self._save, self._pids)

    def _find_stopped(self, now: float) -> None:
        super()._find_stopped(now)
        self._look_for_wish()

    def _stays_stopped(self, rank: int) -> None:
        self._note(Verdict(Kind.HANG, (rank,), 60 * self._timeout_minutes), "hang")
        super()._stays_stopped(rank)

    def _ended(self, rank: int, status: int) -> None:
        if status in FOLLOWS and self._contact_lost is None:
            self._contact_lost = rank
        super()._ended(rank, status)

    def _failed(self, rank: int, status: int) -> None:
        if status == EXIT_CODE_RESIZED:
            # The others have been asked too, and are about to end in the same way.
            self._code = status
            return
        asked = -status in self._forwarder.received or self._forwarder.asked is not None
        if status not in _LASTING and not asked:
            self._note(Verdict(Kind.DEAD, (rank,), 0.0), cause_of(status))
        super()._failed(rank, status)

    def _note(self, verdict: Verdict, cause: str) -> None:
        """Keep what is known about a fault that has just been seen, and write its post-mortem."""
        now = time.monotonic()
        seen_after = now - self._polled if verdict.fault is Kind.DEAD else verdict.silent
        rank, iteration, where = min(verdict.ranks, default=-1), None, None
        if self._watcher is not None:
            if cause == signal.SIGKILL.name and self._watcher.killed_for_memory():
                cause = "memory"
            try:
                case = self._watcher.investigate(
                    verdict, cause=cause, pids=self._pids, seconds=_SECONDS_FOR_EVIDENCE
                )
                rank = min(case.blame.ranks, default=rank)
                iteration = max((record.iteration for record in case.board), default=None)
                where = case.where(rank)
                self.postmortem = write_postmortem(case, self._save)
            except Exception as error:  # the restart must not depend on what can be told
                print(f"note: the post-mortem is not whole ({error!r})", flush=True)
        self.fault = Fault(rank, cause, now, iteration, where, round(seen_after, 4))

    def _end_all(self, grace: float = GRACE_SECONDS) -> None:
        """Kill all ranks at once if they are to be started again, else end them as usual."""
        if self.fault is None:
            super()._end_all(grace)
            return
        self._kill_at = time.monotonic()
        self._forwarder.send(signal.SIGKILL)
