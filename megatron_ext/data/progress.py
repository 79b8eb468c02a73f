"""Shows the progress of a data-preparation run on stderr, with rate and remaining time."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

_SECONDS_IN_LOG = 5.0


class Progress:
    """A tqdm bar on a terminal, otherwise a line on stderr every few seconds.

    Args:
        total: amount of the whole task: bytes of its input, or items.
        earlier: the part of ``total`` that earlier runs have done.
        items: the word for the run's results, such as "documents".
        log_interval: least number of items between two lines.
        in_bytes: whether amounts are bytes; otherwise they are items.
        verb: the first word of a line, such as "Encoded".
    """

    def __init__(
        self,
        total: int,
        earlier: int,
        items: str,
        *,
        log_interval: int = 1,
        in_bytes: bool = False,
        verb: str = "",
    ) -> None:
        self._total = total
        self._earlier = earlier
        self._items = items
        self._in_bytes = in_bytes
        self._verb = f"{verb} " if verb else ""
        self._log_interval = log_interval
        self._logged = 0
        self._start = self._shown = time.monotonic()
        size = {"unit": "B", "unit_scale": True} if in_bytes else {"unit": f" {items}"}
        self._bar: Any = tqdm(
            **size, total=total, initial=earlier, desc=verb or None, file=sys.stderr, leave=False,
            disable=None,
        )  # fmt: skip

    def show(self, done: int, items: int) -> None:
        """Show the amount ``done`` by this run so far, and the number of ``items`` made so far."""
        if not self._bar.disable:
            if self._in_bytes:
                self._bar.set_postfix_str(f"{items} {self._items}", refresh=False)
            self._bar.update(self._earlier + done - self._bar.n)
            return
        now = time.monotonic()
        due = now - self._shown >= _SECONDS_IN_LOG
        if due and items - self._logged >= self._log_interval:
            self._shown = now
            self._logged = items
            print(self.line(done, items, now - self._start), file=sys.stderr, flush=True)

    def line(self, done: int, items: int, seconds: float) -> str:
        """Return the log line: share of ``total`` done, items made, rates and remaining time.

        Args:
            done: amount done by this run, in the unit of ``total``: bytes or items.
            items: number of results, such as documents, that this run has made.
            seconds: duration of this run so far.
        """
        share = min(1.0, (self._earlier + done) / max(self._total, 1))
        left = round(max(0.0, (self._total - self._earlier - done) * seconds / max(done, 1)))
        clock = f"{left // 60}:{left % 60:02}" if left < 3600 else tqdm.format_interval(left)
        rate = items / seconds
        shown = f"{rate:.0f}" if self._in_bytes or rate >= 100 else f"{rate:.1f}"
        megabytes = f"{done / seconds / 1e6:.1f} MB/s  " if self._in_bytes else ""
        return (
            f"{self._verb}{share:4.0%}  {items} {self._items}  {shown} {self._items}/s  "
            f"{megabytes}ETA {clock}"
        )

    def close(self) -> None:
        self._bar.close()
