"""Reads a JSON object that is one very long line of a file, but not its long texts at once.

The texts of such an object are most of the line. `outline` finds where they are, and `text_pieces`
decodes one of them piece by piece. Whatever is not plain raises an `Unusual`: the line must then be
read whole, which gives the same texts, or the error of the line.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO

import orjson

from megatron_ext.errors import DataError

LONG_LINE_BYTES = 32 << 20
"""Lines with more bytes are long."""
_PIECE_BYTES = 4 << 20
_LONG_TEXT_BYTES = 1 << 16
_MOST_OUTLINE_BYTES = 16 << 20
_BACKSLASH = ord("\\")
_LONGEST_ESCAPE = 12
"""Bytes of the escapes of a surrogate pair, such as ``\\ud83d\\ude00``."""
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class Unusual(Exception):
    """Raised for a long line that must be read whole."""


@dataclass(frozen=True)
class Span:
    """The bytes ``start`` to ``end`` - 1 of a file."""

    start: int
    end: int


@dataclass(frozen=True)
class LongLine(Span):
    """A line of more than `LONG_LINE_BYTES` in the file ``path``; its end is left out."""

    path: str

    def read(self, span: Span | None = None) -> bytes:
        """Return the bytes of a span of the file; by default, those of the whole line."""
        span = self if span is None else span
        with open(self.path, "rb", buffering=0) as stream:
            return _read(stream, span.start, span.end)

    def head(self, size: int) -> bytes:
        """Return the first ``size`` bytes of the line."""
        return self.read(Span(self.start, min(self.end, self.start + size)))


def head_of(block: bytes | LongLine) -> bytes:
    """Return the beginning of a block of lines, or of a long line."""
    return block if isinstance(block, bytes) else block.head(_LONG_TEXT_BYTES)


def _read(stream: FileIO, start: int, end: int) -> bytes:
    parts = []
    while start < end:
        part = os.pread(stream.fileno(), end - start, start)
        if not part:
            raise DataError(
                f"{stream.name} became shorter while it was read; leave the input alone during the "
                "run and start again."
            )
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def outline(line: LongLine) -> tuple[bytes, dict[str, Span]]:
    """Return a line with a name in place of each long string, and the string's place, by name.

    The names are random, so that no string of the line is one. A string's place is that of the
    bytes between its quotes.
    """
    mark = secrets.token_hex(16)
    kept = list[bytes]()
    texts: dict[str, Span] = {}
    size = 0
    at = line.start
    within = False
    with open(line.path, "rb", buffering=0) as stream:
        while at < line.end:
            quote = _next_quote(stream, at, line.end, escapes=within)
            if within and quote - at > _LONG_TEXT_BYTES:
                name = f"{mark}.{len(texts)}"
                texts[name] = Span(at, quote)
                kept.append(name.encode())
            else:
                size += quote - at
                if size > _MOST_OUTLINE_BYTES:
                    raise Unusual
                kept.append(_read(stream, at, quote))
            if quote < line.end:
                kept.append(b'"')
            at = quote + 1
            within = not within
    return b"".join(kept), texts


def _next_quote(stream: FileIO, start: int, end: int, *, escapes: bool) -> int:
    """Return the place of the next quote in the bytes ``start`` to ``end`` - 1, else ``end``.

    With ``escapes``, a quote does not count after an odd number of backslashes.
    """
    at = start
    backslashes = 0
    while at < end:
        # Most strings are short, so the first piece is, too.
        size = _LONG_TEXT_BYTES if at == start else _PIECE_BYTES
        piece = _read(stream, at, min(end, at + size))
        quote = piece.find(b'"')
        while quote >= 0:
            before = _backslashes(piece, quote)
            if before == quote:
                before += backslashes
            if not escapes or before % 2 == 0:
                return at + quote
            quote = piece.find(b'"', quote + 1)
        trailing = _backslashes(piece, len(piece))
        backslashes = trailing + (backslashes if trailing == len(piece) else 0)
        at += len(piece)
    return end


def _backslashes(raw: bytes, place: int) -> int:
    """Return how many backslashes are directly before a place."""
    first = place
    while first and raw[first - 1] == _BACKSLASH:
        first -= 1
    return place - first


def text_pieces(line: LongLine, span: Span) -> Iterator[str]:
    """Yield the text of a JSON string piece by piece; ``span`` is its place between the quotes."""
    with open(line.path, "rb", buffering=0) as stream:
        at = span.start
        while at < span.end:
            raw = _read(stream, at, min(span.end, at + _PIECE_BYTES))
            if at + len(raw) < span.end:
                raw = raw[: _place_to_cut(raw)]
            try:
                text: str = orjson.loads(b'"' + raw + b'"')
            except orjson.JSONDecodeError:
                raise Unusual from None
            yield text
            at += len(raw)


def _place_to_cut(raw: bytes) -> int:
    """Return the last place at which a part of a JSON string can be cut between two characters."""
    for place in range(len(raw) - 1, max(len(raw) - 4 * _LONGEST_ESCAPE, 0), -1):
        before = raw[max(0, place - _LONGEST_ESCAPE) : place]
        if raw[place] == _BACKSLASH:
            if _backslashes(raw, place) % 2 == 0 and not _HIGH_SURROGATE.search(before):
                return place
        elif b"\\" not in before and raw[place] & 0xC0 != 0x80:
            return place
    raise Unusual
