"""Batches of token ranges from indexed datasets.

A span is the part of a `.bin` file that belongs to a split: consecutive whole sequences, read as a
circle, in which the first token follows the last. `MappedSpan` reads it through a memory map, which
copies a batch without a Python loop over its ranges; `ReadSpan`, for ``--no-mmap-bin-files``, calls
`pread` once per range. `object_store` has a `TokenSpan` for object storage and URLs.

If a batch took long because its pages were not in memory, the kernel is asked to read all pages of
the next batch at once, before the first of them is used.

A process may have fewer files open than a mixture has sources. So spans close their files when too
many are open, and open them again at their next read.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from megatron_ext.data.indexed import Array, Index, bin_path, path_of_tokens, read_index, readable
from megatron_ext.data.permutation import Ints
from megatron_ext.disk.bus import cut_in_use, remember_size
from megatron_ext.errors import DataError

_SLOW = 20e-6
"""Limit for the time of reading a batch, in seconds per range. A slower batch must have come from a
disk, not from cached pages; the kernel is then asked for the next batch's pages ahead of time.
"""
_MOST_OPEN = 16_384
"""Most spans with an open file. Linux lets a process have 65,530 maps."""
_open_spans: weakref.WeakValueDictionary[int, MappedSpan | ReadSpan]
_open_spans = weakref.WeakValueDictionary()
"""The spans with an open file, by `id`."""


class TokenSpan(ABC):
    """A range of a dataset's tokens that is read as a circle: its first token follows its last.

    Args:
        name: the dataset's path without ``.bin``.
        dtype: dtype of a token in the file.
        first: position of the range's first token in the file.
        tokens: length of the range.
    """

    def __init__(self, name: str, dtype: np.dtype[Any], first: int, tokens: int) -> None:
        self.name = name
        self.dtype = dtype
        self.first = first
        self.tokens = tokens

    def gather(self, begins: Ints, length: int) -> Array:
        """Return m ranges of ``length`` tokens, ``[m, length]``, also across the end of the span.

        ``begins`` ``[m]`` are the positions of their first tokens in the span. A range that reaches
        the end of the span continues at its beginning.
        """
        if int(begins.max()) + length <= self.tokens:
            return self.read(begins, length)
        inside = begins + length <= self.tokens
        tokens = np.empty((len(begins), length), dtype=self.dtype)
        if inside.any():
            tokens[inside] = self.read(begins[inside], length)
        for row in np.flatnonzero(~inside).tolist():
            position = int(begins[row])
            parts = []
            missing = length
            while missing:
                count = min(missing, self.tokens - position)
                parts.append(self.read(np.array([position], dtype=np.int64), count)[0])
                position = 0
                missing = missing - count
            tokens[row] = np.concatenate(parts)
        return tokens

    def gather_ranges(self, begins: Ints, lengths: Ints) -> Array:
        """Return the tokens of m ranges, joined into one array, ``[sum(lengths)]``.

        Range i has ``lengths[i]`` tokens, from token ``begins[i]`` of the span on. If it reaches
        the end of the span, it continues at the beginning.
        """
        ranges = zip(begins.tolist(), lengths.tolist(), strict=True)
        parts = [self.gather(np.array([begin]), length)[0] for begin, length in ranges]
        return np.concatenate(parts)

    @abstractmethod
    def read(self, begins: Ints, length: int) -> Array:
        """Return m ranges of ``length`` tokens, ``[m, length]``, all within the span.

        ``begins`` ``[m]`` are the positions of their first tokens in the span.
        """


def _will_open(span: MappedSpan | ReadSpan) -> None:
    """Note that ``span`` opens its file; if too many are open, release those of all other spans."""
    if len(_open_spans) >= min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
        for reference in _open_spans.valuerefs():
            other = reference()
            if other is not None:
                other.release()
        _open_spans.clear()
    _open_spans[id(span)] = span


class MappedSpan(TokenSpan):
    """A `TokenSpan` in a memory map, which each process opens at its first read."""

    _map: mmap.mmap | None = None
    _was_slow = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def read(self, begins: Ints, length: int) -> Array:
        windows = self._windows(length)
        if self._was_slow:
            self._ask_for_pages(begins, length)
        started = time.perf_counter()
        rows: Array = windows[begins]
        self._was_slow = time.perf_counter() - started > _SLOW * len(begins)
        return rows

    def gather_ranges(self, begins: Ints, lengths: Ints) -> Array:
        ends = begins + lengths
        if int(ends.max()) > self.tokens:
            return super().gather_ranges(begins, lengths)
        tokens = self._windows(1)[:, 0]
        if self._was_slow:
            self._ask_for_pages(begins, lengths)
        started = time.perf_counter()
        parts = [tokens[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
        joined: Array = np.concatenate(parts)
        self._was_slow = time.perf_counter() - started > _SLOW * len(begins)
        return joined

    def _windows(self, length: int) -> Array:
        """Return a view of the tokens, ``[tokens - length + 1, length]``.

        Row i holds ``length`` tokens, from token i of the span on.
        """
        mapped = self._mapped()
        needed = (self.first + self.tokens) * self.dtype.itemsize
        if (rest := mapped.size()) < needed:
            # A truncated file reads as zeros up to the end of its last page.
            raise DataError(cut_in_use(bin_path(self.name), rest, f"at least {needed}"))
        size = self.dtype.itemsize
        shape = (self.tokens - length + 1, length)
        begin = self.first * size
        windows: Array = np.ndarray(shape, self.dtype, mapped, begin, (size, size))
        return windows

    def _mapped(self) -> mmap.mmap:
        """Return the map of the file, which another thread may release at any time."""
        mapped = self._map
        if mapped is None:
            _will_open(self)
            path = bin_path(self.name)
            with readable(path), open(path, "rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            remember_size(path, len(mapped))
            if hasattr(mmap, "MADV_RANDOM"):
                # Turn read-ahead off: the pages after a sample are used much later, if at all.
                mapped.madvise(mmap.MADV_RANDOM)
            self._map = mapped
        return mapped

    def release(self) -> None:
        """Let go of the map; the next read maps the file again."""
        self._map = None

    def _ask_for_pages(self, begins: Ints, length: Ints | int) -> None:
        mapped = self._mapped()
        size = self.dtype.itemsize
        page = mmap.PAGESIZE
        first = (self.first + begins) * size // page * page
        ends = np.minimum((self.first + begins + length) * size, len(mapped))
        for begin, end in zip(first.tolist(), ends.tolist(), strict=True):
            mapped.madvise(mmap.MADV_WILLNEED, begin, end - begin)


class _OpenFile:
    """The descriptor of an open file, closed with the last reference to this object."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


class ReadSpan(TokenSpan):
    """A `TokenSpan` read with one `pread` per range; each process opens the file itself."""

    _file: _OpenFile | None = None
    _owner = 0
    _was_slow = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def read(self, begins: Ints, length: int) -> Array:
        path = bin_path(self.name)
        opened = self._opened()
        file = opened.number
        tokens = np.empty((len(begins), length), dtype=self.dtype)
        size = length * self.dtype.itemsize
        rows = tokens.view(np.uint8).reshape(-1).data
        preadv = os.preadv
        offsets = ((self.first + begins) * self.dtype.itemsize).tolist()
        row = 0
        started = time.perf_counter()
        with readable(path):
            for offset in offsets if self._was_slow else ():
                os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)
            for offset in offsets:
                if preadv(file, [rows[row : row + size]], offset) != size:
                    self._read_rest(file, rows[row : row + size], offset)
                row += size
        self._was_slow = time.perf_counter() - started > _SLOW * len(begins)
        return tokens

    def _opened(self) -> _OpenFile:
        """Return the open file, which another thread may release at any time."""
        opened = self._file
        if opened is None or self._owner != os.getpid():
            _will_open(self)
            path = bin_path(self.name)
            with readable(path):
                self._file = opened = _OpenFile(path)
            self._owner = os.getpid()
        return opened

    def release(self) -> None:
        """Let go of the file; the next read opens it again."""
        self._file = None

    def _read_rest(self, file: int, row: memoryview, offset: int) -> None:
        """Fill the buffer ``row`` from byte ``offset`` of ``file``, after a read that was partial.

        Raise a DataError if the file ends before the buffer is full.
        """
        done = 0
        while done < len(row):
            count = os.preadv(file, [row[done:]], offset + done)
            if not count:
                path = bin_path(self.name)
                least = (self.first + self.tokens) * self.dtype.itemsize
                raise DataError(cut_in_use(path, path.stat().st_size, f"at least {least}"))
            done += count


def tokens_before(index: Index, sequence: int) -> int:
    """Return the number of tokens in the first ``sequence`` sequences of a dataset."""
    size = index.dtype.itemsize
    if sequence < len(index.offsets):
        return int(index.offsets[sequence]) // size
    if not len(index.offsets):
        return 0
    return int(index.offsets[-1]) // size + int(index.lengths[-1])


def open_span(prefix: str, first: int, end: int | None, *, mapped: bool = True) -> TokenSpan:
    """Open the tokens of sequences ``first`` to ``end`` - 1 of a dataset (None: to the last).

    They are read through a memory map if ``mapped``, else by `pread`. Only the files' sizes and the
    index's first and last entries are checked, in constant time; `check_indexed_dataset` checks the
    whole index.

    Raises:
        DataError: a file is missing or damaged, or index and tokens do not match.
    """
    index = read_index(prefix)
    path = path_of_tokens(prefix)
    begin, stop = token_bounds(index, first, end, str(path), path.stat().st_size)
    kind = MappedSpan if mapped else ReadSpan
    return kind(prefix, index.dtype, begin, stop - begin)


def token_bounds(
    index: Index, first: int, end: int | None, path: str, size: int
) -> tuple[int, int]:
    """Return the positions of the first token of sequence ``first`` and of sequence ``end``.

    They bound the tokens of sequences ``first`` to ``end`` - 1. If ``end`` is None, the second is
    the number of tokens in the dataset. ``path`` names the file of tokens in errors.

    Raises:
        DataError: the file's ``size`` in bytes does not match the index.
    """
    total = tokens_before(index, len(index.lengths))
    needed = total * index.dtype.itemsize
    if size != needed or (len(index.offsets) and index.offsets[0] != 0):
        raise DataError(
            f"{path} has {size} bytes, but its index counts {total} tokens of "
            f"{index.dtype.itemsize} bytes ({needed} bytes); copy or make the pair again."
        )
    return tokens_before(index, first), total if end is None else tokens_before(index, end)
