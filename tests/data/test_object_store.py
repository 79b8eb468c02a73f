"""Datasets at addresses: the tokens of a disk, whatever fails, hangs, is cut short or changes."""

import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data import object_store
from megatron_ext.data.block_cache import PAGE
from megatron_ext.data.indexed import Array, read_index
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.object_store import ObjectStore, RemoteSpan, open_remote_span
from megatron_ext.data.token_spans import TokenSpan, open_span
from megatron_ext.errors import DataError
from tests.data.flaky_storage import FlakyStorage, install

# Python 3.12 warns of forks while the thread of requests, which is idle then, exists.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

AMPLE, SCARCE = 1 << 26, 1 << 21
"""Limits of a cache that the documents fit into, and of one that they do not."""


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 0.2)


def documents(prefix: Path, seed: int = 0) -> str:
    """Write 2.5 million tokens of random documents."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(100):
            ids = rng.integers(0, 60_000, 25_000).astype(np.uint16)
            writer.add_document(ids, [len(ids)])
    return str(prefix)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return documents(tmp_path_factory.mktemp("data") / "docs")


def begins(span: TokenSpan, seed: int, count: int = 40) -> Array:
    return np.random.default_rng(seed).integers(0, span.tokens, count)


def same(span: TokenSpan, local: TokenSpan, seed: int, length: int = 700) -> None:
    """Compare ranges, some of which go around the end or are longer than a page."""
    at = begins(span, seed)
    assert np.array_equal(span.gather(at, length), local.gather(at, length))


@pytest.mark.parametrize("limit", [AMPLE, SCARCE])
def test_ranges_are_those_of_the_disk_and_the_cache_keeps_its_bound(
    limit: int, prefix: str, tmp_path: Path
) -> None:
    store = ObjectStore(tmp_path, limit)
    span, local = open_remote_span(f"flaky://{prefix}", 3, 95, store), open_span(prefix, 3, 95)
    assert (span.first, span.tokens, span.dtype) == (local.first, local.tokens, local.dtype)
    for seed in range(20):
        same(span, local, seed, 70_000 if seed == 10 else 700)
        files = list((tmp_path / "pages").iterdir())
        assert sum(path.stat().st_blocks * 512 for path in files) <= limit
        assert sum(path.stat().st_size for path in files) <= limit
    asked = [(begin, end) for path, begin, end in FlakyStorage.asked if path.endswith(".bin")]
    if limit == AMPLE:
        # Each byte is fetched once, by few requests.
        covered = np.zeros(5_000_000, dtype=int)
        for begin, end in asked:
            covered[begin:end] += 1
        assert covered.max() == 1 and len(asked) <= 2
    else:
        assert np.mean([end - begin for begin, end in asked]) < 2 * PAGE
        assert max(end - begin for begin, end in asked) <= object_store.RANGE * PAGE


def test_requests_that_fail_hang_or_are_cut_short_are_repeated_and_counted(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlakyStorage, "failing", 0.05)
    monkeypatch.setattr(FlakyStorage, "hanging", 0.005)
    monkeypatch.setattr(FlakyStorage, "short", 0.02)
    store = ObjectStore(tmp_path, SCARCE)
    span, local = open_remote_span(f"flaky://{prefix}", 0, None, store), open_span(prefix, 0, None)
    started = time.monotonic()
    for seed in range(100):
        same(span, local, seed)
    passed = time.monotonic() - started
    counts = store.counts()
    # Two descriptions are requests too.
    assert counts["requests"] == len(FlakyStorage.asked) + 2 > 1000
    expected = {"failed": 0.05, "given_up": 0.005, "short": 0.02}
    for name, share in expected.items():
        wanted = share * counts["requests"]
        assert counts[name] > 0 and abs(counts[name] - wanted) < 4 * wanted**0.5, (name, counts)
    assert 0.2e6 < counts["waited_us"] < passed * 1e6, "one hanging request is waited for 0.2 s"
    assert counts["not_kept"] == 0


def test_ranges_of_many_lengths_are_fetched_together_and_nothing_else_is(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed samples have such ranges. Some go around the end, one is longer than a page."""
    store = ObjectStore(tmp_path, 6_000_000)
    span, local = open_remote_span(f"flaky://{prefix}", 3, 95, store), open_span(prefix, 3, 95)
    fetched, fetch = [], store.fetch
    monkeypatch.setattr(store, "fetch", lambda *args: fetched.append(0) or fetch(*args))
    for seed in range(4):
        at, lengths = begins(span, seed, 8), np.random.default_rng(seed).integers(1, 2000, 8)
        at[2:4], lengths[2:4], lengths[5] = span.tokens - np.array([300, 1]), (301, 900), 70_000
        FlakyStorage.asked.clear()
        if seed == 0:
            span.expect(at, lengths)
        found = span.gather_ranges(at, lengths)
        assert np.array_equal(found, local.gather_ranges(at, lengths))
        assert len(fetched) <= seed + 1
        wanted = {
            (span.first + (first + number) % span.tokens) * 2 // PAGE
            for first, length in zip(at.tolist(), lengths.tolist(), strict=True)
            for number in range(length)
        }
        asked = [
            page
            for _, begin, end in FlakyStorage.asked
            for page in range(begin // PAGE, -(-end // PAGE))
        ]
        assert set(asked) <= wanted and (seed or set(asked) == wanted)
        assert seed == 0 or len(asked) == len(set(asked))
    asked = list(FlakyStorage.asked)
    span.gather_ranges(at, lengths)
    assert asked == FlakyStorage.asked and len(fetched) <= 4, "all of it is in the cache"


def test_a_storage_that_does_not_recover_is_told_in_a_sentence(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObjectStore(tmp_path, AMPLE)
    span = open_remote_span(f"flaky://{prefix}", 0, None, store)
    monkeypatch.setattr(FlakyStorage, "failing", 1.0)
    told = r"docs.bin cannot be read \(the storage is busy, after 7 attempts\); check the network"
    with pytest.raises(DataError, match=told):
        span.gather(np.array([5]), 10)
    assert "docs.bin is not answered (the storage is busy); it is asked again" in caplog.text
    # Nothing of it is kept, and the storage is asked again.
    monkeypatch.setattr(FlakyStorage, "failing", 0.0)
    same(span, open_span(prefix, 0, None), 0)


def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path, prefix: str) -> None:
    def refused(address: str) -> str:
        with pytest.raises(DataError) as found:
            open_remote_span(address, 0, None, ObjectStore(tmp_path / "cache", AMPLE))
        return str(found.value)

    assert refused("nowhere://b/web") == (
        "nowhere://b/web.idx has a scheme that fsspec does not know; use a folder, or a scheme "
        "such as s3, gs or az."
    )
    gone = f"flaky://{tmp_path}/gone"
    assert refused(gone).startswith(f"{gone}.idx does not exist; give the address without .bin/.i")
    copy = tmp_path / "copy"
    for suffix in ("bin", "idx"):
        copy.with_suffix(f".{suffix}").write_bytes(Path(f"{prefix}.{suffix}").read_bytes())
    os.truncate(f"{copy}.bin", 1000)
    assert f"{copy}.bin has 1000 bytes, but its index counts 2500000 tokens" in refused(
        f"flaky://{copy}"
    )
    Path(f"{copy}.idx").write_bytes(b"no index")
    assert refused(f"flaky://{copy}").startswith(f"flaky://{copy}.idx does not start with the ind")
    with pytest.raises(DataError, match=r"only pretraining with `--data-order direct` reads; give"):
        read_index("s3://bucket/web")
    file = tmp_path / "file"
    file.write_text("")
    closed = ObjectStore(file / "x", AMPLE)
    with pytest.raises(DataError, match=r"^`--object-storage-cache-path` \(.*/x\) cannot be writ"):
        open_remote_span(f"flaky://{prefix}", 0, None, closed)


@pytest.mark.parametrize("etag", [True, False])
def test_an_object_that_changed_is_read_anew(
    etag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mark of its version nothing that is kept is used again."""
    monkeypatch.setattr(FlakyStorage, "etag", etag)
    prefix, address = str(tmp_path / "docs"), f"flaky://{tmp_path}/docs"
    for seed in range(2):
        documents(Path(prefix), seed)
        store = ObjectStore(tmp_path / "cache", AMPLE)
        span = open_remote_span(address, 0, None, store)
        same(span, open_span(prefix, 0, None), seed)
    indices = list((tmp_path / "cache" / "indices").rglob("*.idx"))
    assert len(indices) == 1
    # A change in the middle of a run is found when the object is looked at again.
    monkeypatch.setattr(object_store, "_RECHECK", 0.0)
    monkeypatch.setattr(store._own.cache, "find", lambda key, pages: np.full(len(pages), -1))
    same(span, open_span(prefix, 0, None), 1)
    documents(Path(prefix), 3)
    if etag:
        for seconds in (0.0, 300.0):  # Once it has changed, nothing of it is read any more.
            monkeypatch.setattr(object_store, "_RECHECK", seconds)
            with pytest.raises(DataError, match=r"docs.bin has changed since the run began, so th"):
                span.gather(np.array([5]), 10)


def test_an_index_is_copied_once_and_a_bad_copy_never_takes_its_place(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            store = ObjectStore(tmp_path, AMPLE)
            index = store.index(f"flaky://{prefix}")
            store._own.cache.count(not_kept=len(FlakyStorage.asked))
            os._exit(int(len(index.lengths) != 100))
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert ObjectStore(tmp_path, AMPLE).counts()["not_kept"] == 1
    monkeypatch.setattr(FlakyStorage, "failing", 1.0)
    assert len(ObjectStore(tmp_path, AMPLE).index(f"flaky://{prefix}").lengths) == 100
    with pytest.raises(DataError, match="the storage is busy"):
        ObjectStore(tmp_path / "other", AMPLE).index(f"flaky://{prefix}")
    monkeypatch.setattr(FlakyStorage, "failing", 0.0)
    assert len(ObjectStore(tmp_path / "other", AMPLE).index(f"flaky://{prefix}").lengths) == 100


def test_processes_share_the_cache_and_a_killed_one_leaves_it_whole(
    prefix: str, tmp_path: Path
) -> None:
    """A span that its parent has read is read by children, as by ranks and loaders' workers."""
    span = open_remote_span(f"flaky://{prefix}", 0, None, ObjectStore(tmp_path, SCARCE))
    local = open_span(prefix, 0, None)
    same(span, local, 0)
    span.expect(begins(span, 1), np.full(40, 700))
    children = []
    for seed in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for turn in range(1000 if seed == 2 else 4):
                    same(span, local, 10 * seed + turn)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    time.sleep(0.2)
    os.kill(children[2], signal.SIGKILL)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, signal.SIGKILL]
    same(span, local, 5)
    copy: RemoteSpan = pickle.loads(pickle.dumps(span))
    same(copy, local, 6)


def test_what_is_expected_is_fetched_before_it_is_read_and_not_twice(
    prefix: str, tmp_path: Path
) -> None:
    store = ObjectStore(tmp_path, AMPLE)
    span, local = open_remote_span(f"flaky://{prefix}", 0, None, store), open_span(prefix, 0, None)
    FlakyStorage.asked.clear()
    span.expect(begins(span, 0), np.full(40, 700))
    same(span, local, 0)
    before = list(FlakyStorage.asked)
    assert len(set(before)) == len(before) > 0
    waited = store.counts()["waited_us"]
    same(span, local, 0)
    assert before == FlakyStorage.asked and store.counts()["waited_us"] == waited
