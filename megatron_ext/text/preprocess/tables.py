"""Reads parquet and Arrow files as lines of JSON, one for each row.

A parquet file is read by row groups, an Arrow file by record batches; here both are called groups.
Only the columns that are needed are read. Arrow files, as `pyarrow.ipc` and Hugging Face's
`save_to_disk` write them, may be in the file format or the stream format, and are memory-mapped.

A row becomes what a line of jsonl would hold. Maps become objects. A text in a column of Arrow's
type json becomes the value that it spells; the datasets library writes such columns for objects
with different keys.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import orjson

from megatron_ext.errors import ConfigError, DataError

_ROWS = 1024
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
_LENGTH_OF_REASON = 160


def is_table(packing: str) -> bool:
    """Tell whether a file of the kind ``packing`` is a table, which this module reads."""
    return packing == "parquet" or packing.startswith("arrow")


@contextmanager
def _readable(path: str, packing: str) -> Iterator[None]:
    """Turn errors of pyarrow within a ``with`` block into a DataError about the file ``path``.

    ``packing`` is "parquet", "arrow file" or "arrow stream". If pyarrow is not installed, raise a
    ConfigError.
    """
    kind = packing.split()[0].replace("arrow", "Arrow")
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            f"`--input` ({path}) is a file of the kind {kind}, which needs the package pyarrow, "
            "which is not installed; run `pip install pyarrow`."
        ) from None
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:_LENGTH_OF_REASON]
        raise DataError(f"{path} is not a whole {kind} file ({reason}); copy it again.") from None


def group_sizes(path: str, packing: str, columns: Sequence[str] | None) -> list[int]:
    """Return the approximate bytes of each row group (parquet) or record batch (Arrow) of a table.

    They add up to about the size of the file. ``packing`` is the kind of the file (`packing_of`).
    Raise a ConfigError if the table lacks one of ``columns``, and a DataError if two columns that
    are read (all, if ``columns`` is None) have the same name.
    """
    with _readable(path, packing):
        if packing == "parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                about = file.metadata
                _check_columns(path, file.schema_arrow.names, columns)
                groups = [about.row_group(i) for i in range(about.num_row_groups)]
            weights = [
                sum(group.column(c).total_compressed_size for c in range(group.num_columns))
                for group in groups
            ]
        else:
            with _batches(path, packing) as (names, batches):
                _check_columns(path, names, columns)
                weights = [batch.num_rows for batch in batches]
        size = os.path.getsize(path)
        total = max(1, sum(weights))
    return [size * weight // total for weight in weights]


def unread_columns(path: str, packing: str, columns: Sequence[str] | None) -> list[str]:
    """Return a table's columns that are not among ``columns``; [] for files of other kinds.

    If ``columns`` is None, all columns are read, and the result is [].
    """
    if columns is None or not is_table(packing):
        return []
    with _readable(path, packing):
        if packing == "parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
        else:
            with _batches(path, packing) as (names, _):
                pass
    return [name for name in dict.fromkeys(names) if name not in columns]


def _check_columns(path: str, names: Sequence[str], columns: Sequence[str] | None) -> None:
    missing = [column for column in columns or () if column not in names]
    if missing:
        raise ConfigError(
            f"`--json-keys` ({' '.join(missing)}) names no column of {path}, whose columns are "
            f"{', '.join(names)}; give those that hold texts."
        )
    twice = next((name for name in columns or names if list(names).count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"{path} has {list(names).count(twice)} columns of the name {twice}, so that it is not "
            "known which one is meant; rename them."
        )


@contextmanager
def _batches(path: str, packing: str) -> Iterator[tuple[Sequence[str], Iterator[Any]]]:
    """Open an Arrow file; yield the names of its columns, and an iterator of its record batches."""
    import pyarrow

    with pyarrow.memory_map(path) as source:
        if packing == "arrow stream":
            with pyarrow.ipc.open_stream(source) as reader:
                yield reader.schema.names, iter(reader)
        else:
            with pyarrow.ipc.open_file(source) as reader:
                numbers = range(reader.num_record_batches)
                yield reader.schema.names, map(reader.get_batch, numbers)


def rows_of(
    path: str, packing: str, start: int, end: int, columns: Sequence[str] | None
) -> Iterator[tuple[bytes, float]]:
    """Read a range of a table; yield (some rows as lines of JSON, share of the range read so far).

    The range counts row groups (parquet) or record batches (Arrow), from ``start`` up to but not
    including ``end``. ``packing`` is the kind of the file (`packing_of`). If ``columns`` is None,
    the lines have all columns.
    """
    chosen = None if columns is None else list(columns)
    with _readable(path, packing):
        if packing == "parquet":
            yield from _parquet_rows(path, range(start, end), chosen)
            return
        with _batches(path, packing) as (_, batches):
            for number, batch in enumerate(islice(batches, start, end)):
                batch = batch if chosen is None else batch.select(chosen)
                for first in range(0, batch.num_rows, _ROWS):
                    within = min(1.0, (first + _ROWS) / batch.num_rows)
                    yield _lines(batch.slice(first, _ROWS)), (number + within) / (end - start)


def _parquet_rows(
    path: str, groups: range, columns: list[str] | None
) -> Iterator[tuple[bytes, float]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        total = sum(file.metadata.row_group(i).num_rows for i in groups)
        done = 0
        for batch in file.iter_batches(_ROWS, groups, columns):
            done += batch.num_rows
            yield _lines(batch), done / total


def _lines(batch: Any) -> bytes:
    """Return the rows of a record batch as lines of JSON.

    A row with a text that is not UTF-8, or with no JSON in a column of the type json, becomes a bad
    line. It is refused later, with its number, like a bad line of a text file.
    """
    try:
        rows = batch.to_pylist()
        if convert := _converters(batch.schema):
            rows = [_convert_members(convert, row) for row in rows]
        return b"".join(map(_line, rows))
    except orjson.JSONDecodeError:
        if batch.num_rows == 1:
            return b"a column of the type json holds no JSON\n"
        return b"".join(_lines(batch.slice(row, 1)) for row in range(batch.num_rows))
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return bytes(error.object).replace(b"\n", b" ") + b"\n"
        return b"".join(_lines(batch.slice(row, 1)) for row in range(batch.num_rows))


def _line(row: dict[str, Any]) -> bytes:
    """Return a row as a line of JSON.

    Null fields of structs are left out: in parquet every struct has the keys of all rows, and a key
    that a row lacks is null there. JSON has no bytes, so a value of n bytes becomes
    ``{"bytes": n}``.
    """
    plain = {column: _without_nulls(value) for column, value in row.items()}
    return orjson.dumps(plain, default=_otherwise, option=_OPTIONS)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _otherwise(value: Any) -> Any:
    return {"bytes": len(value)} if isinstance(value, bytes) else str(value)


Convert = Callable[[Any], Any]
"""A function from a value of pyarrow to the value that a line of jsonl would hold."""


def _converters(schema: Any) -> dict[str, Convert]:
    """Return conversion functions for values of columns, by name of the column.

    Columns whose values need no conversion are left out.
    """
    converters = {field.name: _converter(field) for field in schema}
    return {name: convert for name, convert in converters.items() if convert is not None}


def _converter(field: Any) -> Convert | None:
    """Return a function that converts the values of an Arrow field.

    Return None if they need no conversion.
    """
    import pyarrow

    kind = field.type
    metadata = field.metadata or {}
    name = getattr(kind, "extension_name", None) or metadata.get(_EXTENSION, b"").decode()
    if name == "arrow.json":
        return _from_json
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if pyarrow.types.is_dictionary(kind):
        return _converter(pyarrow.field("", kind.value_type))
    if pyarrow.types.is_map(kind):
        of_values = _converter(kind.item_field)
        return lambda pairs: {
            key: value if of_values is None or value is None else of_values(value)
            for key, value in pairs
        }
    if pyarrow.types.is_struct(kind):
        members = _converters([kind.field(i) for i in range(kind.num_fields)])
        return partial(_convert_members, members) if members else None
    if _is_list(kind):
        of_items = _converter(kind.value_field)
        if of_items is not None:
            return lambda items: [x if x is None else of_items(x) for x in items]
    return None


_EXTENSION = b"ARROW:extension:name"


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    names = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    checks = (getattr(types, f"is_{name}", None) for name in names)  # pyarrow 16 lacks the views
    return any(check is not None and check(kind) for check in checks)


def _convert_members(members: Mapping[str, Convert], value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: members[key](item) if key in members and item is not None else item
        for key, item in value.items()
    }


def _from_json(text: str) -> Any:
    """Return the value of a JSON text; raise a ValueError if the text is not JSON."""
    return orjson.loads(text)
