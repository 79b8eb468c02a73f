"""Watches the forked ranks of one machine: the first rank that fails by itself ends all."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import psutil

from megatron_ext.errors import EXIT_CODE_NOT_SAVED, SECONDS_OF_ONE_INTERRUPTION, STOP_SIGNALS
from megatron_ext.train.exit_codes import (
    EXIT_CODE_NO_ANSWER,
    EXIT_CODE_SIGNAL,
    EXIT_CODE_USER_ERROR,
    FOLLOWS,
    code_of,
)
from megatron_ext.train.exit_signal import ExitSignal

GRACE_SECONDS = 3.0
"""Seconds between asking the ranks to exit and killing them."""
SECONDS_BETWEEN_POLLS = 0.02
"""Seconds between two checks whether a rank has ended."""
_SECONDS_FOR_THE_CAUSE = 2.0
"""Seconds that other ranks get to report an error after one gave up waiting for an answer."""
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_THE_OTHERS = 60.0
"""Seconds for the other ranks to exit, once a rank has saved and exited after the exit signal."""


class SignalForwarder:
    """A context manager that passes the launcher's signals on to its ranks.

    Attributes:
        children: rank by process id; the code that starts and reaps ranks updates it.
        stop_signal: the last signal that asked the ranks to exit without saving; None if none has.
        received: all received signals.

    Args:
        exit_signal: the signal at which ranks save and exit. Ranks that are forked after it came
            know so from this object.
    """

    def __init__(self, exit_signal: ExitSignal | None = None) -> None:
        self.children: dict[int, int] = {}
        self.stop_signal: int | None = None
        self.received: set[int] = set()
        self._exit_signal = exit_signal or ExitSignal(None)
        self._interrupted_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarder:
        for number in STOP_SIGNALS:
            # Ranks also ignore signals that this process ignores, as under nohup or in background
            # jobs.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the previous handlers; a forked rank does this first."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received.add(number)
        if number == self._exit_signal.number:
            self._exit_signal.came = True
        else:
            self.stop_signal = number
        self.send(signal.SIGKILL if self._is_impatient(number) else number)

    def _is_impatient(self, number: int) -> bool:
        """Return whether signal ``number`` is a second Ctrl-C while the ranks still clean up.

        SIGINTs within `SECONDS_OF_ONE_INTERRUPTION` of the first count as one Ctrl-C.
        """
        if number != signal.SIGINT or self.stop_signal != number:
            return False
        now = time.monotonic()
        first = self._interrupted_at = self._interrupted_at or now
        return now > first + SECONDS_OF_ONE_INTERRUPTION

    def code(self, code: int) -> int:
        """Return the exit code of the launch, given the exit code of its ranks, ``code``.

        If a signal asked the ranks to exit without saving, return the code for that signal; but
        return ``code`` if it says that the run is complete, has saved, or met a user's error.
        """
        if self.stop_signal is None or code in (0, EXIT_CODE_USER_ERROR, EXIT_CODE_SIGNAL):
            return code
        return self.code_of(-self.stop_signal)

    def code_of(self, status: int) -> int:
        """Return the exit code for a process's status: 128 + n if ``status`` is -n, for signal n.

        With ``--exit-signal-handler``, SIGTERM gives `EXIT_CODE_NOT_SAVED` instead of 143, which
        then says that the run has saved.
        """
        if status == -signal.SIGTERM and self._exit_signal.number is not None:
            return EXIT_CODE_NOT_SAVED
        return code_of(status)

    def send(self, number: int) -> None:
        """Send a signal to all ranks that have not been reaped."""
        for pid in list(self.children):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Supervisor:
    """Waits for forked ranks to end.

    If one fails, or a signal such as SIGSTOP keeps one stopped for longer than the timeout, all
    ranks are ended.
    """

    seconds_for_the_cause = _SECONDS_FOR_THE_CAUSE

    def __init__(self, forwarder: SignalForwarder, timeout_minutes: float) -> None:
        self._forwarder = forwarder
        self._timeout_minutes = timeout_minutes
        self._children = forwarder.children
        self._code = 0
        self._kill_at: float | None = None
        self._name_at: float | None = None
        self._look_at = 0.0
        self._stopped_since: dict[int, float] = {}

    def wait(self) -> int:
        """Wait for all ranks; return the exit code of the first that failed, or 0.

        A rank that failed by itself takes precedence over earlier ones that failed only because
        another rank did not answer.
        """
        while self._children:
            if not self._reap():
                self._look(time.monotonic())
                time.sleep(SECONDS_BETWEEN_POLLS)
        return self._code

    def _reap(self) -> bool:
        """Record the exit of each rank that has ended; return whether any rank has."""
        before = len(self._children)
        for pid in list(self._children):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                # Another part of this process has reaped the rank; it counts as failed.
                done = pid
                status = 1 << 8
            if done:
                self._ended(self._children.pop(pid), os.waitstatus_to_exitcode(status))
        return len(self._children) < before

    def _ended(self, rank: int, status: int) -> None:
        """Record how a rank has exited, and end all ranks if it failed by itself.

        If it only gave up waiting for another rank, all ranks are ended a little later, so that the
        rank that caused the failure can still report it.
        """
        if status in FOLLOWS and self._code == 0:
            self._code = status
            self._name_at = time.monotonic() + self.seconds_for_the_cause
        elif status not in (0, *FOLLOWS) and self._code in (0, *FOLLOWS):
            if self._kill_at is None:
                self._failed(rank, status)

    def _failed(self, rank: int, status: int) -> None:
        """End all ranks, since this one failed by itself."""
        self._code = self._forwarder.code_of(status)
        if status == EXIT_CODE_SIGNAL:
            # The other ranks have agreed to exit too, and may have reports to finish.
            self._kill_at = time.monotonic() + _SECONDS_FOR_THE_OTHERS
            return
        if status < 0 and -status != self._forwarder.stop_signal:
            say(rank, f"was ended by {signal.Signals(-status).name}")
        self._end_all()

    def _look(self, now: float) -> None:
        """Do what is due at ``now``: kill ranks, name unresponsive ones, or find stopped ones."""
        if self._kill_at is not None:
            if now > self._kill_at:
                self._forwarder.send(signal.SIGKILL)
        elif self._name_at is not None:
            if now > self._name_at:
                self._name_the_silent()
        elif now > self._look_at:
            self._look_at = now + _SECONDS_BETWEEN_LOOKS
            self._find_stopped(now)

    def _name_the_silent(self) -> None:
        """Print which ranks did not answer the others before the timeout, and end all ranks."""
        if self._code == EXIT_CODE_NO_ANSWER:
            for pid, rank in sorted(self._children.items(), key=lambda item: item[1]):
                why = "has been stopped by a signal" if is_stopped(pid) else "does not answer"
                say(
                    rank,
                    f"{why}: others have waited for it for `--distributed-timeout-minutes` "
                    f"({self._timeout_minutes:g}), so all ranks are ended; look at what it does, "
                    "or give more minutes.",
                )
        # The silent ranks have had their time.
        self._end_all(grace=0.5)

    def _find_stopped(self, now: float) -> None:
        """End all ranks if one has been suspended, as by SIGSTOP, for longer than the timeout."""
        stopped = {pid: rank for pid, rank in self._children.items() if is_stopped(pid)}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        for pid, rank in stopped.items():
            if now - self._stopped_since[pid] > 60 * self._timeout_minutes:
                say(
                    rank,
                    "has been stopped by a signal (such as SIGSTOP) for longer than "
                    f"`--distributed-timeout-minutes` ({self._timeout_minutes:g}), so all ranks "
                    "are ended; let it go on by SIGCONT in time, or give more minutes.",
                )
                self._stays_stopped(rank)
                return

    def _stays_stopped(self, rank: int) -> None:
        """End all ranks, since a signal has kept this one stopped for too long."""
        self._code = EXIT_CODE_NO_ANSWER
        self._end_all(grace=0.5)

    def _end_all(self, grace: float = GRACE_SECONDS) -> None:
        self._kill_at = time.monotonic() + grace
        self._forwarder.send(signal.SIGTERM)


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def say(rank: int, text: str) -> None:
    """Print a line about a rank to stderr."""
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
