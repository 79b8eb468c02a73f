"""The parts of a report: its first lines, and tables whose rows are also written as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_ext.errors import WIDEST_LINE


@dataclass(frozen=True)
class Column:
    """A column of a `Sheet`.

    Attributes:
        heading: the heading in the printed table.
        key: the name of its values in JSON, with their unit, such as "peak_bytes".
        show: returns the text of a value in the printed table.
        optional: whether the printed table leaves out the column if all its values are 0 or empty.
        printed: whether the printed table has the column; JSON has it anyway.
    """

    heading: str
    key: str
    show: Callable[[Any], str] = str
    optional: bool = False
    printed: bool = True


@dataclass(frozen=True)
class Sheet:
    """A table of a report.

    Attributes:
        key: its name in JSON.
        rows: the values of each row, in the order of ``columns``.
        caption: text below the printed table.
        merges: whether the printed table joins consecutive rows that differ only in their first
            value, an integer, into one: "1-14".
    """

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    merges: bool = False

    def table(self) -> Table:
        """Return the table to print."""
        shown = [
            index
            for index, column in enumerate(self.columns)
            if column.printed and (not column.optional or any(row[index] for row in self.rows))
        ]
        headings = [self.columns[index].heading for index in shown]
        table = Table(title=self.title, caption=self.caption or None, box=SIMPLE_HEAD)
        table.title_justify = table.caption_justify = "left"
        table.show_edge = False
        table.padding = (0, 1, 0, 0)
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for first, last, row in self._merged():
            cells = [self.columns[index].show(row[index]) for index in shown]
            if last != first:
                cells[0] = f"{first}-{last}"
            table.add_row(*cells)
        return table

    def _merged(self) -> list[tuple[Any, Any, Sequence[Any]]]:
        """Return the rows to print, each with the first values of the rows that it stands for."""
        if not self.merges:
            return [(row[0], row[0], row) for row in self.rows]
        groups = [list(rows) for _, rows in groupby(self.rows, key=lambda row: list(row[1:]))]
        return [(rows[0][0], rows[-1][0], rows[0]) for rows in groups]

    def records(self) -> list[dict[str, Any]]:
        """Return the rows for JSON, with all columns."""
        keys = [column.key for column in self.columns]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Report:
    """The printed parts of a plan.

    Attributes:
        fits: whether the run fits the given GPU; True without a GPU.
        lines: the first lines, the verdict before all else.
        values: the numbers of these lines for JSON; names end with their unit.
        remarks: lines after the tables.
    """

    fits: bool
    lines: Sequence[str]
    values: Mapping[str, Any] = field(default_factory=dict)
    sheets: Sequence[Sheet] = ()
    remarks: Sequence[str] = ()

    def show(self) -> None:
        """Print the report, at most `WIDEST_LINE` columns wide."""
        out = console()
        for line in self.lines:
            out.print(line)
        for sheet in self.sheets:
            out.print()
            out.print(sheet.table())
        for line in self.remarks:
            out.print(line)

    def as_json(self) -> dict[str, Any]:
        """Return everything in the report as values that JSON can hold."""
        notes = [*self.remarks, *(sheet.caption for sheet in self.sheets if sheet.caption)]
        tables = {sheet.key: sheet.records() for sheet in self.sheets}
        return {"fits": self.fits, **self.values, **tables, "notes": notes}


def console() -> Console:
    """Return a console as wide as the terminal, but at most `WIDEST_LINE` columns."""
    found = Console(highlight=False, markup=False)
    width = min(WIDEST_LINE, found.width) if sys.stdout.isatty() else WIDEST_LINE
    return Console(width=width, highlight=False, markup=False, soft_wrap=False)
