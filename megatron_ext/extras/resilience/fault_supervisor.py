"""Watches the forked ranks of a run, detects faults, and reports them.

If a run continues after faults, all its ranks are killed at once, since they will be forked again.
Any other run ends as it would without a watcher; its hangs are reported but not ended, because a
debugger may be holding a rank.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_ext.disk.events import append_event
from megatron_ext.errors import EXIT_CODE_INTERRUPTED, EXIT_CODE_NOT_SAVED
from megatron_ext.extras.resilience.postmortem import Case, Drawings, write_postmortem
from megatron_ext.extras.resilience.watch import Fault as Kind
from megatron_ext.extras.resilience.watch import Verdict
from megatron_ext.extras.resilience.watcher import Watcher
from megatron_ext.train.exit_codes import (
    EXIT_CODE_NO_ANSWER,
    EXIT_CODE_RESIZED,
    EXIT_CODE_SIGNAL,
    EXIT_CODE_USER_ERROR,
    FOLLOWS,
    cause_of,
    code_of,
)
from megatron_ext.train.supervisor import GRACE_SECONDS, SignalForwarder, Supervisor, say

_SECONDS_BETWEEN_LOOKS = 0.1
"""Seconds between two calls of `Watcher.look`, which take about 0.1 ms each."""
_SECONDS_FOR_EVIDENCE = 0.3
"""Longest time in seconds to wait for the ranks' stacks and collectives before they are killed."""
_PATIENCE_AFTER_A_HANG = 2.0
"""Once a hang has ended by itself, only hangs this many times as long are reported."""
_LASTING = (
    0,
    EXIT_CODE_USER_ERROR,
    EXIT_CODE_INTERRUPTED,
    EXIT_CODE_NOT_SAVED,
    EXIT_CODE_SIGNAL,
)
"""Exit codes that are no faults: the rank ended on purpose, or a restart would end the same way."""


@dataclass(frozen=True)
class Fault:
    """An unexpected end of a run's ranks, or a hang.

    Attributes:
        rank: the rank that failed first; -1 if unknown.
        cause: such as "SIGKILL", "exception" or "hang".
        iteration: the newest step of any rank; None if unknown.
        where: the last action of the rank, as text; None if unknown.
        seen_after: upper bound of the seconds from the fault to its detection; for a hang, the
            seconds of silence before it was detected.
        time: when the fault was detected, in seconds of CLOCK_MONOTONIC.
    """

    rank: int
    cause: str
    time: float
    iteration: int | None = None
    where: str | None = None
    seen_after: float | None = None


def append_fault(
    save: str | None, fault: Fault, *, generation: int, postmortem: Path | None
) -> None:
    """Add a fault to the log in the folder ``save``, with the folder ``postmortem`` of its report.

    ``generation`` counts the starts of the run's ranks, from 0. Nothing is written if ``save`` is
    None.
    """
    append_event(
        save,
        "fault",
        rank=fault.rank,
        cause=fault.cause,
        where=fault.where,
        iteration=fault.iteration,
        generation=generation,
        postmortem=None if postmortem is None else postmortem.name,
        seen_after=fault.seen_after,
    )


class FaultSupervisor(Supervisor):
    """Waits for the ranks of one start of a run; writes a report and an event about a fault.

    Attributes:
        fault: why the ranks ended or hang; None if they ended on purpose, or for a reason that
            would end them again after a restart.
        postmortem: the folder of the report on the fault; None if there is none.
    """

    def __init__(
        self,
        forwarder: SignalForwarder,
        timeout_minutes: float,
        *,
        watcher: Watcher | None,
        save: str | None,
        generation: int = 0,
    ) -> None:
        super().__init__(forwarder, timeout_minutes)
        self._watcher = watcher
        self._save = save
        self._generation = generation
        self._pids: dict[int, int] = {}
        self._polled = self._watched = time.monotonic()
        self._contact_lost: int | None = None
        self.fault: Fault | None = None
        self.postmortem: Path | None = None

    def wait(self) -> int:
        """Wait for all ranks, and return the exit code like `Supervisor.wait`."""
        self._pids = {rank: pid for pid, rank in self._children.items()}
        code = super().wait()
        lost = self._contact_lost
        ends = self.fault is not None or self._is_ending
        if code in FOLLOWS and lost is not None and not ends:
            self._note(Verdict(Kind.DEAD, (lost,), 0.0), cause_of(code))
        return code

    @property
    def _is_ending(self) -> bool:
        """Return whether the launcher has been asked to exit."""
        return self._forwarder.stop_signal is not None

    def _reap(self) -> bool:
        reaped = super()._reap()
        self._polled = time.monotonic()
        return reaped

    def _look(self, now: float) -> None:
        super()._look(now)
        ends = self._kill_at is not None or self._code != 0
        if self._watcher is None or ends or now < self._watched + _SECONDS_BETWEEN_LOOKS:
            return
        self._watched = now
        hangs = [v for v in self._watcher.look(self._pids) if v.fault is Kind.HANG]
        if hangs and self.fault is None:  # `_reap` handles ended processes
            self._hangs(hangs[0])
        elif not hangs:
            self._watcher.tell_slow_ranks(self._save, self._pids)

    def _hangs(self, verdict: Verdict) -> None:
        """Report a hang; a subclass may also end the ranks.

        ``verdict`` says which ranks hang, and for how long.
        """
        raise NotImplementedError

    def _stays_stopped(self, rank: int) -> None:
        if self.fault is None:
            self._note(Verdict(Kind.HANG, (rank,), 60 * self._timeout_minutes), "hang")
        super()._stays_stopped(rank)

    def _ended(self, rank: int, status: int) -> None:
        if status in FOLLOWS and self._contact_lost is None:
            self._contact_lost = rank
        super()._ended(rank, status)

    def _failed(self, rank: int, status: int) -> None:
        if (
            status not in _LASTING
            and not self._is_ending
            and -status not in self._forwarder.received
        ):
            self._note(Verdict(Kind.DEAD, (rank,), 0.0), cause_of(status))
        super()._failed(rank, status)

    def _note(self, verdict: Verdict, cause: str) -> Case | None:
        """Investigate and report a fault that was just detected, and store it in `fault`.

        ``cause`` is as in `Fault`. Return the findings of the investigation; None without a
        `Watcher`, or if the investigation failed.
        """
        now = time.monotonic()
        seen_after = now - self._polled if verdict.fault is Kind.DEAD else verdict.silent
        rank = min(verdict.ranks, default=-1)
        iteration = None
        where = None
        case = None
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
                self.postmortem = self._write(case)
            except Exception as error:  # the launcher must survive a failed investigation
                print(f"note: the post-mortem is not whole ({error!r})", flush=True)
        self.fault = Fault(rank, cause, now, iteration, where, round(seen_after, 4))
        append_fault(
            self._save, self.fault, generation=self._generation, postmortem=self.postmortem
        )
        return case

    def _write(self, case: Case) -> Path | None:
        """Write the report on a fault, and return its folder.

        Without a save folder, or if writing fails, print the first lines and return None.
        """
        return write_postmortem(case, self._save)

    def _end_all(self, grace: float = GRACE_SECONDS) -> None:
        if self._code == EXIT_CODE_NO_ANSWER and self.fault is None and not self._is_ending:
            self._note(Verdict(Kind.HANG, (), 60 * self._timeout_minutes), "hang")
        self._end_ranks(grace)

    def _end_ranks(self, grace: float) -> None:
        """Ask all ranks to end, and kill them after ``grace`` seconds.

        This is called after everything about their fault has been recorded.
        """
        super()._end_all(grace)


class TellingSupervisor(FaultSupervisor):
    """Waits for ranks that are not restarted, and only reports their faults."""

    _patience = 0.0
    _hung: Case | None = None

    @cached_property
    def _drawings(self) -> Drawings:
        return Drawings()

    def wait(self) -> int:
        """Wait for all ranks, and until the pictures in reports are drawn; return the exit code."""
        code = super().wait()
        if self.fault is not None and self._hung is None:
            self._tell_end(self.fault, code)
        self._drawings.wait()
        return code

    def _look(self, now: float) -> None:
        super()._look(now)
        if self._hung is not None and self._kill_at is None and self._code == 0:
            self._see_whether_it_goes_on(self._hung)

    def _hangs(self, verdict: Verdict) -> None:
        """Report a hang, unless it is short compared with an earlier one that ended by itself.

        If a reported hang has ended by itself after n seconds, a later hang is reported only once
        it has lasted n times `_PATIENCE_AFTER_A_HANG` seconds.
        """
        if verdict.silent < self._patience:
            return
        self._hung = case = self._note(verdict, "hang")
        if case is None or self.postmortem is None:
            return
        self._drawings.start(self.postmortem)
        text = (
            f"{case.sentence.rstrip('.')}; ranks wait for each other for "
            f"`--distributed-timeout-minutes` ({self._timeout_minutes:g}) at most; post-mortem: "
            f"{self.postmortem}"
        )
        print(text, file=sys.stderr, flush=True)

    def _see_whether_it_goes_on(self, case: Case) -> None:
        """Report that a hang has ended by itself, if one of the ranks that stopped first goes on.

        In that case `fault` becomes None again, so that later hangs can be reported.
        """
        assert self._watcher is not None
        for record in self._watcher.board.read(1):
            before = case.record(record.rank)
            first = record.rank in case.blame.ranks or not case.blame.ranks
            if before is None or not first or record.last_time <= case.now:
                continue
            silence = record.last_time - before.last_time
            say(record.rank, f"goes on, after {silence:.1f} s")
            self._patience = _PATIENCE_AFTER_A_HANG * silence
            self._hung = self.fault = self.postmortem = None
            return

    def _failed(self, rank: int, status: int) -> None:
        self._hung = self.postmortem = None
        super()._failed(rank, status)

    def _tell_end(self, fault: Fault, code: int) -> None:
        """Print what the ranks cannot print themselves when the run ends after a fault.

        This can be two facts: the kernel has killed a rank for lack of memory, and where the report
        on the fault is. Print nothing if neither applies.
        """
        parts = []
        if (fault.cause, code) == ("memory", code_of(-signal.SIGKILL)):
            parts.append(f"the kernel has killed rank {fault.rank} for want of memory")
        if self.postmortem is not None:
            self._drawings.start(self.postmortem)
            parts.append(f"post-mortem: {self.postmortem}")
        if parts:
            print("; ".join(parts), file=sys.stderr, flush=True)

    def _write(self, case: Case) -> Path | None:
        """Write the report like the base class, but without a save folder only after a hang."""
        if self._save is None and case.cause != "hang":
            return None
        return write_postmortem(case, self._save)


class RestartSupervisor(FaultSupervisor):
    """Waits for ranks that `extras.resilience.restarts` forks again after a fault.

    After a fault, such as a crash or a hang, it kills all remaining ranks immediately.

    Args:
        check_request: called at each look at the running ranks, without arguments or result. It
            asks the ranks to exit if an operator has requested another number of ranks.
    """

    seconds_for_the_cause = 0.2

    def __init__(
        self,
        forwarder: SignalForwarder,
        timeout_minutes: float,
        *,
        watcher: Watcher | None,
        save: str | None,
        generation: int,
        check_request: Callable[[], None],
    ) -> None:
        super().__init__(
            forwarder, timeout_minutes, watcher=watcher, save=save, generation=generation
        )
        self._check_request = check_request

    def _hangs(self, verdict: Verdict) -> None:
        """Report a hang, and end all ranks."""
        self._code = EXIT_CODE_NO_ANSWER
        self._note(verdict, "hang")
        self._end_all()

    def _find_stopped(self, now: float) -> None:
        super()._find_stopped(now)
        self._check_request()

    def _failed(self, rank: int, status: int) -> None:
        if status == EXIT_CODE_RESIZED:
            # The other ranks have been asked as well, and are about to exit in the same way.
            self._code = status
            return
        super()._failed(rank, status)

    def _end_ranks(self, grace: float) -> None:
        """Kill all ranks at once after a fault, so that they can be restarted.

        Without a fault, ask them to end, and kill them after `GRACE_SECONDS`; ignore ``grace``.
        """
        if self.fault is None:
            super()._end_ranks(GRACE_SECONDS)
            return
        self._kill_at = time.monotonic()
        self._forwarder.send(signal.SIGKILL)
