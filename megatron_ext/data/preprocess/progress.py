"""The progress line of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_BAR = 24
_SECONDS_ON_TERMINAL = 0.1
_SECONDS_IN_LOG = 5.0


class Progress:
    """Counts documents and bytes and shows documents/s, MB/s and the time left.

    Args:
        total_bytes: bytes of all parts.
        done_bytes: bytes of the parts that an earlier run finished.
        log_interval: documents between two lines where `out` is no terminal.
    """

    def __init__(
        self,
        total_bytes: int,
        done_bytes: int = 0,
        *,
        log_interval: int = 1000,
        out: TextIO | None = None,
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._terminal = self._out.isatty()
        self._total, self._earlier, self._bytes = total_bytes, done_bytes, 0
        self._documents = self._shown_documents = 0
        self._log_interval = log_interval
        self._start = self._shown = time.monotonic()

    def advance(self, num_bytes: int, num_documents: int) -> None:
        self._bytes += num_bytes
        self._documents += num_documents
        now = time.monotonic()
        if self._terminal:
            due = now - self._shown >= _SECONDS_ON_TERMINAL
        else:
            due = (
                now - self._shown >= _SECONDS_IN_LOG
                and self._documents - self._shown_documents >= self._log_interval
            )
        if due:
            self._show(now)

    def _show(self, now: float) -> None:
        self._shown, self._shown_documents = now, self._documents
        line = self.line(now - self._start)
        print(f"\r{line}\x1b[K" if self._terminal else line, end="", file=self._out)
        print(end="" if self._terminal else "\n", file=self._out, flush=True)

    def line(self, seconds: float) -> str:
        """The text of the progress line after so many seconds."""
        seconds = max(seconds, 1e-9)
        done = min(1.0, (self._earlier + self._bytes) / max(self._total, 1))
        left = (self._total - self._earlier - self._bytes) * seconds / max(self._bytes, 1)
        filled = round(done * _BAR)
        bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] " if self._terminal else ""
        return (
            f"{bar}{done:4.0%}  {self._documents} documents  "
            f"{self._documents / seconds:.0f} documents/s  "
            f"{self._bytes / seconds / 1e6:.1f} MB/s  ETA {_clock(left)}"
        )

    def close(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=self._out, flush=True)


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
