"""Finds input files by patterns, cuts them into parts, and reads parts as lines of JSON.

Each row of a parquet or Arrow file becomes a line, and so does each file of a folder of texts.
"""

import glob
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from megatron_ext.disk.writing import open_new
from megatron_ext.errors import DataError
from megatron_ext.text.preprocess import folders, long_lines
from megatron_ext.text.preprocess.long_lines import LongLine
from megatron_ext.text.preprocess.packed import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    copy_stream,
    is_stream,
    packing_of,
    unpacked,
)
from megatron_ext.text.preprocess.tables import group_sizes, is_table, rows_of

_LARGEST_PART = 256_000_000
_PARTS_PER_WORKER = 4
_END_BYTES = 1 << 16
_LINES = ("plain", "array")
_UNITS = {
    "plain": "bytes",
    "array": "bytes of its items",
    "texts": "bytes of the list of its files",
}


@dataclass(frozen=True)
class Part:
    """A piece of one input, which one worker encodes into one set of part files.

    Attributes:
        path: the file to read. It may be a file made from the input: the copy of a stream, the list
            of a folder's texts, or the items of a JSON array, one per line.
        source: the input as the user named it.
        start, end: the range of the file. For a plain file or a list of texts, these are bytes at
            ends of lines; for a table, indices of row groups or record batches; for a packed file,
            0 and the size of the file.
        packing: the kind of the file, as `packing_of` returns it, or "array" for JSON array items.
        num_bytes: the part's share of the input's bytes, to show progress.
        columns: the columns of a table that are read, or the key for the texts of a folder; None
            reads all columns.
    """

    path: str
    source: str
    start: int
    end: int
    packing: str
    num_bytes: int
    columns: Sequence[str] | None = None

    def __str__(self) -> str:
        """Return the input and the range of this part as text for messages."""
        unit = _UNITS.get(self.packing, "groups" if is_table(self.packing) else "bytes")
        return f"{self.source}, {unit} {self.start} to {self.end}"

    def is_there(self) -> bool:
        """Tell whether the file still exists, and is long enough if the range is in bytes."""
        if self.packing in _UNITS:
            return os.path.getsize(self.path) >= self.end
        return os.path.exists(self.path)


@dataclass(frozen=True)
class Source:
    """An input to cut into parts: its path, its name in messages, and the kind of its file."""

    path: str
    shown: str
    packing: str


def expand(patterns: Sequence[str]) -> list[str]:
    """Return the input files that the patterns name, in the order of the patterns.

    A pattern is a file, a folder, a glob, or "-" for standard input. Matches of a glob are sorted;
    it matches folders only if it ends in a slash. A folder gives the files of `files_of`. Raise a
    DataError for a pattern without matches, for an unreadable file, and for a stream that is named
    twice.
    """
    files: list[str] = []
    for pattern in patterns:
        if pattern == "-":
            return ["-"]
        paths = [pattern] if os.path.exists(pattern) else []
        if not paths and glob.has_magic(pattern):
            paths = sorted(glob.glob(pattern, recursive=True))
            if not pattern.endswith("/"):
                paths = [path for path in paths if not os.path.isdir(path)]
        if not paths:
            raise DataError(
                f"`--input` ({pattern}) matches no file; give files, a glob or a folder."
            )
        for path in paths:
            files += folders.files_of(path.rstrip("/") or "/") if os.path.isdir(path) else [path]
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


def identity_of(path: str) -> list[Any]:
    """Return values that change whenever the content of an input changes.

    Size and modification time can stay the same through a change (`rsync -t`, `touch -r`). So the
    values include the inode, the change time (ctime) and a digest of the first and last bytes. For
    a stream, each call returns other values.
    """
    if is_stream(path):
        return [os.path.abspath(path), os.getpid(), time.time_ns()]
    if os.path.isdir(path):
        return [os.path.abspath(path), folders.identity_of_texts(path)]
    with open(path, "rb") as stream:
        status = os.fstat(stream.fileno())
        digest = hashlib.sha256(stream.read(_END_BYTES))
        stream.seek(max(0, status.st_size - _END_BYTES))
        digest.update(stream.read(_END_BYTES))
    times = [status.st_mtime_ns, status.st_ctime_ns]
    return [os.path.abspath(path), status.st_size, *times, status.st_ino, digest.hexdigest()]


def needs_spool(
    files: Sequence[str], workers: int, columns: Sequence[str] | None = None
) -> list[str]:
    """Return the inputs that `spool` must copy or unpack before they can be cut into parts.

    All streams must be copied. If there are more workers than files, files that cannot be cut are
    unpacked too: packed files, and tables with a single row group or record batch. ``columns`` are
    the columns of tables that will be read; None means all.
    """
    streams = [path for path in files if is_stream(path)]
    if len(files) >= workers:
        return streams
    packed = [path for path in files if path not in streams and _is_one_piece(path, columns)]
    return [*streams, *packed]


def _is_one_piece(path: str, columns: Sequence[str] | None) -> bool:
    packing = packing_of(path)
    if is_table(packing):
        return len(group_sizes(path, packing, columns)) == 1
    return packing in ("gzip", "zstd")


def spool(source: str, target: Path, columns: Sequence[str] | None) -> None:
    """Copy a stream, or write the lines of a packed file or of a table, to the file ``target``.

    ``columns`` are the columns of a table to read; None reads all. Raise a DataError if ``source``
    is damaged.
    """
    temporary = target.with_suffix(".unpacking")
    with open_new(temporary, "wb") as out:
        if is_stream(source):
            copy_stream(source, out)
        else:
            for piece, _ in _pieces(_whole(source, columns)):
                out.write(piece)
    os.replace(temporary, target)


def _whole(path: str, columns: Sequence[str] | None) -> Part:
    """Return one part that has the whole file at ``path``."""
    size = os.path.getsize(path)
    packing = packing_of(path)
    end = len(group_sizes(path, packing, columns)) if is_table(packing) else size
    return Part(path, path, 0, end, packing, size, columns)


def cut(
    sources: Sequence[Source],
    workers: int,
    part_megabytes: float | None,
    smallest: int = 4_000_000,
    columns: Sequence[str] | None = None,
) -> list[Part]:
    """Cut inputs into parts: text at line ends, tables between row groups or record batches.

    Packed files stay whole. A part has about ``part_megabytes`` MB. If that is None, each worker
    gets about four parts, but a part has about ``smallest`` bytes at least, and `_LARGEST_PART` at
    most. ``columns`` are the columns of tables to read; None means all.
    """
    total = sum(map(_size, sources))
    if part_megabytes is None:
        part_bytes = total // (workers * _PARTS_PER_WORKER)
        part_bytes = min(max(part_bytes, smallest), _LARGEST_PART)
    else:
        part_bytes = max(1, int(part_megabytes * 1_000_000))
    return [
        Part(source.path, source.shown, start, end, source.packing, size, columns)
        for source in sources
        for start, end, size in _spans(source, part_bytes, columns)
    ]


def _size(source: Source) -> int:
    if source.packing == "texts":
        return sum(size for _, _, size in folders.list_spans(source.path, 1))
    return os.path.getsize(source.path)


def _spans(
    source: Source, part_bytes: int, columns: Sequence[str] | None
) -> Iterator[tuple[int, int, int]]:
    """Cut a source into parts; yield (start, end, number of input bytes) of each part.

    Start and end are in the units that `Part` has for this kind of source. A part has about
    ``part_bytes`` bytes; a packed file is one part.
    """
    if source.packing == "texts":
        yield from folders.list_spans(source.path, part_bytes)
    elif source.packing in _LINES:
        size = os.path.getsize(source.path)
        for start, end in pairwise(_line_edges(source.path, size, part_bytes)):
            yield start, end, end - start
    elif is_table(source.packing):
        start = size = 0
        sizes = group_sizes(source.path, source.packing, columns)
        for end, more in enumerate(sizes, 1):
            size += more
            if size >= part_bytes or end == len(sizes):
                yield start, end, size
                start = end
                size = 0
    else:
        yield 0, os.path.getsize(source.path), os.path.getsize(source.path)


def _line_edges(path: str, size: int, part_bytes: int) -> list[int]:
    """Return the bytes at which the parts of a file begin and end.

    They are 0, ends of lines about ``part_bytes`` apart, and the size of the file.
    """
    edges = [0]
    with open(path, "rb") as stream:
        while edges[-1] + part_bytes < size:
            # One byte earlier, so that a line end at exactly this place ends the part.
            stream.seek(edges[-1] + part_bytes - 1)
            while True:
                piece = stream.readline(BLOCK_BYTES)
                if not piece or piece.endswith(b"\n"):
                    break
            edges.append(stream.tell())
    if edges[-1] < size:
        edges.append(size)
    return edges


def blocks(part: Part) -> Iterator[tuple[bytes | LongLine, int]]:
    """Yield (whole lines of about 4 MB, number of input bytes read for them) of a part.

    A long line of a plain file is not read: its place is yielded instead.

    Raises:
        DataError: the file is damaged, or a line is longer than `MAX_LINE_BYTES` unpacked.
    """
    if part.packing == "plain":
        yield from _plain_blocks(part)
        return
    rest: list[bytes] = []
    num_read = length = 0
    for number, (piece, read) in enumerate(_pieces(part)):
        num_read += read
        line_end = piece.rfind(b"\n") + 1
        # A few bytes of a packed file can unpack to an endless line, so its lines have a limit.
        if length and length + len(piece) > MAX_LINE_BYTES:
            end = piece.find(b"\n") if line_end else len(piece)
            if length + end > MAX_LINE_BYTES:
                raise _too_long(part, number)
        if line_end == 0:
            rest.append(piece)
            length += len(piece)
            continue
        rest.append(piece[:line_end])
        yield _joined(rest), num_read
        rest = [piece[line_end:]] if line_end < len(piece) else []
        num_read = 0
        length = len(piece) - line_end
    if rest:
        yield _joined(rest), num_read


def _plain_blocks(part: Part) -> Iterator[tuple[bytes | LongLine, int]]:
    rest: list[bytes] = []
    num_read = length = 0
    begin = at = part.start  # where the line begins whose end is not read yet, and what is read
    for piece, read in _plain(part):
        num_read += read
        at += read
        if length > long_lines.LONG_LINE_BYTES:
            end = piece.find(b"\n") + 1
            if not end:
                continue
            yield LongLine(begin, at - len(piece) + end - 1, part.path), num_read
            num_read = length = 0
            piece = piece[end:]
            begin = at - len(piece)
        line_end = piece.rfind(b"\n") + 1
        if line_end:
            rest.append(piece[:line_end])
            yield _joined(rest), num_read
            num_read = length = 0
            piece = piece[line_end:]
            begin = at - len(piece)
        if piece:
            rest.append(piece)
            length += len(piece)
        if length > long_lines.LONG_LINE_BYTES:
            rest.clear()
    if length > long_lines.LONG_LINE_BYTES:
        yield LongLine(begin, at, part.path), num_read
    elif rest:
        yield _joined(rest), num_read


def _joined(pieces: list[bytes]) -> bytes:
    """Join ``pieces`` and empty the list, so that a long line is not kept twice."""
    joined = b"".join(pieces)
    pieces.clear()
    return joined


def _too_long(part: Part, number: int) -> DataError:
    """Return an error that names a line of a part that is longer than `MAX_LINE_BYTES`.

    ``number`` is the index of a piece, among those that `_pieces` yields for the part, in which
    the line passes the limit.
    """
    line = sum(piece.count(b"\n") for piece, _ in islice(_pieces(part), number))
    path, line = place_of(part, line)
    return DataError(
        f"{path} has more than {MAX_LINE_BYTES:,} bytes in line {line}, which is the longest line "
        "that is read; cut that document, or take it out."
    )


def is_end_of_input(part: Part) -> bool:
    """Tell whether only white space follows a part in its input."""
    if part.packing not in _LINES:
        return True
    with open(part.path, "rb") as stream:
        stream.seek(part.end)
        while piece := stream.read(BLOCK_BYTES):
            if piece.strip():
                return False
    return True


def _pieces(part: Part) -> Iterator[tuple[bytes, int]]:
    """Yield (unpacked bytes, number of input bytes read for them) for each piece of a part.

    A piece may end within a line.
    """
    if part.packing in _LINES:
        yield from _plain(part)
    elif part.packing == "texts":
        paths = folders.paths_in_list(part.path, part.start, part.end)
        yield from folders.text_lines(paths, folders.key_of_texts(part.source, part.columns))
    elif is_table(part.packing):
        given = 0
        rows = rows_of(part.path, part.packing, part.start, part.end, part.columns)
        for lines, share in rows:
            read = int(part.num_bytes * share) - given
            given += read
            yield lines, read
    else:
        yield from unpacked(part.path, part.packing)


def place_of(part: Part, line: int, before: int | None = None) -> tuple[str, int]:
    """Return the file of a line, and the line's number in that file, counted from 1.

    ``line`` is the index of the line in the part, from 0. ``before`` is the number of lines in the
    earlier parts of the same input; if it is None, count them.
    """
    if part.packing == "texts":
        return folders.paths_in_list(part.path, part.start, part.end)[line], 1
    if before is None:
        ahead = replace(part, start=0, end=part.start)
        before = sum(map(_num_lines, blocks(ahead))) if part.start else 0
    return part.source, before + line + 1


def _num_lines(block_and_read: tuple[bytes | LongLine, int]) -> int:
    """Return the number of lines in a block of `blocks`."""
    block, _ = block_and_read
    return 1 if isinstance(block, LongLine) else block.count(b"\n")


def _plain(part: Part) -> Iterator[tuple[bytes, int]]:
    with open(part.path, "rb", buffering=0) as stream:
        stream.seek(part.start)
        left = part.end - part.start
        while left > 0:
            piece = stream.read(min(BLOCK_BYTES, left))
            if not piece:
                raise DataError(
                    f"{part.source} became shorter while it was read; leave the input alone "
                    "during the run and start again."
                )
            left -= len(piece)
            yield piece, len(piece)
