"""Recognizes packed files and streams, unpacks gzip and zstd, and copies streams to files."""

import gzip
import os
import select
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import BinaryIO

from megatron_ext.errors import ConfigError, DataError

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 128 << 20
"""The largest size of a line, or of a file in a folder of texts, in unpacked bytes.

The limit bounds memory, since a small gzip file may unpack to gigabytes."""
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
    b"ARRO": "arrow file",
    b"\xff\xff\xff\xff": "arrow stream",
}
_OTHER_MAGIC = {b"BZh": "bzip2", b"\xfd7zX": "xz", b"PK\x03\x04": "zip"}
_SECONDS_FOR_A_WRITER = 10.0
_ZSTD_BYTES = 1 << 11


def packing_of(path: str) -> str:
    """Return the kind of an input: gzip, zstd, parquet, "arrow file", "arrow stream" or plain.

    The kind of a folder is "texts". Raise a DataError for bzip2, xz and zip.
    """
    if os.path.isdir(path):
        return "texts"
    with open(path, "rb") as stream:
        head = stream.read(4)
    for magic, name in _OTHER_MAGIC.items():
        if head.startswith(magic):
            raise DataError(
                f"`--input` ({path}) is a {name} file; give jsonl, plain or packed with gzip or "
                "zstd, parquet or Arrow."
            )
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "plain")


def is_stream(path: str) -> bool:
    """Tell whether an input can be read only once: a pipe, a device or a socket."""
    if path == "-":
        return True
    mode = os.stat(path).st_mode
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def copy_stream(source: str, out: BinaryIO) -> None:
    """Copy the stream at ``source`` to ``out`` until it ends.

    Standard input is read by its descriptor 0, since it may be a socket, which has no path to open.
    """
    standard = source == "-"
    with suppress(OSError):
        standard = standard or os.path.samestat(os.stat(source), os.fstat(0))
    try:
        # A FIFO without a writer yet must be waited for. The pipe of a shell's `<(command)` always
        # has one; it is recognized because its path leads to no file.
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
    """Wait until a program opens a FIFO for writing; return the 0 or 1 bytes read while waiting.

    Raise a DataError if no program opens it within `_SECONDS_FOR_A_WRITER`.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    first = b""
    if not poll.poll(_SECONDS_FOR_A_WRITER * 1000):
        with suppress(BlockingIOError):  # A writer is there, but has not written yet.
            first = os.read(descriptor, 1)
            if not first:
                raise DataError(
                    f"`--input` ({source}) is a FIFO that no program has opened for writing within "
                    f"{_SECONDS_FOR_A_WRITER:g} seconds; start the one that writes into it first."
                )
    os.set_blocking(descriptor, True)
    return first


def unpacked(
    path: str, packing: str, piece_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[bytes, int]]:
    """Unpack a gzip or zstd file; yield (unpacked bytes, number of packed bytes read for them).

    Each piece has about ``piece_bytes`` unpacked bytes. Raise a DataError for a damaged file.
    """
    before = 0
    with open(path, "rb") as raw:
        whole = partial(gzip.GzipFile(fileobj=raw).read, piece_bytes)
        stream = iter(whole, b"") if packing == "gzip" else _zstd(raw, path, piece_bytes)
        try:
            for piece in stream:
                now = raw.tell()
                yield piece, now - before
                before = now
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(
                f"{path} is not a whole {packing} file ({error}); copy it again."
            ) from None


def _zstd(raw: BinaryIO, path: str, piece_bytes: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"`--input` ({path}) is packed with zstd, which needs the zstandard package; install "
            "it, or unpack the file."
        ) from None
    fresh, window = True, None
    pending = []
    size = 0
    # A call unpacks all of its input, and a few bytes of a frame can unpack to 128 KiB. So feed
    # only a little at a time.
    while piece := raw.read(_ZSTD_BYTES):
        while piece:
            if window is None or window.eof:
                window = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                out = window.decompress(piece)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            fresh = window.eof
            piece = window.unused_data if window.eof else b""
            pending.append(out)
            size += len(out)
            if size >= piece_bytes:
                yield b"".join(pending)
                pending = []
                size = 0
    if not fresh:
        raise EOFError("it ends inside a frame")
    if pending:
        yield b"".join(pending)
