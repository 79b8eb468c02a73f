"""Whole runs in this process: the bytes are Megatron-LM's, whatever the input is read from."""

import dataclasses
import gzip
import hashlib
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from megatron_ext.data.indexed import check_indexed_dataset
from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess import packed
from megatron_ext.text.preprocess.encode import EMPTY, ENDS_WITHIN, UNREAD, sentence_splitter
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import PartMarker
from megatron_ext.text.preprocess.run import (
    Report,
    _named,
    _remarks,
    planned,
    run_or_explain,
)
from megatron_ext.text.preprocess.texts import TextEncoding
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.base import NullTokenizer
from megatron_ext.text.tokenizers.fast import FastEncoder
from tests.reference import REFERENCE, corpus
from tests.text import tiny
from tests.text.preprocess.runs import (
    check_pair,
    huggingface,
    left_in,
    run,
    sentencepiece,
    texts_of,
    write_lines,
)
from tests.text.tiny import read_pair


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed, "_SECONDS_FOR_A_WRITER", 0.2)
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("engine", ["auto", "native"])
@pytest.mark.parametrize("make", [sentencepiece, huggingface])
def test_bytes_are_megatrons(tmp_path: Path, make: Any, engine: str, append_eod: bool) -> None:
    documents = tiny.corpus(300)
    documents[7]["text"] = ["several", "", "texts of one", "document"]
    documents[8]["text"] = []
    path = tiny.write_jsonl(tmp_path / "in.jsonl", documents, end="")
    how = {"flags": make(), "append_eod": append_eod}
    report, said = run(tmp_path, path, engine=engine, json_keys=("text", "title"), **how)
    assert said[0].startswith("Tokenizing with" + " gigatoken, equal to" * (engine == "auto"))
    for key in ("text", "title"):
        values = [document[key] for document in documents]
        check_pair(tmp_path, values, f"{key}_document", **how)
    assert (report.documents, report.input_bytes) == (300, path.stat().st_size)
    assert report.tokens == sum(check_indexed_dataset(p).num_tokens for p in report.prefixes)
    names = [f"out_{key}_document" for key in ("text", "title")]
    assert left_in(tmp_path) == [f"{name}.{kind}" for name in names for kind in ("bin", "idx")]


def dealt(documents: list[Any], count: int, *, sequential: bool) -> list[list[Any]]:
    if not sequential:
        return [documents[p::count] for p in range(count)]
    size = math.ceil(len(documents) / count)
    return [documents[p * size : (p + 1) * size] for p in range(count)]


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_partitions_are_megatrons(tmp_path: Path, count: int, sequential: bool) -> None:
    """Two files are dealt without a new start, and parts end between lines of one turn."""
    texts = texts_of(tiny.corpus(101))
    a = tiny.write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts[:41]])
    b = tiny.write_jsonl(tmp_path / "b.jsonl", [{"text": t} for t in texts[41:]])
    run(tmp_path, a, b, partitions=count, keep_sequential_samples=sequential)
    order = []
    for p, mine in enumerate(dealt(texts, count, sequential=sequential)):
        order += mine
        check_pair(tmp_path, mine, f"{p}_text_document")
    check_pair(tmp_path, order)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_refused_line_keeps_its_turn_in_the_dealing(tmp_path: Path, sequential: bool) -> None:
    texts: list[Any] = texts_of(tiny.corpus(80))
    for bad in (0, 17, 18, 26, 27, 40, 54, 79):  # contiguous partitions begin at 27 and 54
        texts[bad] = None
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    run(tmp_path, path, partitions=3, keep_sequential_samples=sequential, on_bad_line="quarantine")
    for p, mine in enumerate(dealt(texts, 3, sequential=sequential)):
        kept = [text for text in mine if text is not None]
        check_pair(tmp_path, kept, f"{p}_text_document")


def test_sequential_partitions_never_change_the_merged_dataset(tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(90))
    found = set()
    for count in (1, 2, 3):
        for workers in (1, 2):
            run(tmp_path, path, partitions=count, keep_sequential_samples=True, workers=workers)
            found.add(read_pair(tmp_path / "out_text_document"))
    assert len(found) == 1


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_sentences_in_one_run(tmp_path: Path, keep_newlines: bool) -> None:
    documents = tiny.corpus(60)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    run(tmp_path, path, split_sentences=True, keep_newlines=keep_newlines)
    split = sentence_splitter("english", keep_newlines=keep_newlines)
    check_pair(tmp_path, texts_of(documents), "text_sentence", split=split)
    info = check_indexed_dataset(tmp_path / "out_text_sentence")
    assert info.num_sequences > 2 * info.num_documents


@pytest.mark.parametrize("workers", [1, 4])  # four share the three files, of which two are packed
def test_packed_files_and_globs(tmp_path: Path, workers: int) -> None:
    documents = tiny.corpus(90)
    plain = tiny.write_jsonl(tmp_path / "a.jsonl", documents[:30])
    for name, pack, piece in (
        ("b.jsonl.gz", gzip.compress, documents[30:60]),
        ("c.jsonl.zst", zstandard.ZstdCompressor().compress, documents[60:]),
    ):
        text = plain.with_name("piece")
        tiny.write_jsonl(text, piece)
        (tmp_path / name).write_bytes(pack(text.read_bytes()))
    _, said = run(tmp_path, f"{tmp_path}/[abc].jsonl*", workers=workers)
    check_pair(tmp_path, texts_of(documents))
    unpacked = [line for line in said if line.startswith("Unpacking ")]
    assert unpacked == [
        f"Unpacking {tmp_path}/{name} into {tmp_path}/out.parts, to share it among 4 workers."
        for name in ("b.jsonl.gz", "c.jsonl.zst") if workers == 4
    ]  # fmt: skip


def test_large_vocabulary_is_written_as_int32(tmp_path: Path) -> None:
    flags = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=65_499)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [{"text": "0 65498 65499"}])
    run(tmp_path, path, flags=flags)
    info = check_indexed_dataset(tmp_path / "out_text_document")
    assert (info.dtype, info.num_tokens) == (np.int32, 4)
    check_pair(tmp_path, ["0 65498 65499"], flags=flags)


def test_empty_input(tmp_path: Path) -> None:
    path, packed = tmp_path / "in.jsonl", tmp_path / "in.gz"
    path.write_bytes(b"")
    packed.write_bytes(gzip.compress(b""))
    for options in ({"partitions": 2, "keep_sequential_samples": True}, {"workers": 2}, {}):
        for source in (path, packed, "/dev/null"):
            with pytest.raises(DataError, match="gives no token, with 0 empty documents"):
                run(tmp_path, source, **options)
            assert not (tmp_path / "out_text_document.idx").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_a_fifo_is_read_beside_a_file(tmp_path: Path, fifo: Path, packed: bool) -> None:
    data = write_lines(tmp_path)
    content = gzip.compress(data) if packed else data
    writer = threading.Thread(target=fifo.write_bytes, args=(content,))
    writer.start()
    run(tmp_path, fifo, tmp_path / "lines.jsonl")
    writer.join()
    check_pair(tmp_path, texts_of(tiny.corpus(60)) * 2)


def test_a_fifo_without_a_writer_or_named_twice_is_refused(tmp_path: Path, fifo: Path) -> None:
    with pytest.raises(DataError, match=r"fifo\) is a FIFO that no program has opened for writ"):
        run(tmp_path, fifo)
    assert left_in(tmp_path) == []
    (tmp_path / "link").symlink_to(fifo)
    for names in ((fifo, fifo), (fifo, tmp_path / "link")):
        with pytest.raises(DataError, match="names twice what can be read only once; name it once"):
            run(tmp_path, *names)


def test_a_slow_writer_is_waited_for(tmp_path: Path, fifo: Path) -> None:
    data = write_lines(tmp_path)

    def write() -> None:
        with open(fifo, "wb") as stream:
            time.sleep(0.6)
            stream.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    run(tmp_path, fifo)
    writer.join()
    check_pair(tmp_path, texts_of(tiny.corpus(60)))


def test_a_late_difference_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is right on all that is compared at the start, and wrong later on."""
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [{"text": "ba"}] * 300 + tiny.corpus(100))
    real = FastEncoder.encode_batch

    def wrong(self: FastEncoder, texts: Any) -> Any:
        ids = real(self, texts)
        return ids if os.getpid() == main else [np.append(i, 5) for i in ids]

    main = os.getpid()
    monkeypatch.setattr(FastEncoder, "encode_batch", wrong)
    report, said = run(tmp_path, path)
    assert said[1].startswith("Starting over with SentencePieceTokenizer's own library: gigatoken ")
    assert report.resumed_parts == 0
    check_pair(tmp_path, ["ba"] * 300 + texts_of(tiny.corpus(100)))


def test_differences_rule_the_engine_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [{"text": "zebra"}, {"text": "ba"}])
    real = FastEncoder.encode_batch

    def wrong(self: FastEncoder, texts: Any) -> Any:
        pairs = zip(texts, real(self, texts), strict=True)
        return [[1] if text == "zebra" else ids for text, ids in pairs]

    monkeypatch.setattr(FastEncoder, "encode_batch", wrong)
    _, said = run(tmp_path, path)
    own = "Tokenizing with SentencePieceTokenizer's own library: gigatoken gives other ids for a"
    assert said == [f"{own} text that starts 'zebra'."]


def test_documents_longer_than_the_samples_are_compared_too(tmp_path: Path) -> None:
    long = {"text": " ".join(tiny.sentences()[:1000])}
    _, said = run(tmp_path, tiny.write_jsonl(tmp_path / "in.jsonl", [long, long]))
    assert said[0].startswith("Tokenizing with gigatoken, equal to SentencePieceTokenizer on 1 tex")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"workers": 0}, "workers` (0) must be at least 1; leave it out for the default."),
        ({"partitions": 10**20}, f"partitions` ({10**20}) must be at most 1024; leave it out"),
        ({"partitions": -1}, "partitions` (-1) must be at least 1; leave it out for the default."),
        ({"part_megabytes": math.nan}, "part-megabytes` (nan) must be a finite number, above 0;"),
        ({"part_megabytes": math.inf}, "part-megabytes` (inf) must be a finite number, above 0;"),
        ({"json_keys": ("a", "a")}, "json-keys` names a twice; name each key once."),
        ({"json_keys": ("a/b",)}, "json-keys` (a/b) names datasets, so it must not contain `/`;"),
        ({"json_keys": ("a", "0_a"), "partitions": 2}, "json-keys` (0_a) gives its dataset the"),
        ({"inputs": ["-", "a"]}, "input -` (standard input) cannot be joined with files;"),
        ({"output_prefix": "/no/folder/x"}, "output-prefix` (/no/folder/x) lies in /no/folder,"),
        ({"split_sentences": True, "lang": "klingon"}, "lang` (klingon) has no sentence rules;"),
        ({"keep_newlines": True}, "keep-newlines` has an effect only with `--split-sentences`"),
        *(
            ({name: value}, f"{name.replace('_', '-')}` has an effect only with `--executor slurm`")
            for name, value in (("slurm_tasks", 2), ("slurm_args", "-p x"), ("slurm_script", "a"))
        ),
        ({"executor": "slurm", "slurm_args": "'"}, "slurm-args` (') cannot be read (No closing q"),
    ],
)
def test_bad_options(change: dict[str, Any], sentence: str) -> None:
    good = {"inputs": ["a"], "output_prefix": "x", "tokenizer": sentencepiece()}
    with pytest.raises(ConfigError) as caught:
        PreprocessOptions(**{**good, **change})
    assert str(caught.value).startswith(f"`--{sentence}")
    assert len(caught.value.messages) == 1


def test_append_eod_needs_an_eod(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.hf_folder() / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    flags = TokenizerConfig("HuggingFaceTokenizer", str(tmp_path))
    with pytest.raises(ConfigError, match="`--append-eod` needs an end-of-document token, but Hu"):
        run(tmp_path, tiny.write_jsonl(tmp_path / "in.jsonl", []), flags=flags)


@pytest.mark.parametrize("name", ["sp_eod", "sp_keys", "hf_eod", "sp_part"])
def test_hashes_are_those_recorded_from_megatrons_own_tool(tmp_path: Path, name: str) -> None:
    sp = TokenizerConfig("SentencePieceTokenizer", str(REFERENCE / "tokenizer.model"))
    hf = TokenizerConfig("HuggingFaceTokenizer", str(REFERENCE / "hf_tokenizer"))
    keys: dict[str, Any] = {"append_eod": False, "json_keys": ("text", "title")}
    more = {"sp_keys": keys, "sp_part": {"partitions": 2}}
    options = {"flags": hf if name == "hf_eod" else sp, "part_megabytes": 0.3}
    prefix = str(tmp_path / name)
    run(tmp_path, corpus(), output_prefix=prefix, **options, **more.get(name, {}))
    recorded = json.loads((REFERENCE / "preprocess.json").read_bytes())["files"]
    mine = {file: entry for file, entry in recorded.items() if file.startswith(name)}
    assert mine
    for file, entry in mine.items():
        data = (tmp_path / file).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    # Megatron-LM's tool forgets this index of several keys.
    if name == "sp_keys":
        assert check_indexed_dataset(tmp_path / "sp_keys_text_document").num_documents == 2400


def test_an_array_has_the_workers_of_all_its_tasks() -> None:
    good: dict[str, Any] = {"inputs": ["a"], "output_prefix": "x", "tokenizer": sentencepiece()}
    assert PreprocessOptions(**good, workers=3).all_workers == 3
    array = PreprocessOptions(**good, workers=3, executor="slurm", slurm_tasks=4)
    assert array.all_workers == 12


CHANGES: list[dict[str, Any]] = [
    {"append_eod": True}, {"append_eod": True, "eod_token": "<s>"}, {"json_keys": ("title",)},
    {"partitions": 2}, {"split_sentences": True}, {"split_sentences": True, "lang": "german"},
    {"split_sentences": True, "keep_newlines": True}, {"on_bad_line": "quarantine"},
    {"tokenizer": huggingface()},
]  # fmt: skip


def test_parts_are_taken_over_from_a_run_of_the_same_settings_alone(tmp_path: Path) -> None:
    """Other workers, and another cut into sequential partitions, change no part."""
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    good: dict[str, Any] = {
        "inputs": [str(path)], "output_prefix": str(tmp_path / "out"), "tokenizer": sentencepiece(),
    }  # fmt: skip

    def key_of(**more: Any) -> str:
        options = PreprocessOptions(**{**good, **more})
        with planned(options, TextEncoding(options).identity, print) as (work, _, _):
            work.keep = True
            starts.append(float((work.folder / "started").read_text()))
            return work.key

    starts: list[float] = []

    for change in CHANGES:
        first = key_of()
        same = {"workers": 7, "log_interval": 3, "keep_sequential_samples": True, "partitions": 4}
        assert key_of() == key_of(**same) == first
        # The speed of a run is that of its last start.
        assert starts == sorted(set(starts))
        assert key_of(**change) != first
    assert len({repr(sorted(change.items(), key=str)) for change in CHANGES}) == len(CHANGES)


def test_tokens_are_on_the_disk_before_the_dataset_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, name = os.fsync, os.replace

    def synced(number: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        sync(number)

    def named(old: Any, new: Any) -> None:
        order.append(Path(new).name)
        name(old, new)

    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    run(tmp_path, path)
    own = [entry for entry in order if entry.startswith("out_")]
    bin_, idx = (f"out_text_document.{kind}" for kind in ("bin", "idx"))
    assert own == [f"{bin_}.joining", f"{idx}.joining", bin_, idx]


@pytest.mark.parametrize("given", ["true", None])
def test_threads_of_tokenizers_are_as_before_after_a_run(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [])
    with pytest.raises(DataError, match="gives no token"):
        run(tmp_path, path)
    assert os.environ.get(name) == given


def test_a_sentence_names_forty_and_counts_the_others() -> None:
    counts = {f"k{number}": 1 for number in range(40)}
    assert _named(counts).endswith("k38 (1), k39 (1)")
    assert _named({**counts, "k40": 3, "k41": 1}).endswith("k39 (1), and 2 more")


def test_forty_names_stand_in_a_sentence_and_more_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out_remarks.json"
    facts = {"lines": 9, "documents": 9, "tokens": 9, "rejected": 0, "skipped": 2, "sizes": {}}
    for number in (40, 41):
        names = {f"n{index:02}": 1 for index in range(number)}
        tallies: list[Any] = [
            {UNREAD: names, ENDS_WITHIN: {"a": 2, "b": 1}}, {UNREAD: {"n39": 5}, EMPTY: {"a": 0}},
        ]  # fmt: skip
        markers = [
            PartMarker("p", "key", **facts, host="a", seconds=1.0, ended=1.0, tally=tally)  # type: ignore[arg-type]
            for tally in tallies
        ]
        skipped, unread, within, *more = _remarks(markers, path)
        assert skipped == "4 blank lines at the end of inputs were skipped."
        assert unread.startswith("Keys of the lines that were not used: n39 (6), n00 (1), n01 (1)")
        assert "is spelled out 3 times within texts" in within
        assert unread.endswith("n38 (1)." if number == 40 else "n38 (1), and 1 more.")
        assert path.exists() == bool(more) == (number == 41)


def test_what_a_tokenizer_has_to_say_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(2))
    monkeypatch.setattr(NullTokenizer, "notes", lambda self: ["a note", "another"])
    monkeypatch.setattr(NullTokenizer, "encode_batch", lambda self, texts: [[1]] * len(texts))
    flags = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    _, said = run(tmp_path, path, flags=flags, engine="native")
    assert said == ["Tokenizing with NullTokenizer's own library, as asked.", "a note", "another"]


def test_a_run_ends_with_a_line_of_figures_or_with_its_errors() -> None:
    """MB are millions of bytes; what an interrupt leaves is kept."""
    good = Report(
        prefixes=["out_a_document", "out_b_document"], shown=["out_a_document", "out_b_document"],
        documents=30, tokens=400, input_bytes=5_000_000, rejected=2,
        rejected_path=Path("out.rejected.jsonl"), remarks=["A remark."], resumed_parts=0,
        seconds=2.0,
    )  # fmt: skip
    figures = "30 documents, 400 tokens, 5.0 MB in 2.0 s (2.5 MB/s) -> "
    bad = "2 bad lines are in out.rejected.jsonl, each with its reason."
    shards = dataclasses.replace(
        good, prefixes=["x_00000", "x_00001"], shown=["x_{00000..00001}"], rejected_path=None
    )
    train = "Train on the shards with `--data-path x_{00000..00001}`; bash writes them out."
    interrupted = "Interrupted; finished parts are kept, so run the same command again to go on."
    for outcome, code, lines in (
        (good, 0, [f"{figures}out_a_document, out_b_document", bad, "A remark."]),
        (shards, 0, [f"{figures}x_{{00000..00001}}", train, "A remark."]),
        (None, 0, []),
        (DataError(["One.", "Two."]), 1, ["error: One.", "error: Two."]),
        (MachineFault("Full."), 1, ["error: Full."]),
        (ConfigError("Flag."), 2, ["error: Flag."]),
        (KeyboardInterrupt(), 130, [interrupted]),
    ):  # fmt: skip

        def end(outcome: Any = outcome) -> Report | None:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        said: list[str] = []
        assert (run_or_explain(end, said.append), said) == (code, lines)
