"""The cache of pages: bounded, shared by processes, and never wrong."""

import errno
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data import block_cache
from megatron_ext.data.block_cache import PAGE, BlockCache
from megatron_ext.errors import DataError


def _content(page: int) -> bytes:
    return np.random.default_rng(page).bytes(PAGE)


def _found(cache: BlockCache, key: int, pages: list[int]) -> dict[int, bytes]:
    with cache.reading():
        slots = cache.find(key, np.array(pages, dtype=np.int64))
        view = cache.view(np.dtype(np.uint8)).reshape(-1, PAGE)
        return {p: view[s].tobytes() for p, s in zip(pages, slots.tolist(), strict=True) if s >= 0}


def _disk(folder: Path) -> int:
    return sum(max(path.stat().st_size, path.stat().st_blocks * 512) for path in folder.iterdir())


def test_pages_are_found_until_others_take_their_place_and_the_disk_use_is_bounded(
    tmp_path: Path,
) -> None:
    limit = 64 * PAGE
    cache = BlockCache(tmp_path, limit)
    for page in range(300):
        cache.put(7, page, _content(page))
        assert _disk(tmp_path) <= limit
        assert _found(cache, 7, [page]) == {page: _content(page)}
    found = _found(cache, 7, list(range(300)))
    assert len(found) == cache.slots == 48
    assert found == {page: _content(page) for page in found}
    assert _found(cache, 8, list(range(300))) == {}
    short = b"end"
    cache.put(8, 5, _content(4) + short)
    assert _found(cache, 8, [5, 6])[6][:3] == short
    cache.put(8, 5, _content(3))
    assert _found(cache, 8, [5]) == {5: _content(3)}


def test_a_limit_counts_the_table_and_its_header(tmp_path: Path) -> None:
    """A slot takes a page and three words of the table, whose header takes 16 words."""
    exact = 32 * (PAGE + 3 * 8) + 16 * 8
    assert BlockCache(tmp_path / "exact", exact).slots == 32
    assert BlockCache(tmp_path / "less", exact - 1).slots == 16


def test_the_page_that_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    """A cache of one set of slots is compared with an ordered dictionary."""
    cache, order = BlockCache(tmp_path, 17 * PAGE), OrderedDict[int, None]()
    assert cache.slots == 16
    for page in np.random.default_rng(0).integers(0, 40, 300).tolist():
        assert bool(_found(cache, 1, [page])) == (page in order)
        if page not in order:
            cache.put(1, page, bytes(PAGE))
            if len(order) == 16:
                order.popitem(last=False)
        order[page] = None
        order.move_to_end(page)


def test_a_process_that_is_killed_leaves_whole_pages_and_no_lock(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 64 * PAGE)
    for delay in (0.01, 0.03, 0.05):
        pid = os.fork()
        if pid == 0:
            own = BlockCache(tmp_path, 64 * PAGE)
            while True:
                for page in range(64):
                    own.put(3, page, _content(page))
        end = time.monotonic() + 60
        while not _found(cache, 3, list(range(64))) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = _found(cache, 3, list(range(64)))
        assert found and found == {page: _content(page) for page in found}
        cache.put(4, 0, _content(1))
        assert _found(cache, 4, [0]) == {0: _content(1)}


def test_processes_that_write_and_read_together_see_whole_pages_only(tmp_path: Path) -> None:
    children = []
    for seed in range(3):
        pid = os.fork()
        if pid == 0:
            cache, chance = BlockCache(tmp_path, 34 * PAGE), np.random.default_rng(seed)
            wrong = 0
            for page in chance.integers(0, 60, 150).tolist():
                if not _found(cache, 1, [page]):
                    cache.put(1, page, bytes([page]) * PAGE)
                near = list(range(max(0, page - 5), page + 5))
                wrong += sum(x != bytes([p]) * PAGE for p, x in _found(cache, 1, near).items())
            cache.count(requests=150)
            os._exit(int(wrong > 0))
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert BlockCache(tmp_path, 34 * PAGE).counts()["requests"] == 450


def test_another_limit_is_refused_while_the_cache_is_in_use(tmp_path: Path) -> None:
    BlockCache(tmp_path, 64 * PAGE).put(1, 0, _content(0))
    assert _found(BlockCache(tmp_path, 64 * PAGE), 1, [0]) == {0: _content(0)}
    refused = r"`--object-storage-cache-size` \(0.00195312 GiB\) differs from that of a run which"
    with pytest.raises(DataError, match=refused):
        BlockCache(tmp_path, 32 * PAGE)


def test_after_a_restart_of_the_machine_or_with_another_limit_the_cache_begins_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_a_process(limit: int) -> int:
        """Return how many pages a process finds, which then writes one."""
        pid = os.fork()
        if pid == 0:
            cache = BlockCache(tmp_path, limit)
            found = len(_found(cache, 1, [0]))
            cache.put(1, 0, _content(0))
            os._exit(10 + found)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 10

    assert [in_a_process(64 * PAGE) for _ in range(2)] == [0, 1]
    assert [in_a_process(32 * PAGE) for _ in range(2)] == [0, 1]
    assert _disk(tmp_path) <= 32 * PAGE
    for lost in ("pages", "table"):
        (tmp_path / lost).unlink()
        assert [in_a_process(32 * PAGE) for _ in range(2)] == [0, 1]
    boot = tmp_path.with_name("boot_id")
    boot.write_text("of another start")
    monkeypatch.setattr(block_cache, "Path", lambda name: boot)
    assert [in_a_process(32 * PAGE) for _ in range(2)] == [0, 1]
    monkeypatch.setattr(block_cache.platform, "node", lambda: "another")
    assert [in_a_process(32 * PAGE) for _ in range(2)] == [0, 1]


def test_a_full_disk_loses_pages_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space or quota ends before or within a page; any other error is none of space."""
    cache = BlockCache(tmp_path, 64 * PAGE)
    cache.put(1, 0, _content(0))

    def full(number: int) -> Callable[..., int]:
        def write(*what: Any) -> int:
            if not number:
                return PAGE // 2
            raise OSError(number, os.strerror(number))

        return write

    for number in (errno.ENOSPC, errno.EDQUOT, 0):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full(number))
            cache.put(1, 0, _content(1))
            cache.put(1, 1, _content(1))
        assert _found(cache, 1, [0, 1]) == {}
    assert cache.counts()["not_kept"] == 6
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            cache.put(1, 0, _content(1))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DataError, match=r"^`--object-storage-cache-path` \(.*/x\) cannot be used"):
        BlockCache(file / "x", 64 * PAGE)
