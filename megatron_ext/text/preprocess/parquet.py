"""Parquet files as lines of JSON, so that all that follows reads one kind of input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import orjson

from megatron_ext.errors import ConfigError, DataError

_ROWS = 1024


def json_lines(path: str) -> Iterator[tuple[bytes, int]]:
    """Yields (lines of JSON, one for each row; bytes of the file that they stand for).

    Parquet gives every struct the keys of all rows and fills those that a row lacks with null;
    they are left out again, but for the columns themselves. Bytes become null, which JSON has.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"{path} is a parquet file, which needs the package pyarrow, which is not installed; "
            "run `pip install pyarrow`."
        ) from None
    size, given = os.path.getsize(path), 0
    try:
        with parquet.ParquetFile(path) as file:
            total, rows = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=_ROWS):
                rows += batch.num_rows
                lines = b"".join(map(_line, batch.to_pylist()))
                read = size * rows // total - given
                given += read
                yield lines, read
    except (arrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DataError(f"{path} is not a whole parquet file ({reason}); copy it again.") from None


def _line(row: dict[str, Any]) -> bytes:
    plain = {column: _without_nulls(value) for column, value in row.items()}
    return orjson.dumps(plain, default=_otherwise, option=orjson.OPT_APPEND_NEWLINE)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _otherwise(value: Any) -> str | None:
    return None if isinstance(value, bytes) else str(value)
