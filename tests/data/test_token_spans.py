"""Token spans: mapped and read alike, around the end of a split, and damage told."""

import ctypes
import gc
import mmap
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.token_spans import MappedSpan, ReadSpan, TokenSpan, open_span
from megatron_ext.errors import DataError

DTYPES = [np.uint16, np.int32]


def _write(prefix: Path, dtype: type = np.uint16) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 60_000, 1000).astype(dtype)
    with IndexedWriter(str(prefix), np.dtype(dtype)) as writer:
        for start in range(0, 1000, 50):
            writer.add_document(tokens[start : start + 50], [20, 30])
    return tokens


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_are_those_of_the_file_and_go_on_at_the_splits_beginning(
    mapped: bool, dtype: type, tmp_path: Path
) -> None:
    tokens = _write(tmp_path / "docs", dtype)
    span = open_span(str(tmp_path / "docs"), 4, 36, mapped=mapped)
    split = tokens[100:900]
    assert (span.first, span.tokens, span.dtype) == (100, 800, np.dtype(dtype))
    assert type(span) is (MappedSpan if mapped else ReadSpan)
    begins = np.array([0, 7, 799, 770, 300, 768])
    for length in (1, 33, 799, 800, 2000):
        found = span.gather(begins, length)
        wanted = [[split[(b + i) % 800] for i in range(length)] for b in begins.tolist()]
        assert found.tolist() == [[int(x) for x in row] for row in wanted]


def test_a_read_that_gives_less_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may give fewer bytes than asked for, as when a signal comes in between."""
    tokens = _write(tmp_path / "docs")
    span = open_span(str(tmp_path / "docs"), 0, None, mapped=False)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, rows, at: real(file, [rows[0][:6]], at))
    assert span.gather(np.array([7, 985]), 15).tolist() == [
        tokens[7:22].tolist(), tokens[985:1000].tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("mapped", [True, False])
def test_a_span_reads_in_other_processes(mapped: bool, tmp_path: Path) -> None:
    tokens = _write(tmp_path / "docs")
    span = open_span(str(tmp_path / "docs"), 0, None, mapped=mapped)
    begins = np.array([5, 990])
    before = span.gather(begins, 9)
    copy: TokenSpan = pickle.loads(pickle.dumps(span))
    assert len(pickle.dumps(span)) < 1000 < tokens.nbytes
    assert copy.gather(begins, 9).tolist() == before.tolist()
    pid = os.fork()
    if pid == 0:
        os._exit(int(span.gather(begins, 9).tolist() != before.tolist()))
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("mapped", [True, False])
def test_a_span_that_is_no_longer_used_holds_no_file(mapped: bool, tmp_path: Path) -> None:
    _write(tmp_path / "docs")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_span(str(tmp_path / "docs"), 0, None, mapped=mapped).gather(np.array([5]), 9)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("mapped", [True, False])
def test_slow_reads_ask_for_their_pages_first_and_read_the_same(
    mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = _write(tmp_path / "docs")
    monkeypatch.setattr("megatron_ext.data.token_spans._SLOW", -1.0)
    span = open_span(str(tmp_path / "docs"), 0, None, mapped=mapped)
    asked = []
    if not mapped:
        monkeypatch.setattr(os, "posix_fadvise", lambda *what: asked.append(what))
    for _ in range(2):
        assert span.gather(np.array([3, 500]), 10).tolist() == [
            tokens[3:13].tolist(), tokens[500:510].tolist(),
        ]  # fmt: skip
    assert mapped or [offset for _, offset, _, _ in asked] == [6, 1000]


def _resident(content: mmap.mmap) -> np.ndarray:
    """Return for each page of a map whether it is in memory."""
    pages = -(-len(content) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    address = np.frombuffer(content, dtype=np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(content)), found) == 0
    return np.frombuffer(found, dtype=np.uint8) & 1 == 1


def test_the_pages_of_a_batch_and_no_others_are_brought_to_memory_before_it_is_read(
    tmp_path: Path,
) -> None:
    prefix, tokens = tmp_path / "docs", np.zeros(2_000_000, dtype=np.uint16)
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        writer.add_document(tokens, [len(tokens)])
    file = os.open(f"{prefix}.bin", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    span = open_span(str(prefix), 0, None)
    assert isinstance(span, MappedSpan)
    span._windows(1)
    assert span._map is not None
    if _resident(span._map).any():
        pytest.skip("pages of this file system cannot be dropped from memory, or not be counted")
    begins = np.array([100, 700_000, 1_400_000])
    span._ask_for_pages(begins, 5000)
    size = 2 / mmap.PAGESIZE
    wanted = {
        page
        for begin in begins.tolist()
        for page in range(int(begin * size), int((begin + 4999) * size) + 1)
    }
    end = time.monotonic() + 20
    while not set(np.flatnonzero(_resident(span._map)).tolist()) >= wanted:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert set(np.flatnonzero(_resident(span._map)).tolist()) == wanted


def _calls_of(function: Callable[[], object]) -> int:
    """Return how many calls and returns of Python's and C's functions there are in a call."""
    events: list[str] = []
    gc.disable()
    sys.setprofile(lambda frame, event, what: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(events)


def test_a_large_batch_runs_no_more_python_than_a_small_one(tmp_path: Path) -> None:
    _write(tmp_path / "docs")
    span = open_span(str(tmp_path / "docs"), 0, None)
    span.gather(np.zeros(1, dtype=np.int64), 9)
    seen = []
    for count in (4, 4000):
        begins = np.random.default_rng(0).integers(0, 900, count)
        # The first batch in a process runs more, and so may what other tests have left behind.
        seen.append(min(_calls_of(lambda begins=begins: span.gather(begins, 9)) for _ in range(5)))
    assert seen[0] == seen[1] < 40


def test_damaged_files_are_told_in_a_sentence(tmp_path: Path) -> None:
    prefix = tmp_path / "docs"
    _write(prefix)
    span = open_span(str(prefix), 0, None, mapped=False)
    later = open_span(str(prefix), 4, 36)  # tokens 100 to 899
    # A file that is longer than its index, such as that of another dataset, holds other texts.
    os.truncate(f"{prefix}.bin", 2002)
    for mapped in (True, False):
        with pytest.raises(
            DataError, match=r"docs.bin has 2002 bytes, but .* \(2000 bytes\); copy"
        ):
            open_span(str(prefix), 0, None, mapped=mapped)
    os.truncate(f"{prefix}.bin", 2000)
    shifted = bytearray(Path(f"{prefix}.idx").read_bytes())
    shifted[34 + 4 * 40] = 2  # the first byte of the first sequence
    Path(f"{prefix}x.idx").write_bytes(shifted)
    os.symlink(f"{prefix}.bin", f"{prefix}x.bin")
    with pytest.raises(DataError, match=r"docsx.bin has 2000 bytes, but its index counts 1000 tok"):
        open_span(f"{prefix}x", 0, None)
    os.truncate(f"{prefix}.bin", 1700)
    with pytest.raises(DataError, match=r"cut while it was in use: it has 1700 bytes.*least 1800"):
        later.gather(np.array([10]), 20)
    os.truncate(f"{prefix}.bin", 1000)
    with pytest.raises(DataError, match=r"docs.bin has 1000 bytes, but its index counts 1000 tok"):
        open_span(str(prefix), 0, None)
    with pytest.raises(DataError, match=r"docs.bin was cut while it was in use: it has 1000 by"):
        span.gather(np.array([10, 495]), 20)
    os.remove(f"{prefix}.bin")
    with pytest.raises(DataError, match=r"docs.bin does not exist beside its index"):
        open_span(str(prefix), 0, None)


@pytest.mark.parametrize("mapped", [True, False])
def test_more_spans_than_a_process_may_have_files_are_read(
    mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = _write(tmp_path / "docs")
    monkeypatch.setattr("megatron_ext.data.token_spans._MOST_OPEN", 5)
    before = len(os.listdir("/proc/self/fd"))
    spans = [open_span(str(tmp_path / "docs"), 0, None, mapped=mapped) for _ in range(17)]
    for _ in range(2):
        for first, span in enumerate(spans):
            assert span.gather(np.array([first]), 9)[0].tolist() == tokens[first:][:9].tolist()
            assert len(os.listdir("/proc/self/fd")) <= before + 5
