"""Input files: finds them by patterns, cuts them into parts, and unpacks them.

gzip, zstd and parquet files are unpacked to lines of JSON; each row of a parquet file is one line.
"""

import glob
import gzip
import hashlib
import os
import select
import shutil
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from megatron_ext.errors import ConfigError, DataError

BLOCK_BYTES = 4 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
_OTHER_MAGIC = {b"BZh": "bzip2", b"\xfd7zX": "xz", b"PK\x03\x04": "zip"}
_ROWS = 1024
_LARGEST_PART = 256_000_000
_PARTS_PER_WORKER = 4
_END_BYTES = 1 << 16
_SECONDS_FOR_A_WRITER = 10.0


@dataclass(frozen=True)
class Part:
    """A piece of one input, which one worker encodes into one set of part files.

    A part is a whole packed file, or the lines between bytes ``start`` and ``end`` of a plain file.
    ``path`` is the file to read, such as the copy of a stream; ``source`` is shown to the user.
    """

    path: str
    source: str
    start: int
    end: int
    packing: str

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def expand(patterns: Sequence[str]) -> list[str]:
    """Return the files that paths and globs name; the files of one glob are sorted.

    Raise a DataError for a pattern without files, an unreadable file or a stream named twice.
    """
    files: list[str] = []
    for pattern in patterns:
        if pattern == "-":
            return ["-"]
        found = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else []
        found = [pattern] if os.path.exists(pattern) else found
        found = [path for path in found if not os.path.isdir(path)]
        if not found:
            raise DataError(f"`--input` ({pattern}) matches no file; give jsonl files or a glob.")
        files.extend(found)
    streams: dict[tuple[int, int], str] = {}
    for path in files:
        if not os.access(path, os.R_OK):
            raise DataError(f"`--input` ({path}) cannot be read; check its permissions.")
        about = os.stat(path)
        other = streams.setdefault((about.st_dev, about.st_ino), path)
        if is_stream(path) and files.count(path) + (other != path) > 1:
            raise DataError(
                f"`--input` ({path}) names twice what can be read only once; name it once."
            )
    return files


def is_stream(path: str) -> bool:
    """Tell whether a file can be read only once: a pipe, a device or a socket."""
    return path == "-" or not stat.S_ISREG(os.stat(path).st_mode)


def identity_of(path: str) -> list[Any]:
    """Return values that differ if the file at a path was changed; those of a stream always differ.

    Size and modification time may survive a change (`rsync -t`, `touch -r`). Inode, change time
    (ctime) and a digest of both ends of the content are therefore included.
    """
    if is_stream(path):
        return [os.path.abspath(path), os.getpid(), time.time_ns()]
    with open(path, "rb") as stream:
        found = os.fstat(stream.fileno())
        digest = hashlib.sha256(stream.read(_END_BYTES))
        stream.seek(max(0, found.st_size - _END_BYTES))
        digest.update(stream.read(_END_BYTES))
    times = [found.st_mtime_ns, found.st_ctime_ns]
    return [os.path.abspath(path), found.st_size, *times, found.st_ino, digest.hexdigest()]


def needs_spool(files: Sequence[str], workers: int) -> list[str]:
    """Return the inputs to copy or unpack: streams, and packed files if workers outnumber files."""
    streams = [path for path in files if is_stream(path)]
    packed = [path for path in files if path not in streams and packing_of(path) != "plain"]
    return [*streams, *packed] if len(files) < workers else streams


def spool(source: str, target: Path) -> None:
    """Copy a stream, or unpack a file, to ``target``; raise a DataError for a damaged source."""
    temporary = target.with_suffix(".unpacking")
    with open(temporary, "wb") as out:
        if is_stream(source):
            _copy_stream(source, out)
        else:
            for piece, _ in unpacked(source, packing_of(source)):
                out.write(piece)
    os.replace(temporary, target)


def _copy_stream(source: str, out: BinaryIO) -> None:
    """Copy a stream to its end; standard input, which may be a socket, is read by descriptor 0."""
    standard = source == "-"
    with suppress(OSError):
        standard = standard or os.path.samestat(os.stat(source), os.fstat(0))
    try:
        # A pipe without a name, such as a shell's `<(command)`, never makes its reader wait.
        is_fifo = not standard and stat.S_ISFIFO(os.stat(source).st_mode)
        wait = is_fifo and os.path.exists(os.path.realpath(source))
        number = 0 if standard else os.open(source, os.O_RDONLY | (os.O_NONBLOCK if wait else 0))
        stream = os.fdopen(number, "rb", closefd=not standard)
    except OSError as error:
        raise DataError(
            f"`--input` ({source}) cannot be read ({error.strerror}); give a file or a pipe."
        ) from None
    with stream:
        if wait:
            out.write(_await_writer(source, number))
        shutil.copyfileobj(stream, out, BLOCK_BYTES)


def _await_writer(source: str, descriptor: int) -> bytes:
    """Wait until a program has opened a FIFO for writing; return the 0 or 1 bytes read meanwhile.

    Raise a DataError if no program has opened it after `_SECONDS_FOR_A_WRITER`.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    first = b""
    if not poll.poll(_SECONDS_FOR_A_WRITER * 1000):
        with suppress(BlockingIOError):  # a writer that has nothing to say yet
            first = os.read(descriptor, 1)
            if not first:
                raise DataError(
                    f"`--input` ({source}) is a FIFO that no program has opened for writing within "
                    f"{_SECONDS_FOR_A_WRITER:g} seconds; start the one that writes into it first."
                )
    os.set_blocking(descriptor, True)
    return first


def cut(
    files: Sequence[tuple[str, str]],
    workers: int,
    part_megabytes: float | None,
    smallest: int = 4_000_000,
) -> list[Part]:
    """Cut plain files at line ends into parts; a packed file is one part.

    ``files`` are (path, name to show). Without ``part_megabytes``, each worker gets about four
    parts, of at least ``smallest`` bytes.
    """
    sizes = [os.path.getsize(path) for path, _ in files]
    if part_megabytes is None:
        part_bytes = sum(sizes) // (workers * _PARTS_PER_WORKER)
        part_bytes = min(max(part_bytes, smallest), _LARGEST_PART)
    else:
        part_bytes = max(1, int(part_megabytes * 1_000_000))
    parts: list[Part] = []
    for (path, source), size in zip(files, sizes, strict=True):
        packing = packing_of(path)
        edges = _line_edges(path, size, part_bytes) if packing == "plain" else [0, size]
        parts += [Part(path, source, *span, packing) for span in pairwise(edges)]
    return parts


def _line_edges(path: str, size: int, part_bytes: int) -> list[int]:
    edges = [0]
    with open(path, "rb") as stream:
        while edges[-1] + part_bytes < size:
            stream.seek(edges[-1] + part_bytes - 1)
            while True:
                piece = stream.readline(BLOCK_BYTES)
                if not piece or piece.endswith(b"\n"):
                    break
            edges.append(stream.tell())
    if edges[-1] < size:
        edges.append(size)
    return edges


def blocks(part: Part) -> Iterator[tuple[bytes, int]]:
    """Yield (whole lines of about 4 MB, input bytes read); raise a DataError for a damaged file."""
    rest: list[bytes] = []
    seen = 0
    pieces = _plain(part) if part.packing == "plain" else unpacked(part.path, part.packing)
    for piece, read in pieces:
        seen += read
        at = piece.rfind(b"\n") + 1
        if at == 0:
            rest.append(piece)
            continue
        yield b"".join([*rest, piece[:at]]), seen
        rest, seen = [piece[at:]] if at < len(piece) else [], 0
    if rest:
        yield b"".join(rest), seen


def _plain(part: Part) -> Iterator[tuple[bytes, int]]:
    with open(part.path, "rb", buffering=0) as stream:
        stream.seek(part.start)
        left = part.num_bytes
        while left > 0:
            piece = stream.read(min(BLOCK_BYTES, left))
            if not piece:
                raise DataError(
                    f"{part.source} became shorter while it was read; leave the input alone "
                    "during the run and start again."
                )
            left -= len(piece)
            yield piece, len(piece)


def packing_of(path: str) -> str:
    """Return gzip, zstd, parquet or plain for a file; raise a DataError for bzip2, xz and zip."""
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
    """Yield (unpacked bytes, number of packed bytes read for them)."""
    if packing == "parquet":
        yield from _json_lines(path)
        return
    before = 0
    with open(path, "rb") as raw:
        whole = partial(gzip.GzipFile(fileobj=raw).read, BLOCK_BYTES)
        stream = iter(whole, b"") if packing == "gzip" else _zstd(raw, path)
        try:
            for piece in stream:
                now = raw.tell()
                yield piece, now - before
                before = now
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(
                f"{path} is not a whole {packing} file ({error}); copy it again."
            ) from None


def _zstd(raw: BinaryIO, path: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"`--input` ({path}) is packed with zstd, which needs the zstandard package; install "
            "it, or unpack the file."
        ) from None
    fresh, window = True, None
    pending, size = [], 0
    while piece := raw.read(1 << 16):
        while piece:
            if window is None or window.eof:
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
    """Yield (JSON lines of some parquet rows, estimated number of file bytes read for them)."""
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
    """Return a row as a line of JSON, without null fields in structs; a bytes value becomes null.

    In parquet every struct has the keys of all rows, and missing ones are null.
    """
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
