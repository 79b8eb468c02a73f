"""Watching the ranks of one machine: the first that fails, dies or stands still ends all."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

import psutil

EXIT_CODE_NO_ANSWER = 124
"""Exit code of a rank that waited too long for another, as of the program ``timeout``."""
EXIT_CODE_LOST_CONTACT = 123
"""Exit code of a rank whose connection to another one broke."""
GRACE_SECONDS = 3.0
"""Between asking the ranks to end and ending them."""
_SECONDS_FOR_THE_CAUSE = 2.0
"""Between the first rank that waited in vain and the naming of those that it waited for."""
_SECONDS_BETWEEN_LOOKS = 0.5
_FOLLOWS = (EXIT_CODE_NO_ANSWER, EXIT_CODE_LOST_CONTACT)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """Waits for ranks that this process has started.

    Args:
        children: ranks by process id.
        timeout_minutes: ``--distributed-timeout-minutes``, for which a rank may be stopped.
    """

    def __init__(self, children: dict[int, int], timeout_minutes: float) -> None:
        self._children = dict(children)
        self._timeout_minutes = timeout_minutes
        self._code = 0
        self._kill_at: float | None = None
        self._name_at: float | None = None
        self._look_at = 0.0
        self._stopped_since: dict[int, float] = {}

    def wait(self) -> int:
        """Return the exit code of the first rank that failed of its own accord, 0 if none did."""
        previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        try:
            while self._children:
                if not self._reap():
                    self._look(time.monotonic())
                    time.sleep(0.02)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._code

    def _reap(self) -> bool:
        """Note the ranks that have ended, and whether any has; other children stay whose they are.

        A rank whose status another part of this process has taken counts as failed.
        """
        before = len(self._children)
        for pid in list(self._children):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                done, status = pid, 1 << 8
            if done:
                self._ended(self._children.pop(pid), os.waitstatus_to_exitcode(status))
        return len(self._children) < before

    def _forward(self, number: int, _frame: FrameType | None = None) -> None:
        for pid in list(self._children):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def _ended(self, rank: int, status: int) -> None:
        """Note a rank's end; one that waited in vain gives the cause a moment to show itself."""
        if status == 0:
            return
        if status in _FOLLOWS:
            if self._code == 0:
                self._code = status
                self._name_at = time.monotonic() + _SECONDS_FOR_THE_CAUSE
            return
        if self._code in (0, *_FOLLOWS) and self._kill_at is None:
            self._code = _exit_code(status, rank)
            self._end_all()

    def _look(self, now: float) -> None:
        """Do what is due by the clock."""
        if self._kill_at is not None:
            if now > self._kill_at:
                self._forward(signal.SIGKILL)
        elif self._name_at is not None:
            if now > self._name_at:
                self._name_the_silent()
        elif now > self._look_at:
            self._look_at = now + _SECONDS_BETWEEN_LOOKS
            self._find_stopped(now)

    def _name_the_silent(self) -> None:
        """Say which ranks did not answer those that have given up, and end them."""
        if self._code == EXIT_CODE_NO_ANSWER:
            for pid, rank in sorted(self._children.items(), key=lambda item: item[1]):
                why = "has been stopped by a signal" if _is_stopped(pid) else "does not answer"
                _say(
                    rank,
                    f"{why}: others have waited for it for `--distributed-timeout-minutes` "
                    f"({self._timeout_minutes:g}), so all ranks are ended; look at what it does, "
                    "or give more minutes.",
                )
        # They have had their time.
        self._end_all(grace=0.5)

    def _find_stopped(self, now: float) -> None:
        """End all when a rank has been stopped for too long."""
        for pid, rank in self._children.items():
            if not _is_stopped(pid):
                self._stopped_since.pop(pid, None)
                continue
            since = self._stopped_since.setdefault(pid, now)
            if now - since > 60 * self._timeout_minutes:
                _say(
                    rank,
                    "has been stopped by a signal (such as SIGSTOP) for longer than "
                    f"`--distributed-timeout-minutes` ({self._timeout_minutes:g}), so all ranks "
                    "are ended; let it go on by SIGCONT in time, or give more minutes.",
                )
                self._code = EXIT_CODE_NO_ANSWER
                self._end_all(grace=0.5)
                return

    def _end_all(self, grace: float = GRACE_SECONDS) -> None:
        self._kill_at = time.monotonic() + grace
        self._forward(signal.SIGTERM)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _exit_code(status: int, rank: int) -> int:
    """A shell's exit code; death by a signal is said, since the rank could not say it."""
    if status >= 0:
        return status
    _say(rank, f"was ended by {signal.Signals(-status).name}")
    return 128 - status


def _say(rank: int, text: str) -> None:
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
