"""The log of a run's faults and recoveries: one JSON object per line in ``faults.jsonl``.

Every process of the run may append a line, including processes that watch ranks. The report of a
run, `tools/chaos.py` and people read the log.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from megatron_ext import limits
from megatron_ext.disk.reading import rows_of
from megatron_ext.disk.writing import open_descriptor

EVENTS_FILE = "faults.jsonl"
REPORT, TIMELINE, PICTURE = "report.txt", "timeline.json", "picture.svg"
"""Files written after a crash or hang: the report, the ranks' last events, and a plot of these."""


def append_event(folder: str | Path | None, kind: str, **facts: Any) -> None:
    """Append a line to the log in the save folder ``folder``; do nothing if it is None.

    ``kind`` names the event, such as "fault" or "restart", and ``facts`` are its details, such as
    iteration and rank. Facts that are None are omitted, and numbers that are not finite become
    text, since JSON has none. Each line is a single write, so lines of several processes do not
    mix. A failed write does not fail the run.
    """
    if folder is None:
        return
    event = {"time": time.time(), "kind": kind, **facts}
    line = json.dumps({k: _plain(v) for k, v in event.items() if v is not None}, allow_nan=False)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        descriptor = open_descriptor(Path(folder) / EVENTS_FILE, flags)
        try:
            size = os.fstat(descriptor).st_size
            # End a line that a full disk has cut short, so that this one stays readable.
            cut = size and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, f"{chr(10) if cut else ''}{line}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        print(
            f"note: {EVENTS_FILE} cannot be written ({limits.cause(error, folder)}): {line}",
            flush=True,
        )


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """Return the events in a save folder's ``faults.jsonl``, oldest first; [] if there are none.

    An incomplete line, for example after a full disk, is left out.
    """
    return list(rows_of(Path(folder) / EVENTS_FILE, lambda row: isinstance(row.get("kind"), str)))


def _plain(value: Any) -> Any:
    """Return a value for strict JSON; what JSON cannot represent becomes text, such as NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
