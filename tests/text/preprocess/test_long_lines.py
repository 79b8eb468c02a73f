"""Lines that are too long to be read at once give the same documents as when they are."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.token_spans import open_span
from megatron_ext.errors import DataError
from megatron_ext.text.preprocess import encode, inputs, long_lines
from megatron_ext.text.preprocess.encode import Encoded, TextEncoder
from megatron_ext.text.preprocess.inputs import Part, blocks, place_of
from megatron_ext.text.preprocess.jobs import encode_part
from megatron_ext.text.preprocess.long_lines import LongLine, Unusual, outline, text_pieces
from megatron_ext.text.preprocess.texts import _samples
from megatron_ext.text.tokenizers import TokenizerConfig, boundaries, build_tokenizer
from tests.text import tiny

WORDS = [
    "ab", "Zürich", "日本。語", " x", "\n", '"', "\\", "\\\\\"", "😀", "é", "\t ", "end of", "</s>",
    "1 2",
]  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lines, texts and parts of a few bytes be long."""
    monkeypatch.setattr(long_lines, "LONG_LINE_BYTES", 200)
    monkeypatch.setattr(long_lines, "_PIECE_BYTES", 64)
    monkeypatch.setattr(long_lines, "_LONG_TEXT_BYTES", 30)
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 50)
    monkeypatch.setattr(boundaries, "PART_CHARACTERS", 20)
    monkeypatch.setattr(encode, "PART_CHARACTERS", 20)
    monkeypatch.setattr(encode, "_SPOOLED_IDS", 7)


def _text(choice: random.Random) -> str:
    return "".join(choice.choices(WORDS, k=choice.choice([0, 3, 100])))


def _line(choice: random.Random) -> bytes:
    """Return a line, which may be long, and may be bad."""
    row: dict[str, Any] = {"id": choice.random(), "meta": {"text": _text(choice)}}
    row["text"] = choice.choice([_text(choice), [_text(choice), _text(choice)], 3])
    if choice.random() < 0.8:
        row["text"] = _text(choice)
    if choice.random() < 0.9:
        row["more"] = _text(choice)
    line = json.dumps(row, ensure_ascii=choice.random() < 0.5).encode()
    kind = choice.random()
    if kind < 0.1:
        place = choice.randrange(len(line))
        return line[:place] + choice.choice([b"\\", b'"', b"\xff", b"\\ud83d", b"}"]) + line[place:]
    if kind < 0.2:
        return b'\xef\xbb\xbf{"more": "first", ' + line[1:]
    return b" " * choice.randrange(300) if kind < 0.25 else line


class _Written:
    """Keeps what a part's encoder writes, tallies and refuses, as the files of a part would."""

    def __init__(self) -> None:
        self.ids: dict[tuple[int, int], list[int]] = {}
        self.lengths: dict[tuple[int, int], list[int]] = {}
        self.documents: dict[tuple[int, int], list[int]] = {}
        self.told: dict[tuple[str, str], int] = {}
        self.refused: dict[int, str] = {}
        self.counts = [0, 0]

    def write(self, key: int, stream: int, encoded: Encoded) -> None:
        for name in ("ids", "lengths", "documents"):
            values = getattr(encoded, "tokens" if name == "ids" else name)
            getattr(self, name).setdefault((key, stream), []).extend(values.tolist())

    def tally(self, counts: Any) -> None:
        for kind, named in counts.items():
            for name, count in named.items():
                self.told[kind, name] = self.told.get((kind, name), 0) + count

    def reject(self, line: int, reason: str, raw: bytes) -> None:
        self.refused[line] = f"{reason} {raw!r}"

    def skip(self, line: int) -> None:
        self.refused[line] = "skipped"

    def count(self, lines: int, documents: int) -> None:
        self.counts[0] += lines
        self.counts[1] += documents

    def finish(self) -> None: ...
    def abandon(self) -> None: ...


def _encoded(path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Encode a file as one part; return what was written."""
    written = _Written()
    size = path.stat().st_size
    job: Any = SimpleNamespace(
        folder=path.parent,
        key="key",
        parts=[Part(str(path), "in", 0, size, "plain", size)],
        options=SimpleNamespace(streams=2, on_bad_line="quarantine"),
        encoding=SimpleNamespace(dtypes=[np.dtype(np.int32)] * 2),
        encoder=TextEncoder(tokenizer, None, ["text", "more"], 2, None, tokenizer.eod),
    )
    with monkeypatch.context() as patch:
        patch.setattr("megatron_ext.text.preprocess.jobs.PartWriter", lambda *_: written)
        encode_part(job, 0, lambda _read, _documents: None)
    return {
        name: {k: v for k, v in kept.items() if v} if isinstance(kept, dict) else kept
        for name, kept in vars(written).items()
    }


@pytest.mark.usefixtures("small")
def test_long_lines_give_the_documents_of_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer(
        TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tiny.hf_folder()))
    )
    assert tokenizer.boundary is not None
    choice = random.Random(7)
    handled = []
    original = TextEncoder.encode_long

    def spied(self: TextEncoder, *given: Any) -> bool:
        handled.append(original(self, *given))
        return handled[-1]

    path = tmp_path / "docs.jsonl"
    for _ in range(40):
        end = choice.choice([b"\n", b"", b"\n \n\n"])
        path.write_bytes(b"\n".join(_line(choice) for _ in range(choice.randrange(1, 9))) + end)
        with monkeypatch.context() as patch:
            patch.setattr(TextEncoder, "encode_long", spied)
            in_pieces = _encoded(path, tokenizer, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(long_lines, "LONG_LINE_BYTES", 1 << 30)
            whole = _encoded(path, tokenizer, monkeypatch)
        assert in_pieces == whole
    assert handled.count(True) > 60 and handled.count(False) > 5


@pytest.mark.usefixtures("small")
def test_a_text_is_cut_neither_in_a_character_nor_in_an_escape(tmp_path: Path) -> None:
    path = tmp_path / "line"
    for text in ("\u6f22" * 90, "\U0001f600" * 70, "\\" * 300, '"' * 300, "é" * 200, "a\\" * 200):
        for shift in range(12):
            for ascii_only in (True, False):
                given = "x" * shift + text
                path.write_text(json.dumps({"text": given}, ensure_ascii=ascii_only))
                line = LongLine(0, path.stat().st_size, str(path))
                raw, places = outline(line)
                ((name, place),) = places.items()
                assert json.loads(raw) == {"text": name}
                assert "".join(text_pieces(line, place)) == given


@pytest.mark.usefixtures("small")
def test_what_is_odd_in_a_long_line_is_left_to_the_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "line"

    def pieces(content: bytes) -> str:
        path.write_bytes(content)
        line = LongLine(0, len(content), str(path))
        _, places = outline(line)
        return "".join("".join(text_pieces(line, place)) for place in places.values())

    for bad in (b"\x01", b"\xff", b"\\x", b"\\ud83d", b"\xed\xa0\x80"):
        with pytest.raises(Unusual):
            pieces(b'{"text": "' + b"a" * 100 + bad + b"a" * 100 + b'"}')
    with pytest.raises(Unusual):
        pieces(b'{"text": "' + b"\x80" * 300 + b'"}')
    monkeypatch.setattr(long_lines, "_MOST_OUTLINE_BYTES", 100)
    with pytest.raises(Unusual):
        pieces(b'{"text": [' + b"1," * 100 + b"2]}")
    path.write_bytes(b"{")
    with pytest.raises(DataError, match="line became shorter while it was read; leave the input"):
        LongLine(0, 9, str(path)).read()


@pytest.mark.usefixtures("small")
def test_long_lines_are_counted_and_sampled(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    long = json.dumps({"text": "word " * 100}).encode()
    path.write_bytes(b"{}\n" + long + b"\n" + long + b"\n{}\n" + b"x" * 500)
    size = path.stat().st_size
    part = Part(str(path), "in", 0, size, "plain", size)
    found = [block for block, _ in blocks(part)]
    assert sum(read for _, read in blocks(part)) == size
    assert [x.read() for x in found if isinstance(x, LongLine)] == [long, long, b"x" * 500]
    begin = 3 + 2 * (len(long) + 1)
    later = Part(str(path), "in", begin, size, "plain", size)
    assert place_of(later, 0) == ("in", 4)
    path.write_bytes(long)
    only = Part(str(path), "in", 0, len(long), "plain", len(long))
    assert _samples([only], ["text"])[0] == ("word " * 100)[: len(_samples([only], ["text"])[0])]
    path.write_bytes(b"[" + long + b"]" + b"x" * 300)
    assert _samples([only], ["text"]) == []


MEASURED = """
import resource, sys
from megatron_ext.programs.preprocess import main
from megatron_ext.text.preprocess import long_lines
long_lines.LONG_LINE_BYTES = 1 << 20
long_lines._PIECE_BYTES = 1 << 20
assert main(sys.argv[1:]) == 0
# The worker, a child, has the document.
print("PEAK", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.slow
def test_the_memory_for_a_document_does_not_grow_with_it(tmp_path: Path) -> None:
    peaks = []
    sentence = " ".join(tiny.sentences()[:200])
    for megabytes in (2, 12):
        path = tmp_path / f"{megabytes}.jsonl"
        text = (sentence + " ") * (megabytes * 1_000_000 // len(sentence))
        path.write_text(json.dumps({"text": text}) + "\n")
        words = f"--input {path} --output-prefix {tmp_path / 'out'}{megabytes} --append-eod"
        words += f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tiny.hf_folder()}"
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *words.split(), "--engine", "native"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split("PEAK")[1]) / 1000)
        span = open_span(f"{tmp_path / 'out'}{megabytes}_text_document", 0, None)
        assert span.tokens > 200_000 * megabytes
    # Read whole, ten more megabytes would take fifty.
    assert peaks[1] - peaks[0] < 8, peaks
