"""Indexed datasets at addresses of object storage, such as ``s3://bucket/web``.

An index is copied to this machine once: one process copies it while the others wait. Tokens are
fetched in ranges of pages (pieces of `PAGE` bytes), which are kept in a `BlockCache`. If the
objects of a run fit into the cache, a range is some megabytes long, so that few requests fetch each
byte once. Otherwise a range has only the pages of the samples asked for, often one or two: the
tokens around a sample would be evicted before they are used.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.lib.stride_tricks import sliding_window_view

from megatron_ext import limits
from megatron_ext.data.block_cache import PAGE, BlockCache
from megatron_ext.data.indexed import Array, Index, idx_path, read_index
from megatron_ext.data.permutation import Ints, key_of
from megatron_ext.data.requests import Requests, StoredObject
from megatron_ext.data.token_spans import TokenSpan, token_bounds
from megatron_ext.disk.writing import lock_path, open_descriptor, remove, why_not_writable
from megatron_ext.errors import DataError

RANGE = 64
"""Pages of one request if the run's objects fit into the cache; otherwise its most pages."""
_FITS = 0.8
"""Share of the cache up to which the run's `.bin` objects together count as fitting into it."""
_RECHECK = 300.0
"""Seconds after which a fetch first asks for the object's version again, as it may have changed."""


class _Process:
    """The cache, connections and unfinished requests of one process; a forked one makes its own."""

    def __init__(self, store: ObjectStore) -> None:
        self.pid = os.getpid()
        self.cache = BlockCache(store.folder / "pages", store.limit)
        self.requests = Requests(self.cache.count)
        self.coming: dict[tuple[int, int], Future[tuple[int, bytes]]] = {}
        self.lock = threading.Lock()


class ObjectStore:
    """Reads objects through a cache in a folder of this machine.

    Args:
        folder: the cache's folder, for pages of tokens and copies of indices.
        limit: the most bytes for pages; the copies of indices come on top.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._objects: dict[str, StoredObject] = {}
        self._checked: dict[str, float] = {}
        self._process: _Process | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    @property
    def _own(self) -> _Process:
        if self._process is None or self._process.pid != os.getpid():
            reason = why_not_writable(self.folder)
            if reason is not None:
                raise DataError(
                    f"`--object-storage-cache-path` ({self.folder}) cannot be written ({reason}); "
                    "give a folder that can."
                )
            self._process = _Process(self)
        return self._process

    def described(self, address: str) -> StoredObject:
        """Return an object's size and version, which are requested once in a run."""
        if address not in self._objects:
            requests = self._own.requests
            self._objects[address] = requests.wait(requests.describe(address))
            self._checked[address] = time.monotonic()
        return self._objects[address]

    @property
    def is_used(self) -> bool:
        """Return whether the run reads any object from this store."""
        return bool(self._objects)

    def counts(self) -> Mapping[str, int]:
        """Return this machine's counters of requests and bytes by name (`block_cache.COUNTS`)."""
        return self._own.cache.counts()

    def index(self, prefix: str) -> Index:
        """Return a dataset's index from a local copy, which is made now if there is none.

        Raises:
            DataError: the index does not exist, cannot be read or copied, or is damaged.
        """
        source = self.described(f"{prefix}.idx")
        place = self.folder / "indices" / hashlib.sha256(source.address.encode()).hexdigest()[:16]
        version = hashlib.sha256(source.version.encode()).hexdigest()[:16]
        name = PurePosixPath(prefix.partition("?")[0]).name or "data"
        copy = place / version / name
        if not idx_path(copy).is_file():
            try:
                place.mkdir(parents=True, exist_ok=True)
                with FileLock(lock_path(place / "lock")):
                    if not idx_path(copy).is_file():
                        self._copy_index(source, place, version, name)
            except OSError as error:
                raise DataError(
                    f"{source.address} cannot be copied to {place} ({limits.cause(error, place)}); "
                    "or give another `--object-storage-cache-path`."
                ) from error
        return read_index(copy)

    def _copy_index(self, source: StoredObject, place: Path, version: str, name: str) -> None:
        """Copy an index to ``place / version / name.idx``, check it, and remove other versions."""
        part = place / "part"
        remove(part)
        part.mkdir()
        copy = part / name
        requests = self._own.requests
        step = RANGE * PAGE
        requests.wait(requests.check_ranges(source.address))
        file = open_descriptor(idx_path(copy), os.O_WRONLY | os.O_CREAT, 0o644)
        try:

            async def fetch(begin: int) -> None:
                content = await requests.read(source, begin, min(begin + step, source.size))
                os.pwrite(file, content, begin)

            async def fetch_all() -> None:
                await asyncio.gather(*map(fetch, range(0, source.size, step)))

            requests.wait(fetch_all())
            os.fsync(file)
        finally:
            os.close(file)
        try:
            read_index(copy)
        except DataError as error:
            raise DataError(str(error).replace(str(idx_path(copy)), source.address)) from None
        for other in place.iterdir():
            if other.is_dir() and other != part:
                shutil.rmtree(other, ignore_errors=True)
        os.rename(part, place / version)

    def open_tokens(self, address: str) -> StoredObject:
        """Return a `.bin` object's size and version, after checking that ranges can be read."""
        was_described = address in self._objects
        source = self.described(address)
        if not was_described:
            requests = self._own.requests
            requests.wait(requests.check_ranges(address))
        return source

    def expect(self, source: StoredObject, pages: Ints) -> None:
        """Start fetching those of ``pages`` of an object that are not cached; return at once."""
        with self._own.cache.reading() as cache:
            missing = pages[cache.find(_key(source), pages) < 0]
        if len(missing):
            self._request(source, missing)

    def fetch(self, source: StoredObject, pages: Ints) -> dict[int, bytes]:
        """Fetch pages from the storage into the cache, and return their content by number.

        Raises:
            DataError: a page cannot be read, or the object has changed.
        """
        started = time.monotonic()
        fetched = dict[int, bytes]()
        for future in self._request(source, pages):
            first, content = future.result()
            fetched |= {
                first + number: content[number * PAGE : (number + 1) * PAGE]
                for number in range(-(-len(content) // PAGE))
            }
        self._own.cache.count(waited_us=int((time.monotonic() - started) * 1e6))
        return fetched

    def reading(self) -> Any:
        """Return a context manager that locks and yields the cache (see `BlockCache.reading`)."""
        return self._own.cache.reading()

    def _request(self, source: StoredObject, pages: Ints) -> list[Future[tuple[int, bytes]]]:
        """Request those of ``pages`` of an object that this process is not fetching already.

        Return the futures of all requests, new and earlier ones, that fetch ``pages``. A future's
        result is the number of the request's first page, and the bytes of its pages.
        """
        own = self._own
        key = _key(source)
        answers = []
        total = sum(each.size for name, each in self._objects.items() if name.endswith(".bin"))
        unit = RANGE if total <= _FITS * self.limit else 1
        with own.lock:
            for first, stop in _ranges(pages, unit, -(-source.size // PAGE)):
                if all((key, page) in own.coming for page in range(first, stop)):
                    answers += [own.coming[key, page] for page in range(first, stop)]
                    continue
                work = self._fetch(own, source, key, first, stop)
                future = asyncio.run_coroutine_threadsafe(work, own.requests.loop)
                own.coming |= {(key, page): future for page in range(first, stop)}
                answers.append(future)
        return list(dict.fromkeys(answers))

    async def _fetch(
        self, own: _Process, source: StoredObject, key: int, first: int, stop: int
    ) -> tuple[int, bytes]:
        """Fetch and cache pages ``first`` to ``stop`` - 1; return ``first`` and their bytes."""
        try:
            if time.monotonic() - self._checked[source.address] > _RECHECK:
                self._checked[source.address] = time.monotonic()
                if not source.is_still(await own.requests.describe(source.address)):
                    self._checked[source.address] = -math.inf
                    raise DataError(
                        f"{source.address} has changed since the run began, so that its order "
                        "cannot go on; put the old file back, or start a new run."
                    )
            end = min(stop * PAGE, source.size)
            content = await own.requests.read(source, first * PAGE, end)
            await asyncio.to_thread(own.cache.put, key, first, content)
            return first, content
        finally:
            with own.lock:
                for page in range(first, stop):
                    own.coming.pop((key, page), None)


def _key(source: StoredObject) -> int:
    return key_of(source.address, source.version)


def _ranges(pages: Ints, unit: int, total: int) -> Iterator[tuple[int, int]]:
    """Split ``pages`` into requests; yield each request's first page and the page after its last.

    A request fetches adjacent whole units, at most `RANGE` pages. A unit is ``unit`` pages of the
    object, which has ``total`` pages; the object's last unit may have fewer.
    """
    units = np.unique(pages // unit)
    most = max(1, RANGE // unit)
    for run in np.split(units, np.flatnonzero(np.diff(units) != 1) + 1):
        for offset in range(0, len(run), most):
            part = run[offset : offset + most]
            yield int(part[0]) * unit, min((int(part[-1]) + 1) * unit, total)


def open_remote_span(prefix: str, first: int, end: int | None, store: ObjectStore) -> RemoteSpan:
    """Return a reader of the tokens of sequences ``first`` to ``end`` - 1 (None: to the last).

    Raises:
        DataError: an object is missing or damaged, or index and tokens do not match.
    """
    index = store.index(prefix)
    source = store.open_tokens(f"{prefix}.bin")
    begin, stop = token_bounds(index, first, end, source.address, source.size)
    return RemoteSpan(prefix, index.dtype, begin, stop - begin, store)


class RemoteSpan(TokenSpan):
    """A range of the tokens of a dataset at an address, read through an `ObjectStore`'s cache."""

    def __init__(
        self, name: str, dtype: np.dtype[Any], first: int, tokens: int, store: ObjectStore
    ) -> None:
        super().__init__(name, dtype, first, tokens)
        self._store = store
        self._source = store.open_tokens(f"{name}.bin")

    def expect(self, begins: Ints, lengths: Ints) -> None:
        """Start fetching token ranges that will be read soon.

        A range that goes past the end of the span continues at the span's beginning.
        """
        pages, _ = self._pages_of(*self._cut(begins, lengths))
        self._store.expect(self._source, pages)

    def read(self, begins: Ints, length: int) -> Array:
        pages, places = self._pages_of(begins, length)
        tokens = np.empty((len(begins), length), dtype=self.dtype)
        with self._store.reading() as cache:
            slots = cache.find(_key(self._source), pages)
            here = (slots >= 0)[places].all(axis=1)
            content = cache.view(self.dtype)
            tokens[here] = self._take(content, slots[places[here]], begins[here], length)
        if not here.all():
            needed, own = np.unique(places[~here], return_inverse=True)
            content = self._contents(pages[needed]).reshape(-1)
            own = own.reshape(-1, places.shape[1])
            tokens[~here] = self._take(content, own, begins[~here], length)
        return tokens

    def gather_ranges(self, begins: Ints, lengths: Ints) -> Array:
        begins, lengths = self._cut(begins, lengths)
        pages, places = self._pages_of(begins, lengths)
        content = self._contents(pages)
        ranges = np.repeat(np.arange(len(begins)), lengths)
        within = np.arange(len(ranges)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        starts = (self.first + begins) % content.shape[1]
        page, offset = np.divmod(starts[ranges] + within, content.shape[1])
        tokens: Array = content[places[ranges, page], offset]
        return tokens

    def _cut(self, begins: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Split each token range that goes past the end of the span in two.

        Return the first tokens and the lengths of all resulting ranges, in order.
        """
        over = np.flatnonzero(begins + lengths > self.tokens)
        rest = begins[over] + lengths[over] - self.tokens
        begins = np.insert(begins, over + 1, 0)
        lengths = np.insert(lengths, over + 1, rest)
        lengths[over + np.arange(len(over))] -= rest
        return begins, lengths

    def _contents(self, pages: Ints) -> Array:
        """Return copies of p pages, ``[p, tokens of a page]``; fetch those that are not cached."""
        copies = np.zeros((len(pages), PAGE // self.dtype.itemsize), dtype=self.dtype)
        with self._store.reading() as cache:
            slots = cache.find(_key(self._source), pages)
            here = slots >= 0
            copies[here] = cache.view(self.dtype).reshape(-1, copies.shape[1])[slots[here]]
        missing = np.flatnonzero(~here)
        if len(missing):
            fetched = self._store.fetch(self._source, pages[missing])
            for index in missing.tolist():
                page = np.frombuffer(fetched[int(pages[index])], dtype=self.dtype)
                copies[index, : len(page)] = page
        return copies

    def _pages_of(self, begins: Ints, length: Ints | int) -> tuple[Ints, Ints]:
        """Return the pages that m token ranges touch, and which of them belong to each range.

        Returns:
            The page numbers, ascending, and indices ``[m, k]`` into them, where k is the largest
            number of pages of any range. A range with fewer pages repeats its last one.
        """
        size = self.dtype.itemsize
        first = (self.first + begins) * size // PAGE
        last = ((self.first + begins + length) * size - 1) // PAGE
        most = int((last - first).max()) + 1
        touched = np.minimum(first[:, None] + np.arange(most), last[:, None])
        pages, places = np.unique(touched, return_inverse=True)
        return pages, places.reshape(touched.shape)

    def _take(self, content: Array, slots: Ints, begins: Ints, length: int) -> Array:
        """Copy m token ranges of equal length out of ``content``, to ``[m, length]``.

        Args:
            content: tokens of pages, one page after another.
            slots: position of each range's k pages among the pages of ``content``, ``[m, k]``.
            begins: position of each range's first token in the span, ``[m]``.
            length: tokens of a range.
        """
        per_page = PAGE // self.dtype.itemsize
        starts = (self.first + begins) % per_page
        tokens = np.empty((len(begins), length), dtype=self.dtype)
        inside = starts + length <= per_page
        if inside.any():
            rows = sliding_window_view(content, length)
            tokens[inside] = rows[slots[inside, 0] * per_page + starts[inside]]
        across = ~inside
        offsets = starts[across, None] + np.arange(length)
        own = np.take_along_axis(slots[across], offsets // per_page, axis=1)
        tokens[across] = content[own * per_page + offsets % per_page]
        return tokens
