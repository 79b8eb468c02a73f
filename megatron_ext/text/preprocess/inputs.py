"""Input files: what the patterns name, how they are packed, and how they are cut into parts."""

from __future__ import annotations

import glob
import hashlib
import os
import select
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ext.errors import DataError
from megatron_ext.text.preprocess.unpack import BLOCK_BYTES, packing_of, unpacked

_LARGEST_PART = 256_000_000
_PARTS_PER_WORKER = 4
_END_BYTES = 1 << 16
_SECONDS_FOR_A_WRITER = 10.0


@dataclass(frozen=True)
class Part:
    """A piece of one input that one worker turns into one set of part files.

    Attributes:
        path: the file to read; a spooled copy for streams and lone packed files.
        source: the name to show to the user.
        start, end: byte range at line ends; the whole file when it is packed.
        packing: `plain`, `gzip`, `zstd` or `parquet`.
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
    """Return the files that paths and globs name, in the given order, globs sorted.

    Raises:
        DataError: a pattern matches nothing, or a file cannot be read.
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
    """Tell whether a file can be read only once, as a pipe, a device or a socket."""
    return path == "-" or not stat.S_ISREG(os.stat(path).st_mode)


def identities(files: Sequence[str]) -> list[list[Any]]:
    """Return what tells files from others under their names; a stream is never the same again.

    Size and modification time can be kept over a change (`rsync -t`, `touch -r`), so the inode,
    the time of its last change and both ends of the content count as well.
    """
    return [
        [os.path.abspath(path), os.getpid(), time.time_ns()] if is_stream(path) else _identity(path)
        for path in files
    ]


def _identity(path: str) -> list[Any]:
    with open(path, "rb") as stream:
        found = os.fstat(stream.fileno())
        digest = hashlib.sha256(stream.read(_END_BYTES))
        stream.seek(max(0, found.st_size - _END_BYTES))
        digest.update(stream.read(_END_BYTES))
    times = [found.st_mtime_ns, found.st_ctime_ns]
    return [os.path.abspath(path), found.st_size, *times, found.st_ino, digest.hexdigest()]


def needs_spool(files: Sequence[str], workers: int) -> list[str]:
    """Return the inputs to copy first: streams, and packed files too few for all workers."""
    streams = [path for path in files if is_stream(path)]
    packed = [path for path in files if path not in streams and packing_of(path) != "plain"]
    return [*streams, *packed] if len(files) < workers else streams


def spool(source: str, target: Path) -> None:
    """Copy a stream, or a packed file unpacked, to a file, under a temporary name first.

    Raises:
        DataError: the source is damaged or cannot be read, or a FIFO has no writer.
    """
    temporary = target.with_suffix(".unpacking")
    with open(temporary, "wb") as out:
        if is_stream(source):
            _copy_stream(source, out)
        else:
            for piece, _ in unpacked(source, packing_of(source)):
                out.write(piece)
    os.replace(temporary, target)


def _copy_stream(source: str, out: BinaryIO) -> None:
    """Copy all that a stream gives.

    Standard input is read by its descriptor, since a socket cannot be opened by its name.
    """
    standard = source == "-" or _is_standard_input(source)
    try:
        # A pipe without a name, such as a shell's `<(command)`, never makes its reader wait.
        wait = not standard and _is_fifo(source) and os.path.exists(os.path.realpath(source))
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


def _is_fifo(path: str) -> bool:
    return stat.S_ISFIFO(os.stat(path).st_mode)


def _is_standard_input(path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(0))
    except OSError:
        return False


def _await_writer(source: str, descriptor: int) -> bytes:
    """Wait until a program has opened a FIFO for writing; return what was read meanwhile.

    Raises:
        DataError: no program does within a few seconds.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    first = b""
    if not poll.poll(_SECONDS_FOR_A_WRITER * 1000):
        try:
            first = os.read(descriptor, 1)
        except BlockingIOError:  # a writer that has nothing to say yet
            os.set_blocking(descriptor, True)
            return b""
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

    Args:
        files: (path, name to show) in order.
        part_megabytes: size of a part; None gives each worker a few parts of at most 256 MB.
        smallest: the fewest bytes of a part where its size is not given.
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
        if packing != "plain":
            parts.append(Part(path, source, 0, size, packing))
            continue
        edges = _line_edges(path, size, part_bytes)
        parts.extend(
            Part(path, source, start, end, packing)
            for start, end in zip(edges, edges[1:], strict=False)
        )
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
    """Yield (whole lines of about 4 MB, bytes of the input read for them).

    Raises:
        DataError: a packed file is cut or damaged.
    """
    rest: list[bytes] = []
    seen = 0
    for piece, read in _pieces(part):
        seen += read
        at = piece.rfind(b"\n") + 1
        if at == 0:
            rest.append(piece)
            continue
        yield b"".join([*rest, piece[:at]]), seen
        rest, seen = [piece[at:]] if at < len(piece) else [], 0
    if rest:
        yield b"".join(rest), seen


def _pieces(part: Part) -> Iterator[tuple[bytes, int]]:
    if part.packing != "plain":
        yield from unpacked(part.path, part.packing)
        return
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
