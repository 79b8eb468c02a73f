"""merge_datasets.py and inspect_dataset.py as a user runs them."""

import errno
import io
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from megatron_ext.data import indexed, indexed_writer
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.text.data import inspect as inspect_module
from megatron_ext.text.data.inspect import inspect_dataset
from megatron_ext.text.preprocess.cli import main as preprocess_main
from megatron_ext.text.sft.store import SftStore
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.text import tiny
from tests.text.sft import tiny as chats
from tests.text.tiny import read_pair


def write(prefix: Path, lengths: list[int], *, first: int = 0) -> Path:
    """Write documents of one sequence each (none for length 0), of ids counting from `first`."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for length in lengths:
            tokens = np.arange(first, first + length)
            writer.add_document(tokens, [length] if length else [])
    return prefix


def run(tool: str, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool in this process, since the start of another takes longer than most tools."""
    words = list(map(str, argv))
    program = import_module(f"megatron_ext.programs.{tool.removesuffix('.py')}")
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = program.main(words)
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())


def test_merge(tmp_path: Path) -> None:
    folder, output = tmp_path / "in", tmp_path / "all"
    folder.mkdir()
    write(folder / "b.v1", [4, 0])
    write(folder / "a", [2])
    (folder / "notes.txt").write_text("not a dataset")
    command = [sys.executable, tiny.ROOT / "tools" / "merge_datasets.py", "--input", folder]
    command += ["--output-prefix", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = f"2 datasets, 3 documents, 6 tokens -> {output}\n"
    assert (done.returncode, done.stdout) == (0, said)
    assert read_pair(tmp_path / "all") == read_pair(write(tmp_path / "whole", [2, 4, 0]))


def test_merge_of_stores_of_conversations(tmp_path: Path) -> None:
    tokenizer = chats.save(tmp_path / "tokenizer")
    folder = tmp_path / "stores"
    folder.mkdir()
    rows = chats.chats(5)

    def preprocess(name: str, *rows: Any, more: Sequence[str] = ()) -> None:
        path = chats.write_jsonl(tmp_path / f"{name}.jsonl", list(rows))
        words = ["--sft", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
        words += [str(tokenizer), "--input", str(path), "--output-prefix", str(folder / name)]
        assert preprocess_main([*words, *more]) == 0

    preprocess("a", *rows[:2])
    preprocess("b", *rows[2:])
    done = run("merge_datasets.py", "--input", folder, "--output-prefix", tmp_path / "all")
    assert done.stdout == f"2 stores, 5 conversations -> {tmp_path / 'all'}\n"
    preprocess("whole", *rows)
    merged, whole = SftStore(str(tmp_path / "all")), SftStore(str(folder / "whole"))
    assert merged.intake == whole.intake and len(merged) == 5
    assert [merged.source_of(number)[1] for number in range(5)] == [1, 2, 1, 2, 3]
    for number in range(5):
        for mine, theirs in zip(
            merged.conversation(number), whole.conversation(number), strict=True
        ):
            assert mine.tolist() == theirs.tolist()

    def error(output: Path) -> str:
        return run("merge_datasets.py", "--input", folder, "--output-prefix", output).stderr

    for path in (folder / "a", folder / ".." / "stores" / "b"):
        assert "is one of the stores to merge; give another." in error(path)
    preprocess("whole", *rows, more=["--sft-template-kwargs", '{"a": 1}'])
    assert "were made with another template_kwargs, so they cannot be one" in error(tmp_path / "x")
    (folder / "whole_sft.json").unlink()
    assert "whole_sft.json does not exist, so the store is not whole" in error(tmp_path / "x")
    write(folder / "plain", [3])
    assert "holds stores of conversations and other datasets (" in error(tmp_path / "x")


def test_merge_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "in"

    def error() -> str:
        done = run("merge_datasets.py", "--input", folder, "--output-prefix", folder / "a")
        assert done.returncode == 1
        return done.stderr

    assert error().startswith(f"error: `--input` ({folder}) is not a folder; give the one with")
    folder.mkdir()
    assert error().startswith(f"error: `--input` ({folder}) holds no .bin/.idx pair; give another")
    write(folder / "a", [2])
    assert error().startswith(f"error: `--output-prefix` ({folder / 'a'}) is one of the datasets")
    (folder / "a.idx").unlink()
    assert error().startswith(f"error: {folder / 'a.idx'} is missing beside its other half; copy")


def test_a_terminal_is_told_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_writer, "_COPY_BYTES", 2)
    real = indexed_writer._kernel_copy

    def slow(*arguments: int) -> int:
        time.sleep(0.4)
        return real(*arguments)

    monkeypatch.setattr(indexed_writer, "_kernel_copy", slow)
    prefix = write(tmp_path / "a", [5])

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        indexed_writer.merge_indexed([prefix], tmp_path / "all")
        found = re.search(r"Merging: +\d+%.*\d\d:\d\d<\d\d:\d\d", stream.getvalue())
        assert (found is not None) == shown


def test_counts_histogram_and_warnings(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [0, 1, 3, 4, 7, 8, 600], first=5)
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    found = inspect_dataset(str(prefix), tokenizer, samples=7)
    counts = "documents  7\nsequences  6\ntokens     623 (uint16), 89.0 per document"
    assert "\n".join(found.lines[:5]) == f"dataset    {prefix}\n{counts}\nids        5 to 604"
    histogram = [" ".join(line.split()[:2]) for line in found.lines[6:12]]
    assert histogram == ["0 1", "1 1", "2-3 1", "4-7 2", "8-15 1", "512-1023 1"]
    assert "document 2: 1 sequences, 3 tokens" in found.lines
    assert "  text  '5 6 7'" in found.lines
    assert found.warnings == [
        "1 of 7 documents are empty.",
        "Token id 604 is beyond the tokenizer's vocabulary (0 to 100): the dataset was made with "
        "another tokenizer.",
    ]
    report = inspect_dataset(str(prefix), None, scan=False)
    assert report.warnings == ["1 of 7 documents are empty."]


def test_pad_that_is_eos_is_warned_of(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tiny.hf_folder() / "tokenizer.json").read_bytes())
    config = '{"tokenizer_class": "TokenizersBackend", "eos_token": "%s", "pad_token": "%s"}'
    prefix = write(tmp_path / "d", [3])
    for pad, warned in ((tiny.END, True), ("<|pad|>", False)):
        (folder / "tokenizer_config.json").write_text(config % (tiny.END, pad))
        more = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
        done = run("inspect_dataset.py", f"{prefix}.bin", *more)
        assert done.returncode == 0
        assert ("warning: The tokenizer's pad (0) is its end of sequence" in done.stderr) == warned


def test_damage_ends_with_its_sentence_and_the_others_are_still_shown(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good", [3]), write(tmp_path / "bad", [3])
    Path(f"{bad}.bin").write_bytes(b"x")
    done = run("inspect_dataset.py", bad, good)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {bad}.bin is truncated: it has 1 bytes, but its index")
    assert f"dataset    {good}" in done.stdout


def test_a_changed_byte_is_found_by_the_digest(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [3, 4])
    done = run("inspect_dataset.py", prefix, "--digest")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == f"verified   no: there is no {prefix}.sha256"
    done = run("inspect_dataset.py", prefix, "--write-digest", "--samples", "0")
    assert (done.returncode, done.stderr) == (0, "")
    command = ["sha256sum", "-c", "d.sha256"]
    theirs = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (theirs.returncode, theirs.stdout) == (0, "d.bin: OK\nd.idx: OK\n")
    done = run("inspect_dataset.py", f"{prefix}.bin", "--digest")
    assert done.stdout.splitlines()[-1] == f"verified   as in {prefix}.sha256"

    data = bytearray(Path(f"{prefix}.bin").read_bytes())
    data[5] ^= 1
    Path(f"{prefix}.bin").write_bytes(data)
    done = run("inspect_dataset.py", prefix)
    assert done.returncode == 0, "without the digest such a change is not seen"
    done = run("inspect_dataset.py", prefix, "--digest")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"error: {prefix}.bin has the SHA-256 [0-9a-f]{{64}}, but {prefix}.sha256 records "
        r"[0-9a-f]{64}; the file was changed or damaged, so copy or make it again.\n",
        done.stderr,
    )
    one_file = Path(f"{prefix}.sha256").read_text().splitlines()[0]
    for content in ("nothing", one_file):
        Path(f"{prefix}.sha256").write_text(content)
        done = run("inspect_dataset.py", prefix, "--digest")
        assert "must hold a SHA-256 for d.bin and d.idx; write it again" in done.stderr


def test_inspect_refuses_flags_that_make_no_sense(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [3])
    both = "`--digest` compares with PREFIX.sha256 and `--write-digest` replaces it; give one."
    for flags, sentence in (
        ("--samples -5", "`--samples` (-5) must not be negative; use 0 or more."),
        ("--digest --write-digest", both),
        ("--vocab-size 9", "`--tokenizer-type` is missing beside its other flags; name it."),
    ):
        done = run("inspect_dataset.py", prefix, *flags.split())
        assert (done.returncode, done.stderr) == (2, f"error: {sentence}\n")
    for kind in ("Nul", "NullTokenizer"):
        done = run("inspect_dataset.py", prefix, "--tokenizer-type", kind)
        assert done.returncode == 2 and done.stderr.startswith("error: `--tokenizer-type")


def test_an_unreadable_dataset_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id that may not read is played by `open`, since tests may run as root."""
    prefix = write(tmp_path / "d", [3])

    for kind in ("idx", "bin"):

        def refuse(path: object, *rest: object, kind: str = kind) -> IO[bytes]:
            if str(path).endswith(kind):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return open(path, *rest)  # type: ignore[call-overload, no-any-return]

        with monkeypatch.context() as patch:
            patch.setattr(indexed, "open", refuse, raising=False)
            with pytest.raises(DataError) as caught:
                indexed.check_indexed_dataset(prefix)
        said = f"{prefix}.{kind} cannot be read (Permission denied); check its permissions and the"
        assert str(caught.value).startswith(said)


def test_full_disks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [write(tmp_path / "a", [3]), write(tmp_path / "b", [4])]
    before = read_pair(write(tmp_path / "all", [1]))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    refused = pytest.raises(
        DataError, match=r"all was not written \(.*No space left on device\); fr"
    )
    with monkeypatch.context() as patch, refused:
        patch.setattr(indexed_writer, "_kernel_copy", full)
        indexed_writer.merge_indexed(inputs, tmp_path / "all")
    assert read_pair(tmp_path / "all") == before
    assert not list(tmp_path.glob("*.merging*"))
    (tmp_path / "all.bin").unlink()
    (tmp_path / "all.bin").mkdir()
    with pytest.raises(DataError, match=r"all.bin is a folder, but a dataset must go there; move"):
        indexed_writer.merge_indexed(inputs, tmp_path / "all")
    assert (tmp_path / "all.idx").exists()


def test_large_datasets_are_looked_through_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are smallest and largest in the middle; documents have several sequences or none."""
    tokens = np.array([50, 51, 52, 7, 99, 60, 61, 62, 63, 64], dtype=np.int32)
    lengths = [[2, 1], [], [1, 0, 2], [4]]
    start = 0
    with IndexedWriter(tmp_path / "d", np.dtype(np.int32)) as writer:
        for each in lengths:
            writer.add_document(tokens[start : start + sum(each)], each)
            start += sum(each)
    index = indexed.read_index(tmp_path / "d")
    whole = inspect_dataset(str(tmp_path / "d"), None)
    assert "ids        7 to 99" in whole.lines
    for items in (1, 2, 3):
        monkeypatch.setattr(inspect_module, "SCAN_ITEMS", items)
        found = [int(x) for part in inspect_module.document_lengths(index) for x in part]
        assert found == [3, 0, 3, 4]
        assert inspect_dataset(str(tmp_path / "d"), None) == whole
        assert (
            inspect_module.id_range(tmp_path / "d", 2) == ((50, 51), (50, 51), (50, 52))[items - 1]
        )


def test_shown_documents_are_those_of_the_seed_with_their_own_ids(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        for number in range(40):
            ids = np.array([100 * number, 100 * number + 1])
            writer.add_document(ids, [1, 1] if number % 2 else [2])

    def shown(*more: str) -> list[int]:
        done = run("inspect_dataset.py", prefix, *more)
        assert done.returncode == 0
        chosen = [int(x) for x in re.findall(r"^document (\d+): ", done.stdout, re.MULTILINE)]
        ids = [
            list(map(int, x.split()))
            for x in re.findall(r"^  ids   (.*)$", done.stdout, re.MULTILINE)
        ]
        assert ids == [[100 * number, 100 * number + 1] for number in chosen]
        assert ("\nids        0 to 3901\n" in done.stdout) == ("--no-scan" not in more)
        return chosen

    assert shown() == shown("--seed", "0", "--no-scan") and len(shown()) == 3
    assert shown("--seed", "1") != shown()
    assert shown("--samples", "40") == list(range(40)) and shown("--samples", "0") == []


def test_negative_ids_are_warned_of(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.dtype(np.int32)) as writer:
        writer.add_document(np.array([3, -2]), [2])
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    found = inspect_dataset(str(tmp_path / "d"), tokenizer)
    assert found.warnings[0].startswith(
        "Token id -2 is beyond the tokenizer's vocabulary (0 to 100)"
    )


def test_merge_keeps_modes_and_needs_a_folder_for_its_output(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with IndexedWriter(folder / "a", np.dtype(np.uint16), multimodal=True) as writer:
        writer.add_document(np.arange(5), [2, 3], [0, 1])
    words = ["--input", folder, "--output-prefix"]
    done = run("merge_datasets.py", *words, tmp_path / "all", "--multimodal")
    assert (done.returncode, done.stderr) == (0, "")
    modes = indexed.read_index(tmp_path / "all").modes
    assert modes is not None and modes.tolist() == [0, 1]
    done = run("merge_datasets.py", *words, tmp_path / "none" / "all", "--multimodal")
    assert done.returncode == 1 and "lies in no folder; make it first." in done.stderr
    (folder / "clips").mkdir()
    (folder / "clips" / "manifest.json").write_text("{}")
    done = run("merge_datasets.py", *words, tmp_path / "all")
    assert done.returncode == 1
    assert "holds datasets of clips (clips) and others (" in done.stderr


def test_a_damaged_folder_of_clips_and_a_dataset_named_twice(tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    (folder / "manifest.json").write_text("{")
    prefix = write(tmp_path / "d", [3, 4, 4])
    done = run("inspect_dataset.py", folder, prefix)
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert f"dataset    {prefix}" in done.stdout
    once, twice = (
        run("inspect_dataset.py", *names, "--quality").stdout.rpartition("tokens per document")[2]
        for names in ([prefix], [prefix, f"{prefix}.bin"])
    )
    assert once == twice and "3 documents with 11 tokens in 1 dataset" in once


def test_a_digest_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write(tmp_path / "d", [3])
    before = sorted(tmp_path.iterdir())

    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(inspect_module.os, "replace", refuse)
    done = run("inspect_dataset.py", prefix, "--write-digest")
    assert "cannot write" in done.stderr and done.returncode == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_report_shows_short_rare_and_empty_documents(tmp_path: Path) -> None:
    """Ids count from 90; the tokenizer has 101, so the last two of 13 are beyond it."""
    lengths = [16] * 80 + [1, 17, 13, 0]
    prefix = write(tmp_path / "d", lengths, first=90)
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    lines = inspect_dataset(str(prefix), tokenizer, samples=len(lengths)).lines
    assert [line.split() for line in lines if "#" in line] == [
        ["0", "1", "#"], ["1", "1", "#"], ["8-15", "1", "#"], ["16-31", "81", "#" * 40],
    ]  # fmt: skip
    shown = {}
    for number, line in enumerate(lines):
        if line.startswith("document "):
            ids, text = (each.split("  ")[-1].strip() for each in lines[number + 1 : number + 3])
            shown[int(line.split()[1].rstrip(":"))] = line.split(": ")[1], ids, text
    ids = [str(number) for number in range(90, 107)]
    assert shown[79] == ("1 sequences, 16 tokens", " ".join(ids[:16]), repr(" ".join(ids[:11])))
    assert shown[81][1] == " ".join(ids[:16]) + " ..."
    assert shown[82][2] == repr(" ".join(ids[:11]))
    assert shown[83][0] == "0 sequences, 0 tokens"
