"""Reads the rows of lists of clips: csv, tsv, json, jsonl and parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import (
    MAX_LINE_BYTES,
    UnreadableFile,
    lines_of,
    open_regular,
    parse_json,
    read_bytes,
)
from megatron_ext.errors import ConfigError, DataError

PATHS = ("path", "file_name", "video")
CAPTIONS = ("text", "caption", "prompt")
SCORES = ("motion", "motion_score")
"""The names that a column of motion scores may have.

Of several such columns, the first with a value in a row is taken."""
KNOWN = (
    f"{', '.join(PATHS[:-1])} or {PATHS[-1]}, with {', '.join(CAPTIONS[:-1])} or {CAPTIONS[-1]}, "
    f"and, if wanted, fps and {' or '.join(SCORES)}"
)
_TABLES = {".csv": ",;\t|", ".tsv": "\t"}
"""Suffixes of text tables, and the delimiters that they may have."""
_MARK = b"\xef\xbb\xbf"
"""The byte-order mark of UTF-8, which spreadsheets write."""


def rows_of(source: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for each row of a list; the place is text such as "line 3" for errors.

    Raises:
        UnreadableFile: the list cannot be read.
        DataError: a row cannot be read, or `check_columns` finds a fault in a table.
        ConfigError: the list is a parquet file, and pyarrow is missing.
    """
    suffix = source.suffix.lower()
    if suffix in _TABLES:
        return _table_rows(source, _TABLES[suffix])
    with open_regular(source) as stream:
        head = stream.read(64)
    if head.startswith(b"PAR1") or suffix == ".parquet":
        return _parquet_rows(source)
    if head.removeprefix(_MARK).lstrip().startswith(b"["):
        return _items(source)
    return _json_rows(source)


def bad_row(source: Path, place: str, what: str) -> DataError:
    """Return an error that says why the row at ``place`` of a list cannot be used.

    ``what`` is the reason, as the predicate of the sentence, such as "has no path".
    """
    return DataError(f"{source} {place} {what}; mend the row or take it out.")


def check_columns(source: Path, columns: Sequence[str], where: str = "") -> None:
    """Raise DataError if a table lacks a column of paths or captions, or has a column twice.

    ``where`` is added to the message and says where the columns are named, such as " in its first
    line".
    """
    for name in {*PATHS, *CAPTIONS, *SCORES, "fps"}:
        if list(columns).count(name) > 1:
            raise DataError(
                f"{source} has the column `{name}` {list(columns).count(name)} times{where}; "
                "rename all but one."
            )
    if not (set(PATHS) & set(columns) and set(CAPTIONS) & set(columns)):
        raise DataError(
            f"{source} has the columns {', '.join(map(str, columns))}{where}, but needs {KNOWN}; "
            "rename them."
        )


def _json_rows(source: Path) -> Iterator[tuple[str, Any]]:
    for number, text in enumerate(lines_of(source), 1):
        line = f"line {number}"
        if text is None:
            raise bad_row(source, line, f"has more than {MAX_LINE_BYTES:,} bytes")
        text = text.removeprefix(_MARK) if number == 1 else text
        if not text.strip():
            continue
        try:
            row = parse_json(text, source, not_finite=True)
        except UnreadableFile as error:
            raise bad_row(source, line, f"is no JSON ({error.reason})") from None
        yield line, row


def _items(source: Path) -> Iterator[tuple[str, Any]]:
    items = parse_json(read_bytes(source), source, not_finite=True)
    return ((f"item {number}", item) for number, item in enumerate(items, 1))


def _table_rows(source: Path, delimiters: str) -> Iterator[tuple[str, Any]]:
    with open(source, encoding="utf-8-sig", newline="") as stream:
        first = stream.readline()
        if not first.strip():
            return
        delimiter = _delimiter(source, first, delimiters)
        # Without `strict`, an unclosed quote would silently swallow the following rows.
        reader = csv.DictReader(chain([first], stream), delimiter=delimiter, strict=True)
        begin = 1
        try:
            check_columns(source, reader.fieldnames or (), " in its first line")
            begin = reader.line_num + 1
            for row in reader:
                line = f"line {reader.line_num}"
                if None in row:
                    extra = f"has {len(row[None])} cells more than the first line"
                    raise bad_row(source, line, extra)
                yield line, row
                begin = reader.line_num + 1
        except csv.Error as error:
            what = f"is no csv ({error}); a quote in a cell in quotes is written twice"
            raise bad_row(source, f"line {begin}", what) from None


def _delimiter(source: Path, first: str, delimiters: str) -> str:
    """Return the delimiter that splits the header of a list into the most known column names.

    ``first`` is the header, the first line of ``source``; ``delimiters`` are the candidates.
    """
    headings = {*PATHS, *CAPTIONS, *SCORES, "fps"}

    def columns(delimiter: str) -> tuple[int, int]:
        try:
            names = next(csv.reader([first], delimiter=delimiter))
        except csv.Error as error:
            raise bad_row(source, "line 1", f"is no csv ({error})") from None
        return len(headings & set(names)), len(names)

    return max(delimiters, key=columns)


def _parquet_rows(source: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"The list {source} is a parquet file, which needs the package pyarrow, which is not "
            "installed; run `pip install pyarrow`, or give a csv or jsonl."
        ) from None
    try:
        with parquet.ParquetFile(source) as file:
            check_columns(source, file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UnreadableFile(source, f"it is no whole parquet file: {reason}") from None
