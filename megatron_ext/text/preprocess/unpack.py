"""Packed inputs as lines of JSON: gzip, zstd, and parquet, whose rows become lines."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson

from megatron_ext.errors import ConfigError, DataError

BLOCK_BYTES = 4 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
_OTHER_MAGIC = {b"BZh": "bzip2", b"\xfd7zX": "xz", b"PK\x03\x04": "zip"}
_ROWS = 1024


def packing_of(path: str) -> str:
    """Return how a file is packed, by its first bytes: gzip, zstd, parquet, or else plain.

    Raises:
        DataError: another packed format.
    """
    with open(path, "rb") as stream:
        head = stream.read(4)
    for magic, name in _OTHER_MAGIC.items():
        if head.startswith(magic):
            raise DataError(
                f"`--input` ({path}) is a {name} file; give jsonl, plain or packed with gzip or "
                "zstd, or parquet."
            )
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "plain")


def unpacked(path: str, packing: str) -> Iterator[tuple[bytes, int]]:
    """Yield (unpacked bytes, packed bytes read for them)."""
    if packing == "parquet":
        yield from _json_lines(path)
        return
    before = 0
    with open(path, "rb") as raw:
        stream = _gzip(raw) if packing == "gzip" else _zstd(raw, path)
        try:
            for piece in stream:
                now = raw.tell()
                yield piece, now - before
                before = now
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(
                f"{path} is not a whole {packing} file ({error}); copy it again."
            ) from None


def _gzip(raw: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as stream:
        while piece := stream.read(BLOCK_BYTES):
            yield piece


def _zstd(raw: BinaryIO, path: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"`--input` ({path}) is packed with zstd, which needs the zstandard package; install "
            "it, or unpack the file."
        ) from None
    window: Any = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    fresh = True
    pending, size = [], 0
    while piece := raw.read(1 << 16):
        while piece:
            if window.eof:
                window = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                out = window.decompress(piece)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            fresh, piece = window.eof, window.unused_data if window.eof else b""
            pending.append(out)
            size += len(out)
            if size >= BLOCK_BYTES:
                yield b"".join(pending)
                pending, size = [], 0
    if not fresh:
        raise EOFError("it ends inside a frame")
    if pending:
        yield b"".join(pending)


def _json_lines(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield (lines of JSON, one for each row; bytes of the file that they stand for).

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
