"""The progress of a run: a bar or lines on stderr, with rate and time left."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from megatron_ext.text.preprocess.inputs import Part

_SECONDS_IN_LOG = 5.0


class Progress:
    """The progress of a run: a tqdm bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, parts: Sequence[Part], todo: Sequence[int], log_interval: int) -> None:
        self._total = sum(part.num_bytes for part in parts)
        self._earlier = self._total - sum(parts[number].num_bytes for number in todo)
        self._log_interval, self._logged = log_interval, 0
        self._start = self._shown = time.monotonic()
        size = {"total": self._total, "initial": self._earlier, "unit": "B", "unit_scale": True}
        self._bar: Any = tqdm(**size, file=sys.stderr, leave=False, disable=None)

    def show(self, done: int, documents: int) -> None:
        """Show that ``done`` bytes of the unfinished parts are read and ``documents`` encoded."""
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{documents} documents", refresh=False)
            self._bar.update(self._earlier + done - self._bar.n)
            return
        now = time.monotonic()
        due = now - self._shown >= _SECONDS_IN_LOG
        if due and documents - self._logged >= self._log_interval:
            self._shown, self._logged = now, documents
            print(self.line(done, documents, now - self._start), file=sys.stderr, flush=True)

    def line(self, done: int, documents: int, seconds: float) -> str:
        """Return the log line for ``done`` bytes and ``documents`` after ``seconds``."""
        share = min(1.0, (self._earlier + done) / max(self._total, 1))
        left = round(max(0.0, (self._total - self._earlier - done) * seconds / max(done, 1)))
        clock = f"{left // 60}:{left % 60:02}" if left < 3600 else tqdm.format_interval(left)
        return (
            f"{share:4.0%}  {documents} documents  {documents / seconds:.0f} documents/s  "
            f"{done / seconds / 1e6:.1f} MB/s  ETA {clock}"
        )

    def close(self) -> None:
        self._bar.close()
