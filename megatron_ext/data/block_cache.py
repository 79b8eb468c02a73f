"""A cache of pages of remote objects on a machine's disk, shared by all processes of the machine.

A page is `PAGE` adjacent bytes of an object; pages of an object are numbered from 0. The cache is a
file of slots, each with room for a page, and a table that says which page is in each slot. Both
have their full size from the beginning, so the cache cannot outgrow its limit. The object's key and
the page's number determine the few slots where a page may lie. A new page evicts the least recently
used page of these slots.

A lock orders reads and writes; the kernel releases it if its process dies. The table names a page
only after the page is written, so a killed process leaves no half page. After a restart of the
machine the cache begins empty, because its latest writes may have been lost.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext import limits
from megatron_ext.data.indexed import Array
from megatron_ext.data.permutation import Ints, derived, key_of
from megatron_ext.disk.writing import cleared, is_regular, open_descriptor, open_new
from megatron_ext.errors import DataError

PAGE = 1 << 16
"""Bytes of a page: a multiple of the size of every token dtype."""
COUNTS = ("requests", "bytes", "failed", "given_up", "short", "waited_us", "not_kept")
"""Counters that all processes of a machine share.

requests and bytes: requests to the storage, and the bytes of their answers. failed, given_up and
short: requests that failed, took too long, or returned too few bytes. waited_us: microseconds that
reads have waited for the storage. not_kept: pages for which the disk had no space.
"""
_WAYS = 16
"""Slots of a set, in any of which a page may lie (a 16-way set-associative cache)."""
_HEADER = 16
"""Number of 8-byte words in the table's header: a hash of size, machine and boot; then `COUNTS`."""
_RECORD = 3
"""Number of 8-byte words in a slot's record: key of the object, number of the page plus 1 (0 if the
slot is empty), and time of last use.
"""
_BYTES_PER_SLOT = PAGE + 8 * _RECORD


class BlockCache:
    """A cache of pages in a folder; each process that uses the folder makes its own instance.

    An object is named by its ``key``, a 64-bit hash of its address and version.

    Args:
        folder: a local folder of this machine.
        limit: the most bytes that the cache may use on the disk.

    Raises:
        DataError: the folder cannot be used, or another run uses it with another limit.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.slots = max(_WAYS, (limit - 8 * _HEADER) // _BYTES_PER_SLOT // _WAYS * _WAYS)
        self._mutex = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A process loses its fcntl locks when it closes any descriptor of the file. So there is
            # a single descriptor, a plain number that nothing closes.
            self._lock = open_descriptor(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            with self._locked(fcntl.LOCK_EX):
                self._open(folder, limit)
        except OSError as error:
            raise DataError(
                f"`--object-storage-cache-path` ({folder}) cannot be used "
                f"({limits.cause(error, folder)}); give a folder on a disk with space "
                "for `--object-storage-cache-size`."
            ) from error

    def _open(self, folder: Path, limit: int) -> None:
        """Open the files of the cache; create them anew if they cannot be reused.

        Files can be reused if they have the size that follows from ``limit`` and were made on this
        machine since the machine was last started.
        """
        table = folder / "table"
        pages = folder / "pages"
        size = 8 * (_HEADER + _RECORD * self.slots)
        boot = Path("/proc/sys/kernel/random/boot_id")
        started = boot.read_text() if boot.is_file() else ""
        mark = key_of("pages 1", PAGE, self.slots, platform.node(), started)
        # Every process that uses the files holds this lock as long as it lives.
        self._users = open_descriptor(folder / "users", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._users, fcntl.LOCK_SH)
        same = is_regular(table) and is_regular(pages) and table.stat().st_size == size
        if not same or np.fromfile(table, np.uint64, 1)[0] != mark:
            try:
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._users)
                raise DataError(
                    f"`--object-storage-cache-size` ({limit / 2**30:g} GiB) differs from that of a "
                    f"run which uses the cache {folder} now; give the same size, or another "
                    "`--object-storage-cache-path`."
                ) from None
            table.unlink(missing_ok=True)
            pages.unlink(missing_ok=True)
            with open_new(pages, "wb") as file:
                file.truncate(self.slots * PAGE)
            new = np.zeros(size // 8, dtype=np.uint64)
            new[0] = mark
            new.tofile(cleared(table))
            fcntl.flock(self._users, fcntl.LOCK_SH)
        self._pages = open_descriptor(pages, os.O_RDWR)
        # Write pages through the file: on a full disk, a write to the memory map would kill the
        # process.
        self._content = mmap.mmap(self._pages, self.slots * PAGE, access=mmap.ACCESS_READ)
        self._words = np.memmap(table, np.uint64, "r+", shape=(size // 8,))
        self._table = self._words[_HEADER:].reshape(self.slots // _WAYS, _WAYS, _RECORD)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        with self._mutex:
            fcntl.lockf(self._lock, kind)
            try:
                yield
            finally:
                fcntl.lockf(self._lock, fcntl.LOCK_UN)

    @contextmanager
    def reading(self) -> Iterator[BlockCache]:
        """Lock the cache for reading: no process stores or evicts a page within this context.

        The context yields this cache. Within it, `put`, `count` and `counts` would wait forever.
        """
        with self._locked(fcntl.LOCK_SH):
            yield self

    def view(self, dtype: np.dtype[Any]) -> Array:
        """Return the content of all slots, one after another, as one array of ``dtype``.

        The page in slot i begins at entry i * (entries per page).
        """
        entries: Array = np.frombuffer(self._content, dtype)
        return entries

    def find(self, key: int, pages: Ints) -> Ints:
        """Return the slot of each page ``[n]`` of the object ``key``; -1 for a page not cached.

        The pages found count as used now. Call this within `reading`.
        """
        sets = self._sets(key, pages)
        records = self._table[sets]
        page_tags = (pages + 1).astype(np.uint64)
        same = (records[..., 0] == np.uint64(key)) & (records[..., 1] == page_tags[:, None])
        ways = same.argmax(axis=1)
        hits = np.flatnonzero(same.any(axis=1))
        self._table[sets[hits], ways[hits], 2] = np.uint64(time.monotonic_ns())
        slots = np.full(len(pages), -1, dtype=np.int64)
        slots[hits] = sets[hits] * _WAYS + ways[hits]
        return slots

    def put(self, key: int, first: int, content: bytes) -> None:
        """Store ``content`` as consecutive pages of the object ``key``, from page ``first`` on.

        The last page may be incomplete. A page for which the disk has no space is left out.
        """
        pages = np.arange(first, first + -(-len(content) // PAGE), dtype=np.int64)
        sets = self._sets(key, pages)
        data = memoryview(content)
        with self._locked(fcntl.LOCK_EX):
            for number, (page, group) in enumerate(zip(pages.tolist(), sets.tolist(), strict=True)):
                self._put(key, page, group, data[number * PAGE : (number + 1) * PAGE])

    def _put(self, key: int, page: int, group: int, content: memoryview) -> None:
        records = self._table[group]
        own = np.flatnonzero((records[:, 0] == key) & (records[:, 1] == page + 1))
        way = int(own[0] if len(own) else records[:, 2].argmin())
        records[way] = 0
        try:
            written = os.pwrite(self._pages, content, (group * _WAYS + way) * PAGE)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            written = 0
        if written == len(content):
            records[way, 0] = key
            records[way, 2] = time.monotonic_ns()
            records[way, 1] = page + 1
        else:
            self._words[1 + COUNTS.index("not_kept")] += np.uint64(1)

    def _sets(self, key: int, pages: Ints) -> Ints:
        """Return, for each page ``[n]``, the index of the set of `_WAYS` slots that may hold it."""
        spread = derived(np.full(len(pages), key, dtype=np.uint64), pages)
        sets: Ints = (spread % np.uint64(len(self._table))).astype(np.int64)
        return sets

    def count(self, **counts: int) -> None:
        """Add each keyword argument to this machine's counter of that name (see `COUNTS`)."""
        with self._locked(fcntl.LOCK_EX):
            for name, value in counts.items():
                self._words[1 + COUNTS.index(name)] += np.uint64(value)

    def counts(self) -> Mapping[str, int]:
        """Return the counters of all processes of this machine since the cache was created."""
        with self.reading():
            return dict(zip(COUNTS, self._words[1 : 1 + len(COUNTS)].tolist(), strict=True))
