"""Runs on datasets at addresses: the samples and losses of a disk, and what is refused."""

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from megatron_ext.config.output import user_cache
from megatron_ext.data import requests
from megatron_ext.data.block_cache import COUNTS
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.extras.ledger.ledger import Ledger
from megatron_ext.programs.ledger import main as ledger_tool
from megatron_ext.text.data import storage
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.direct import DirectDataset
from megatron_ext.text.data.plan import plan_run
from megatron_ext.text.data.splits import marks_of
from megatron_ext.text.data.storage import StorageNotes, note_of, store_of
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.data.flaky_storage import FlakyStorage, install
from tests.training_runs import (
    NULL,
    SAME_WEIGHTS,
    check_refused,
    config_of,
    documents,
    prepared,
    train_steps,
    without,
)

# Python 3.12 warns of forks while the thread of requests, which is idle then, exists.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

WORDS = [
    *without(SAME_WEIGHTS, "--num-layers", "--num-workers"),
    *NULL,
    *"--num-layers 1 --padded-vocab-size 128 --data-order direct --train-iters 4".split(),
]


@pytest.fixture(autouse=True)
def flaky(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 0.3)
    storage._store.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two datasets of 42 and 28 thousand tokens."""
    folder = tmp_path_factory.mktemp("data")
    documents(folder / "a", 600)
    documents(folder / "b", 400)
    return folder


def _dataset(where: str, *more: str, samples: int = 4) -> tuple[DirectDataset, DataConfig]:
    words = ["--data-path", "0.7", f"{where}/a", "0.3", f"{where}/b", *more]
    config = config_of([*WORDS, "--num-workers", "0", *words, "--train-iters", str(samples)])
    plan = plan_run(config, None, 0)
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    found = DirectDataset(plan.order, plan.spans, marks_of(config, tokenizer), plan.total)
    return found, config.section(DataConfig)


def _same_samples(where: str, folder: Path, cache: Path, *more: str) -> dict[str, int]:
    """Compare all samples of 25 steps with those of a disk; return the counts of requests."""
    local, _ = _dataset(str(folder), *more, samples=25)
    there, data = _dataset(where, "--object-storage-cache-path", str(cache), *more, samples=25)
    names = {name.rpartition("/")[2] for _, name, *_ in there.token_ranges(0, 50)}
    assert names == {"a", "b"}
    for start in range(0, len(local), 10):
        stop = min(start + 10, len(local))
        assert there.expect is not None and local.expect is None
        there.expect(range(start, stop))
        wanted, found = local.batch(start, stop), there.batch(start, stop)
        for name, values in wanted.items():
            assert torch.equal(values, found[name]), (name, start)
    return dict(store_of(data).counts())


def test_ranks_train_as_from_a_disk_also_when_data_moves_and_the_note_tells_the_rate(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks share a cache; one run reads ahead itself, one has workers and begins on disk."""
    monkeypatch.setattr(FlakyStorage, "failing", 0.2)
    monkeypatch.setattr(storage, "INTERVAL", 0.0)
    words = [*WORDS, "--split", "90,10,0", "--eval-interval", "2"]
    words = [*without(words, "--eval-iters"), "--eval-iters", "1"]

    def run(where: str, name: str, *more: str) -> list[float]:
        data = ["--data-path", "0.7", f"{where}/a", "0.3", f"{where}/b", *more]
        data += ["--object-storage-cache-path", cache]
        rows = train_steps([*words, *data], tmp_path / name, 2)
        return [row["lm loss"] for row in rows]

    cache, there = str(tmp_path / "cache"), f"flaky://{folder}"
    wanted = run(str(folder), "disk", "--num-workers", "0", "--save-interval", "2")
    assert "object storage" not in capfd.readouterr().out
    assert run(there, "there", "--num-workers", "0") == wanted
    notes = re.findall(r"> object storage on this machine: (.*)", capfd.readouterr().out)
    # After each of 4 steps and at the end, on one of the ranks.
    assert len(notes) == 5
    assert re.match(r"\d+ requests, 0.\d MiB; \d+ repeated \(.*\); readers waited", notes[-1])

    cache, load = str(tmp_path / "another"), ["--load", str(tmp_path / "disk"), "--ckpt-step", "2"]
    assert run(there, "moved", *load, "--num-workers", "1") == wanted[2:]
    assert "the mixture changes" not in capfd.readouterr().out
    _check_ledgers(tmp_path, folder, there)


def _check_ledgers(saves: Path, folder: Path, there: str) -> None:
    """Compare what the runs on addresses have read with that of the run on a disk."""
    found = {}
    for name in ("disk", "there", "moved"):
        path = saves / f"{name}.parquet"
        assert ledger_tool([str(saves / name), "--export", str(path)]) == 0
        found[name] = pq.read_table(path).to_pylist()
    for row in found["disk"]:
        row["source"] = row["source"].replace(str(folder), there)
    assert {row["step"] for row in found["disk"]} == {1, 2, 3, 4}
    assert found["disk"] == found["there"] == found["moved"]
    for name in ("a", "b"):
        texts = [
            Ledger(saves / run).documents_of(f"{where}/{name}").read(1000, 50).tolist()
            for run, where in (("disk", folder), ("there", there))
        ]
        assert texts[0] == texts[1]
    assert ledger_tool([str(saves / "disk"), "--document", f"file://{folder}/a", "5"]) == 0


def test_packed_samples_are_those_of_the_disk(folder: Path, tmp_path: Path) -> None:
    counts = _same_samples(f"flaky://{folder}", folder, tmp_path, "--document-packing", "best_fit")
    assert counts["requests"] > 4


def test_a_run_with_a_schedule_and_other_validation_data_reads_from_addresses(
    folder: Path, tmp_path: Path
) -> None:
    def words(where: str) -> list[str]:
        path = tmp_path / "mixture.yaml"
        path.write_text(
            f"stages:\n  - {{samples: 40, weights: {{'{where}/a': 3, '{where}/b': 1}}}}\n"
            f"  - {{weights: {{'{where}/b': 1}}}}\nmax_epochs: {{'{where}/b': 2}}\n"
        )
        cache = ["--object-storage-cache-path", str(tmp_path / "cache")]
        own = ["--valid-data-path", f"{where}/b", "--data-schedule", str(path)]
        return [*WORDS, "--num-workers", "0", *own, *(cache if "flaky" in where else [])]

    seen = []
    for where in (f"flaky://{folder}", str(folder), f"file://{folder}"):
        task, config, tokenizer = prepared(words(where))
        train = task.datasets(config, tokenizer, (64, 0, 0), lambda: True).train
        assert isinstance(train, DirectDataset)
        seen.append(train.batch(30, 60)["tokens"])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_other_orders_and_bad_addresses_are_refused_in_a_sentence(
    folder: Path, tmp_path: Path
) -> None:
    megatron = [*without(WORDS, "--data-order"), "--num-workers", "0"]
    cache = ["--object-storage-cache-path", str(tmp_path / "cache")]
    with pytest.raises(DataError, match=r"^s3://b/web is an address, which only pretraining with "):
        prepared([*megatron, "--data-path", "s3://b/web"])
    check_refused(
        [*megatron, "--data-path", "s3://b/web", *cache],
        "`--object-storage-cache-path` is for addresses, which only the direct order reads; give ",
    )
    prepared([*megatron, "--data-path", f"file://{folder}/a"])
    with pytest.raises(DataError, match=r"gone.idx does not exist; give the address without .bin"):
        prepared([*WORDS, "--num-workers", "0", "--data-path", f"flaky://{folder}/gone", *cache])


def test_the_note_names_what_went_wrong() -> None:
    counts = {"requests": 1000, "bytes": 3 << 20, "failed": 50, "given_up": 5, "short": 1}
    assert note_of({**counts, "waited_us": 2_500_000, "not_kept": 3}) == (
        "object storage on this machine: 1,000 requests, 3.0 MiB; 56 repeated (5.6%: 50 failed, "
        "5 too slow, 1 cut short); readers waited 2.5 s; 3 pages found no space on the disk"
    )


class _Faults:
    """A server's application: 1 in 20 requests for ranges fails, and 1 in 200 hangs to the end."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self.application, self.closed = application, threading.Event()
        self.lock = threading.Lock()
        self.asked, self.met = 0, {"failed": 0, "given_up": 0}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        with self.lock:
            self.asked += "HTTP_RANGE" in environ
            fate = self.asked % 200 if "HTTP_RANGE" in environ else 0
        if fate % 20 == 10:
            self.met["failed"] += 1
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if fate == 101:
            self.met["given_up"] += 1
            self.closed.wait(60)
        return self.application(environ, start_response)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Faults]:
    """Run moto's S3 with faults in front of it, and an empty bucket named data."""
    pytest.importorskip("s3fs", reason="needs s3fs")
    pytest.importorskip("moto.server", reason="needs moto[server]")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    faults = _Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield faults
    faults.closed.set()
    server.shutdown()
    server.server_close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_samples_from_s3_are_those_of_the_disk_though_requests_fail_and_hang(
    bucket: _Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is smaller than the data, so that pages are fetched again and again."""
    monkeypatch.setattr(requests, "SHORTEST", 1.0)
    folder = tmp_path / "disk"
    folder.mkdir()
    for name in ("a", "b"):
        with IndexedWriter(str(folder / name), np.dtype(np.uint16)) as writer:
            tokens = np.random.default_rng(0).integers(0, 89, 1_000_000)
            writer.add_document(tokens.astype(np.uint16), [len(tokens)])
    fs, _ = fsspec.core.url_to_fs("s3://data")
    fs.mkdir("data")
    for path in folder.glob("*.???"):
        fs.put_file(str(path), f"data/{path.name}")
    cache = tmp_path / "cache"
    counts = _same_samples("s3://data", folder, cache, "--object-storage-cache-size", "0.001")
    assert bucket.asked > 210 and counts["requests"] >= bucket.asked + 4
    assert counts["failed"] == bucket.met["failed"] >= 10
    # A busy machine may be slow where the server is not.
    assert counts["given_up"] >= bucket.met["given_up"] >= 1 and counts["short"] == 0
    assert sum(path.stat().st_size for path in (cache / "pages").iterdir()) <= 2**30 * 0.001
    with pytest.raises(DataError, match=r"s3://data/gone/a.idx does not exist"):
        _dataset("s3://data/gone", "--object-storage-cache-path", str(tmp_path))


class _Ranges(SimpleHTTPRequestHandler):
    """A handler that answers requests for a range of a file."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return super().do_GET()
        content = Path(self.translate_path(self.path)).read_bytes()
        part = content[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {asked[1]}-{asked[2]}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)
        return None

    def log_message(self, *what: Any) -> None:
        pass


@pytest.mark.parametrize("ranges", [True, False])
def test_samples_come_from_a_server_of_files_if_it_knows_ranges(
    ranges: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp")
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", _Ranges.log_message)
    handler = partial(_Ranges if ranges else SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}"
        if ranges:
            assert _same_samples(where, folder, tmp_path)["failed"] == 0
        else:
            with pytest.raises(DataError, match=r"^The server of .*/a.idx does not answer re"):
                _dataset(where, "--object-storage-cache-path", str(tmp_path))
        server.shutdown()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"class": "gone_fs.Storage", "err": "install gone_fs"}
    monkeypatch.setitem(requests.known_implementations, "gone", unknown)
    told = r"^gone://b/a.idx needs the package gone_fs, which is not installed; run `pip install g"
    with pytest.raises(DataError, match=told):
        _dataset("gone://b", "--object-storage-cache-path", str(tmp_path))


def test_requests_are_reported_at_intervals_since_the_run_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, said = [0.0], list[str]()
    counts = dict.fromkeys(COUNTS, 0) | {"requests": 70, "bytes": 5 << 20}
    store: Any = SimpleNamespace(counts=lambda: counts, is_used=True)
    run: Any = SimpleNamespace(reporters=SimpleNamespace(say=said.append))
    monkeypatch.setattr(storage.time, "monotonic", lambda: now[0])
    notes = StorageNotes(run, store)
    for seconds in (599, 600, 601, 602, 1201, 1202):
        now[0] = float(seconds)
        counts["requests"] += 1
        notes.after_step()
    assert [text.partition(", ")[0] for text in said] == [
        f"object storage on this machine: {count} requests" for count in (3, 6)
    ]
    notes.on_train_end()
    assert len(said) == 3 and ", 0.0 MiB; " in said[-1]


def test_the_cache_has_the_size_and_the_folder_of_the_flags(tmp_path: Path) -> None:
    data = DataConfig(object_storage_cache_path=str(tmp_path), object_storage_cache_size=1.5)
    assert (store_of(data).folder, store_of(data).limit) == (tmp_path, 3 << 29)
    assert store_of(data) is store_of(DataConfig(**vars(data)))
    assert store_of(DataConfig()).folder == user_cache() / "data"


def test_requests_are_reported_by_runs_that_make_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each machine one rank prints; the others have no sink."""
    for used, sinks, reports in ((True, [1], True), (False, [1], False), (True, [], False)):
        store = SimpleNamespace(is_used=used, counts=dict)
        monkeypatch.setattr(storage, "store_of", lambda data, store=store: store)
        config = SimpleNamespace(section=lambda kind: kind())
        run: Any = SimpleNamespace(config=config, reporters=SimpleNamespace(sinks=sinks))
        assert (storage.storage_notes(run) is not None) == reports


def test_a_flag_decides_whether_files_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(storage, "open_span", lambda *span, mapped: opened.append((span, mapped)))
    for flag in (True, False):
        storage.open_tokens(DataConfig(mmap_bin_files=flag), "/a", 3, 7)
    assert opened == [(("/a", 3, 7), True), (("/a", 3, 7), False)]
