"""A run of preprocessing that is stopped says why, and leaves nothing half-written."""

import gzip
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.data import indexed_writer
from megatron_ext.disk.reading import UnreadableFile
from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess import datasets as dataset_module
from megatron_ext.text.preprocess import encode as texts
from megatron_ext.text.preprocess import inputs
from megatron_ext.text.preprocess import parts as part_module
from megatron_ext.text.preprocess import workers as worker_module
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.jobs import encode_part
from megatron_ext.text.preprocess.parts import PartWriter, WorkDirectory, failure_of, read_marker
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.fast import FastEncoder
from tests.text import tiny
from tests.text.preprocess.runs import (
    check_pair,
    huggingface,
    left_in,
    run,
    texts_of,
    write_lines,
)
from tests.text.tiny import read_pair


def corpus_with_bad_lines(tmp_path: Path, bad: dict[int, bytes]) -> tuple[Path, list[bytes]]:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(200))
    lines = path.read_bytes().split(b"\n")
    for number, line in bad.items():
        lines[number - 1] = line
    path.write_bytes(b"\n".join(lines))
    return path, lines


@pytest.mark.parametrize("at", [1, 97, 200])
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_line_stops_the_run_and_is_named(tmp_path: Path, at: int, packed: bool) -> None:
    path = tiny.write_jsonl(tmp_path / "good.jsonl", tiny.corpus(5))
    run(tmp_path, path)
    before = read_pair(tmp_path / "out_text_document")
    path, _ = corpus_with_bad_lines(tmp_path, {at: b'{"txt": "a"}'})
    if packed:
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
        path = path.with_suffix(".gz")
    start = time.monotonic()
    with pytest.raises(DataError) as caught:
        run(tmp_path, path)
    assert str(caught.value).startswith(f"{path} line {at} has no key 'text' (it has txt; ")
    assert time.monotonic() - start < 10
    assert read_pair(tmp_path / "out_text_document") == before
    outputs = [name for name in left_in(tmp_path) if name != "out.parts"]
    assert outputs == ["out_text_document.bin", "out_text_document.idx"]


def test_quarantine(tmp_path: Path) -> None:
    bad = {3: b"no json", 90: b'{"text": 4}', 200: b'{"text": "\xff"}'}
    path, lines = corpus_with_bad_lines(tmp_path, bad)
    report, _ = run(tmp_path, path, path, on_bad_line="quarantine")
    assert (report.rejected, report.documents) == (6, 394)
    with open(tmp_path / "out.rejected.jsonl", encoding="utf-8") as stream:
        found = [json.loads(line) for line in stream]
    assert [(r["file"], r["line"]) for r in found] == [(str(path), n) for n in bad] * 2
    assert found[0]["reason"].startswith("is not valid JSON (")
    reason = "has int under key 'text', not a text or a list of texts"
    assert found[1] == {"file": str(path), "line": 90, "reason": reason, "text": '{"text": 4}'}
    assert found[2]["text"] == '{"text": "\\xff"}'
    kept = [json.loads(line)["text"] for n, line in enumerate(lines[:200], 1) if n not in bad]
    check_pair(tmp_path, kept * 2)
    run(tmp_path, tiny.write_jsonl(path, tiny.corpus(5)), on_bad_line="quarantine")
    assert not (tmp_path / "out.rejected.jsonl").exists()


def test_texts_that_the_tokenizer_refuses(tmp_path: Path) -> None:
    flags = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    texts = ["1 2", "x", "3", "4  5"]
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    with pytest.raises(DataError, match="in.jsonl line 2 cannot be tokenized: the text is not int"):
        run(tmp_path, path, flags=flags)
    report, _ = run(tmp_path, path, flags=flags, on_bad_line="quarantine")
    assert (report.documents, report.rejected, report.tokens) == (2, 2, 5)


FULL = OSError(28, "No space left on device")


def fail(with_: Exception | None) -> Callable[..., None]:
    def failing(*_: Any) -> None:
        if with_ is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise with_ or AssertionError

    return failing


@pytest.mark.parametrize(
    ("failure", "error", "sentence"),
    [
        (None, MachineFault, r"Worker \d was killed by signal 9 in .*in.jsonl, bytes \d+ to"),
        (KeyError("a"), RuntimeError, r"(?s)A worker failed:.*KeyError: 'a'"),
        (FULL, MachineFault, r"A worker could not write or read: the disk of "),
    ],
)
def test_the_failure_of_a_worker_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any, error: Any, sentence: str
) -> None:
    monkeypatch.setattr(texts.TextEncoder, "encode", fail(failure))
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(50))
    start = time.monotonic()
    with pytest.raises(error, match=sentence):
        run(tmp_path, path)
    assert time.monotonic() - start < 30
    assert [name for name in left_in(tmp_path) if not name.endswith(".parts")] == []


def test_a_part_whose_worker_is_killed_is_encoded_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt is made when all other parts are done, so that nothing runs beside it."""
    documents = tiny.corpus(160)
    documents[1]["text"] = "MARK"
    path = tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    real, markers = texts.TextEncoder.encode, tmp_path / "markers"

    def encode(self: Any, lines: Any, *rest: Any) -> int:
        if any(b"MARK" in line for line in lines):
            found = len(list((tmp_path / "out.parts").glob("p0*.json")))
            with markers.open("a") as out:
                out.write(f"{found} ")
            if len(markers.read_text().split()) < 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(self, lines, *rest)

    monkeypatch.setattr(texts.TextEncoder, "encode", encode)
    _, said = run(tmp_path, path)
    check_pair(tmp_path, texts_of(documents))
    others = len(inputs.cut([inputs.Source(str(path), "", "plain")], 2, 0.01)) - 1
    assert others == 3
    assert [int(found) for found in markers.read_text().split()[1:]] == [others] * 2
    again = (
        r"Worker \d was killed by signal 9 in .*in.jsonl, bytes 0 to \d+; it is encoded again, al"
    )
    assert [bool(re.match(again, line)) for line in said] == [False, True, True]


def stop_after(parts: int, monkeypatch: pytest.MonkeyPatch, folder: Path, path: Path) -> None:
    real = worker_module.encode_part

    def some(job: Any, number: int, *rest: Any) -> None:
        if number >= parts:
            raise OSError("pulled the plug")
        real(job, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "encode_part", some)
        with pytest.raises(MachineFault, match="pulled the plug"):
            run(folder, path, workers=1)


def test_unchanged_parts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(300))
    stop_after(4, monkeypatch, tmp_path, path)
    report, said = run(tmp_path, path, workers=2)
    assert report.resumed_parts == 4
    assert said[0].startswith("Resuming: 4 of ")
    check_pair(tmp_path, texts_of(tiny.corpus(300)))
    assert not (tmp_path / "out.parts").exists()

    for change in ({"append_eod": False}, {"json_keys": ("title",)}, {"flags": huggingface()}):
        stop_after(4, monkeypatch, tmp_path, path)
        assert run(tmp_path, path, **change)[0].resumed_parts == 0
    stop_after(4, monkeypatch, tmp_path, path)
    tiny.write_jsonl(path, tiny.corpus(300, seed=9))
    assert run(tmp_path, path)[0].resumed_parts == 0


def test_a_hidden_change_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = tiny.corpus(300)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    about = path.stat()
    stop_after(4, monkeypatch, tmp_path, path)
    documents[0]["text"] = str(documents[0]["text"])[::-1]
    tiny.write_jsonl(path, documents)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)
    assert run(tmp_path, path)[0].resumed_parts == 0
    check_pair(tmp_path, texts_of(documents))


def test_a_damaged_part_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(300))
    stop_after(4, monkeypatch, tmp_path, path)
    (victim,) = (tmp_path / "out.parts").glob("p000002.*.bin")
    victim.write_bytes(victim.read_bytes()[:-2])
    assert run(tmp_path, path)[0].resumed_parts == 3
    check_pair(tmp_path, texts_of(tiny.corpus(300)))


def test_two_runs_at_one_prefix(tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    refused = pytest.raises(DataError, match=r"Another run is writing .*out \(it holds .*lock\); w")
    with WorkDirectory(str(tmp_path / "out")), refused:
        run(tmp_path, path)


def test_files_in_the_way_of_the_work_are_left_alone(tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    (tmp_path / "out.parts").write_text("mine")
    with pytest.raises(ConfigError, match=r"which cannot be made or written \(File exists\); mend"):
        run(tmp_path, path)
    assert (tmp_path / "out.parts").read_text() == "mine"
    (tmp_path / "out.parts").unlink()
    file = tmp_path / "out.parts" / "thesis.txt"
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"out.parts for the work, but it holds other files; mov"):
        run(tmp_path, path)
    assert file.read_text() == "mine"


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path)
    run(tmp_path, tiny.write_jsonl(tmp_path / "old.jsonl", tiny.corpus(5)))
    old = read_pair(tmp_path / "out_text_document")

    # The disk is full at the tokens, or when both files are written.
    for module, function in ((indexed_writer, "_kernel_copy"), (dataset_module, "publish")):
        with monkeypatch.context() as patch:
            patch.setattr(module, function, fail(FULL))
            with pytest.raises(DataError) as caught:
                run(tmp_path, tmp_path / "lines.jsonl")
        assert not list(tmp_path.glob("*.joining"))
    said = f"{tmp_path}/out was not written ([Errno 28] No space left on device); finished parts ar"
    assert str(caught.value).startswith(said)
    assert left_in(tmp_path) == ["out.parts", "out_text_document.bin", "out_text_document.idx"]
    assert read_pair(tmp_path / "out_text_document") == old
    assert run(tmp_path, tmp_path / "lines.jsonl")[0].resumed_parts > 0
    check_pair(tmp_path, texts_of(tiny.corpus(60)))


def test_a_worker_that_outlives_its_plan_leaves_the_markers_of_the_next_one(tmp_path: Path) -> None:
    """The worker begins a part after the next run has cleared the folder, and ends it last."""
    for key in ("new", "old"):
        writer = PartWriter(tmp_path, key, 0, 1, [np.dtype("uint16")])
        writer.count(5, 5 if key == "new" else 4)
        writer.finish()
    found = read_marker(tmp_path, "new", 0)
    assert found is not None and (found.key, found.documents) == ("new", 5)
    assert read_marker(tmp_path, "other", 0) is None


def test_a_run_resumed_in_another_folder_reads_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tiny.write_jsonl(tmp_path / name / "in.jsonl", tiny.corpus(300, seed=ord(name)))
    monkeypatch.chdir(tmp_path / "a")
    stop_after(4, monkeypatch, tmp_path, Path("in.jsonl"))
    monkeypatch.chdir(tmp_path / "b")
    report, _ = run(tmp_path, "../a/in.jsonl")
    assert report.resumed_parts == 4
    check_pair(tmp_path, texts_of(tiny.corpus(300, seed=ord("a"))))


def test_refused_lines_of_a_file_with_any_name_are_written(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"in\xff.jsonl")
    path.write_bytes(b'{"text": 3}\n{"text": "ba"}\n')
    report, _ = run(tmp_path, path, on_bad_line="quarantine")
    assert report.rejected_path is not None
    (record,) = map(json.loads, report.rejected_path.read_text().splitlines())
    assert record["line"] == 1 and "in" in record["file"]


def test_a_marker_with_values_of_other_types_is_none(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    tmp_path = tmp_path / "parts"
    tmp_path.mkdir()
    writer = PartWriter(tmp_path, "key", 0, 1, [np.dtype("uint16")])
    writer.tally({"a": {"b": 1}})
    writer.finish()
    path = next(tmp_path.glob("*.json"))
    good = json.loads(path.read_text())
    assert read_marker(tmp_path, "key", 0) is not None
    for change in (
        {"host": 3}, {"stem": None}, {"key": 3}, {"lines": True}, {"tokens": -1},
        {"seconds": "1"}, {"ended": None}, {"tally": {"a": {"b": -1}}}, {"tally": {"a": 1}},
        {"more": 1}, {"documents": 1.5}, {"sizes": {"../other": 0}}, {"stem": "../p000000"},
    ):  # fmt: skip
        path.write_text(json.dumps({**good, **change}))
        assert read_marker(tmp_path, "key", 0) is None, change
    path.write_text(json.dumps(good))
    assert read_marker(tmp_path, "key", 0) is not None


def test_blank_lines_at_the_end_of_a_file_are_lines_of_it(tmp_path: Path) -> None:
    """They keep their turn in the dealing to partitions, and later files their own numbers."""
    texts = texts_of(tiny.corpus(8))
    first = tiny.write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts[:3]], end="\n \n")
    second = tiny.write_jsonl(tmp_path / "b.jsonl", [{"text": t} for t in texts[3:]])
    run(tmp_path, first, second, partitions=2)
    # Line 3 of the whole input is blank, and line 4 is the first of the second file.
    check_pair(tmp_path, [texts[n] for n in (0, 2, 3, 5, 7)], "0_text_document")
    check_pair(tmp_path, [texts[n] for n in (1, 4, 6)], "1_text_document")


def test_a_run_that_failed_leaves_its_logs(tmp_path: Path) -> None:
    for name, is_kept in (("slurm_1_0.log", True), ("p000000.k.json", True), ("plan.json", False)):
        with pytest.raises(KeyError), WorkDirectory(str(tmp_path / name)) as work:
            (work.folder / name).touch()
            raise KeyError
        assert work.folder.exists() == is_kept
    with pytest.raises(KeyError), WorkDirectory(str(tmp_path / "s"), resumable=False) as work:
        (work.folder / "slurm_1_0.log").touch()
        raise KeyError
    assert not work.folder.exists()
    for resumable, kept in ((True, "finished parts are kept"), (False, "nothing is kept")):
        with (
            pytest.raises(DataError, match=rf"/v1.0 was not written \(.*\); {kept}, so free space"),
            WorkDirectory(str(tmp_path / "v1.0"), resumable=resumable) as work,
        ):
            (work.folder / "p000000.k.json").touch()
            raise FULL
        assert work.folder.exists() == resumable


def test_a_run_that_starts_over_takes_no_part_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast engine has encoded some parts, and differs from the tokenizer in a later one."""
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(300))
    stop_after(4, monkeypatch, tmp_path, path)
    real, main = FastEncoder.encode_batch, os.getpid()

    def wrong(self: FastEncoder, texts: Any) -> Any:
        ids = real(self, texts)
        return ids if os.getpid() == main else [np.append(each, 5) for each in ids]

    monkeypatch.setattr(FastEncoder, "encode_batch", wrong)
    report, said = run(tmp_path, path)
    assert [line.partition(" ")[0] for line in said] == ["Resuming:", "Tokenizing", "Starting"]
    assert report.resumed_parts == 0
    check_pair(tmp_path, texts_of(tiny.corpus(300)))


def test_a_resumed_run_keeps_the_files_of_finished_parts_alone(tmp_path: Path) -> None:
    """Part 1 was killed while it was written, and part 2 gave up."""
    (tmp_path / "in").write_bytes(b"x" * 9)
    parts = [Part(str(tmp_path / "in"), "in", 0, 9, "plain", 9) for _ in range(3)]
    with WorkDirectory(str(tmp_path / "out")) as work:
        work.begin({"a": 1}, parts)
        writers = [PartWriter(work.folder, work.key, n, 2, [np.dtype("u2")]) for n in range(3)]
        writers[0].finish()
        files = len(list(work.folder.glob("p000002.*")))
        assert files == len(list(work.folder.glob("p000001.*"))) == 7
        writers[2].abandon()
        assert not list(work.folder.glob("p000002.*"))
        assert list(work.finished(3)) == [0]
        left = sorted(path.name.split(".")[0] for path in work.folder.glob("p0*"))
        assert left == ["p000000"] * (files + 1)
        writers[1].abandon()
        work.keep = True
    with WorkDirectory(str(tmp_path / "out")) as work:
        assert work.resumed_parts({"a": 2}) is None
        assert work.resumed_parts({"a": 1}) == parts
        # One of its inputs has become shorter, or is gone, such as the copy of a packed file.
        work.begin({"a": 1}, [*parts, Part(str(tmp_path / "in"), "in", 0, 10, "plain", 10)])
        assert work.resumed_parts({"a": 1}) is None
        work.begin({"a": 1}, [*parts, Part(str(tmp_path / "gone"), "in", 0, 9, "gzip", 9)])
        assert work.resumed_parts({"a": 1}) is None


def test_a_failure_without_a_message_is_damaged(tmp_path: Path) -> None:
    for messages in ([], None, "text"):
        path = tmp_path / "failed.json"
        path.write_text(json.dumps({"kind": "refused", "key": "k", "messages": messages}))
        with pytest.raises(UnreadableFile, match="it holds no messages"):
            failure_of(path)


def test_the_progress_ends_with_a_run_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    progress = SimpleNamespace(close=lambda: ended.append(True))
    monkeypatch.setattr(worker_module, "progress_of", lambda job, todo: progress)
    job: Any = SimpleNamespace(options=SimpleNamespace(workers=1, output_prefix="out"))
    monkeypatch.setattr(worker_module.PartPool, "run", fail(DataError("bad line")))
    with pytest.raises(DataError, match="bad line"):
        worker_module.encode_parts(job, [0], print)
    assert ended == [True]


def test_a_marker_tells_who_wrote_a_part_when_and_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module.socket, "gethostname", lambda: "node7")
    clock = iter([50.0, 53.5])
    monkeypatch.setattr(part_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(part_module.time, "time", lambda: 1e9)
    writer = PartWriter(tmp_path, "key", 3, 2, [np.dtype("u2"), np.dtype("i4")])
    for key in (0, 1):
        for stream in (0, 1):
            ids = np.arange(3 + stream)
            writer.write(key, stream, texts.Encoded(ids, ids[:1], ids[:2]))
    writer.reject(4, "is bad (very)", b"\xff{")
    writer.reject(9, "is bad (a little)", b"{")
    writer.skip(11)
    writer.count(7, 2)
    writer.count(5, 3)
    writer.finish()
    done = read_marker(tmp_path, "key", 3)
    assert done is not None
    assert (done.host, done.seconds, done.ended) == ("node7", 3.5, 1e9)
    assert (done.lines, done.documents, done.tokens) == (12, 5, 14)
    assert (done.rejected, done.skipped) == (2, 1)
    assert done.tally == {part_module.REFUSED: {"is bad": 2}}
    sizes = {name.split(".", 2)[2]: size for name, size in done.sizes.items()}
    assert [sizes[f"k{k}.s{s}.bin"] for k in (0, 1) for s in (0, 1)] == [6, 8, 12, 16]
    records = list(part_module.read_rejected(tmp_path, done))
    assert [record["line"] for record in records] == [4, 9, 11]
    assert [record.get("text") for record in records] == ["\\xff{", "{", None]


def test_progress_and_refused_lines_are_counted_over_the_blocks_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of about 40 bytes; two lines are refused, and the last ones are blank."""
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 40)
    lines = [b'{"text": "%d"}' % number for number in range(20)]
    lines[3] = b"bad"
    lines[17] = b'{"text": 17}'
    path = tmp_path / "in"
    path.write_bytes(b"\n".join([*lines, b"", b" ", b""]))
    size = path.stat().st_size
    part = Part(str(path), "in", 0, size, "plain", size)
    tokenizer: Any = SimpleNamespace(encode_batch=lambda batch: [[1] * len(text) for text in batch])
    encoding = SimpleNamespace(dtypes=[np.dtype("u2")])
    job: Any = SimpleNamespace(
        options=SimpleNamespace(streams=1, on_bad_line="quarantine"), folder=tmp_path, key="key",
        parts=[part], encoding=encoding,
        encoder=texts.TextEncoder(tokenizer, None, ["text"], 1, None, None),
    )  # fmt: skip
    seen: list[tuple[int, int]] = []
    encode_part(job, 0, lambda read, documents: seen.append((read, documents)))
    done = read_marker(tmp_path, "key", 0)
    assert done is not None and len(seen) > 5
    assert (sum(read for read, _ in seen), sum(number for _, number in seen)) == (size, 18)
    assert (done.lines, done.documents, done.rejected, done.skipped) == (22, 18, 2, 2)
    records = list(part_module.read_rejected(tmp_path, done))
    assert [(record["line"], record.get("text")) for record in records] == [
        (3, "bad"), (17, '{"text": 17}'), (20, None), (21, None),
    ]  # fmt: skip
