"""Tables of HTML pages, and functions that turn values from untrusted files into texts of cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from megatron_ext.inspect.pages.charts import show
from megatron_ext.train.reporting.files import number

MAX_ROWS = 300
"""Largest number of rows of a table on a page; of a longer table the last rows are shown."""
_MAX_TEXT = 600
NOTHING = "–"


@dataclass
class Table:
    """A table of texts.

    Attributes:
        columns: headings; those in ``numeric`` are aligned to the right.
        ids: the HTML ids of the rows, if other parts of the page link to them.
        note: a sentence below the table.
    """

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    numeric: frozenset[str] = frozenset()
    ids: list[str] = field(default_factory=list)
    note: str = ""

    def shortened(self) -> Table:
        """Return the table with only the last `MAX_ROWS` rows, and a note if it had more."""
        if len(self.rows) <= MAX_ROWS:
            return self
        note = f"{self.note} The newest {MAX_ROWS} of {len(self.rows)} are shown.".strip()
        rows = self.rows[-MAX_ROWS:]
        ids = self.ids[-MAX_ROWS:]
        return dataclasses.replace(self, rows=rows, ids=ids, note=note)


def text_of(value: object, limit: int = _MAX_TEXT) -> str:
    """Return a value from a file as one line of at most ``limit`` characters; a dash for None.

    Control characters become spaces; a longer text ends with "…".
    """
    if value is None:
        return NOTHING
    if isinstance(value, float):
        text = show(value)
    elif isinstance(value, Mapping):
        text = ", ".join(f"{k}: {text_of(v, 80)}" for k, v in list(value.items())[:40])
    elif isinstance(value, (list, tuple)):
        text = ", ".join(text_of(item, 80) for item in list(value)[:40])
    else:
        text = str(value)[: 4 * limit]
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def moment(value: object) -> str:
    """Return seconds since the epoch as a time in UTC; a dash for any other value."""
    try:
        when = datetime.fromtimestamp(number(value), timezone.utc)
    except (ValueError, OverflowError, OSError):
        return NOTHING
    return f"{when:%Y-%m-%d %H:%M:%S}"


def integer_of(row: Mapping[str, Any], name: str) -> int | None:
    try:
        return int(number(row.get(name)))
    except ValueError:
        return None
