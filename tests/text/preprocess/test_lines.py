"""The small parts of the tool: lines, inputs, sentences, progress."""

import gzip
import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_ext.errors import DataError
from megatron_ext.text.preprocess import inputs, packed
from megatron_ext.text.preprocess.encode import (
    EMPTY,
    ENDS_WITHIN,
    LANGUAGES,
    TWICE,
    UNREAD,
    BadLine,
    Encoded,
    TextEncoder,
    parse_line,
    sentence_splitter,
)
from megatron_ext.text.preprocess.inputs import (
    Part,
    Source,
    blocks,
    cut,
    expand,
    needs_spool,
    spool,
)
from megatron_ext.text.preprocess.packed import packing_of
from megatron_ext.text.preprocess.texts import _samples
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.boundaries import PART_CHARACTERS
from tests.text import tiny


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "is blank"),
        (b" \t\r", "is blank"),
        (b'{"text": "a"', "is not valid JSON ("),
        (b"\xff\xfe", "is not UTF-8 (byte 1 of the line)"),
        (b'{"text": "\xe9"}', "is not UTF-8 (byte 11 of the line)"),
        (b'["a"]', "is not a JSON object"),
        (
            b'{"title": "a", "b": 1}',
            "has no key 'text' (it has title, b; `--json-keys` names other",
        ),
        (b"{}", "has no key 'text' (it has none; `--json-keys` names other keys)"),
        (json.dumps(dict.fromkeys("abcdefghijklmn")).encode(), "has no key 'text' (it has a, b, "),
        (
            json.dumps(dict.fromkeys("abcdefghijkl")).encode(),
            "has no key 'text' (it has a, b, c, d, e, f, g, h, i, j, k, l; `--json-keys` names ot",
        ),
        (b'{"text": null}', "has null under key 'text', not a text or a list of texts"),
        (b'{"text": 3}', "has int under key 'text'"),
        (b'{"text": ["a", 3]}', "has list under key 'text'"),
        (b'{"text": "\\ud800"}', "has half a surrogate pair under key 'text'"),
        (b"[" * 100_000, "is not valid JSON ("),
    ],
)
def test_bad_lines_are_told(line: bytes, reason: str) -> None:
    with pytest.raises(BadLine) as caught:
        parse_line(line, ["text"])
    assert str(caught.value).startswith(reason)


def test_good_lines() -> None:
    assert parse_line(b'{"b": "x", "a": ["y", ""]}\r', ["a", "b"]) == [["y", ""], ["x"]]
    # What Python's own parser takes, Megatron-LM takes.
    assert parse_line(b'{"text": "x", "score": NaN, "n": 1e999}', ["text"]) == [["x"]]
    assert parse_line(b'{"text": "x", "other": "\\ud800"}', ["text"]) == [["x"]]
    assert parse_line(b'{"text": "x", "text": "y"}', ["text"]) == [["y"]]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=400).map(lambda b: b.replace(b"\r", b"\n")), size=st.integers(1, 60))
def test_parts_cover_the_file_and_end_at_line_ends(tmp_path: Path, data: bytes, size: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(data)
    if packed._OTHER_MAGIC.keys() & {data[:3], data[:4]} or packing_of(str(path)) != "plain":
        return
    parts = cut([Source(str(path), "f", "plain")], 2, size / 1e6)
    pieces = [b"".join(block for block, _ in blocks(part)) for part in parts]
    assert b"".join(pieces) == data
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert sum(read for part in parts for _, read in blocks(part)) == len(data)


def test_blocks_hold_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 10)
    path = tmp_path / "f"
    path.write_bytes(b"short\n" + b"long" * 20 + b"\nlast line without end")
    size = path.stat().st_size
    found = [block for block, _ in blocks(Part(str(path), "f", 0, size, "plain", size))]
    assert b"".join(found) == path.read_bytes()
    assert all(block.endswith(b"\n") for block in found[:-1])


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_packed_files_in_several_members(tmp_path: Path, packing: str) -> None:
    text = b"".join(b'{"text": "%d"}\n' % i for i in range(200_000))
    pack = gzip.compress if packing == "gzip" else zstandard.ZstdCompressor().compress
    path = tmp_path / "f"
    path.write_bytes(pack(text[:1_000_000]) + pack(text[1_000_000:]))
    (part,) = cut([Source(str(path), "f", packing_of(str(path)))], 4, None)
    assert part.packing == packing
    found = list(blocks(part))
    assert b"".join(block for block, _ in found) == text
    assert sum(read for _, read in found) <= path.stat().st_size
    spool(str(path), tmp_path / "plain", None)
    assert (tmp_path / "plain").read_bytes() == text
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=rf"f is not a whole {packing} file \(.*\); copy it again"):
        list(blocks(part))


def test_damaged_packed_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(b"ab\n" * 9999))
    packed[-2] ^= 255
    path.write_bytes(packed)
    with pytest.raises(DataError, match=r"f is not a whole zstd file"):
        list(blocks(Part(str(path), "f", 0, 9, "zstd", 9)))


def test_inputs_are_expanded_and_lone_packed_ones_shared(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "odd[1].jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert expand([f"{tmp_path}/?.jsonl"]) == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert expand([f"{tmp_path}/odd[1].jsonl"]) == [f"{tmp_path}/odd[1].jsonl"]
    assert expand(["-"]) == ["-"]
    with pytest.raises(DataError, match=r"`--input` \(.*none\*\) matches no file; give files"):
        expand([f"{tmp_path}/none*"])
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x"))
    path = str(tmp_path / "a.gz")
    assert needs_spool([path], 2) == [path]
    assert needs_spool([path], 1) == []
    assert needs_spool([path, path], 2) == []
    assert needs_spool(["-"], 1) == ["-"]
    assert [packed.is_stream(name) for name in ("-", "/dev/null", path, str(tmp_path))] == [
        True, True, False, False,
    ]  # fmt: skip
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    assert expand([f"{tmp_path}/*s/"]) == [f"{tmp_path}/texts"]
    assert f"{tmp_path}/texts" not in expand([f"{tmp_path}/*"])
    for rows, alone in ((2, [f"{tmp_path}/t"]), (1, [])):  # a group of two rows, or two groups
        parquet.write_table(pyarrow.table({"a": [1, 2]}), tmp_path / "t", row_group_size=rows)
        assert needs_spool([f"{tmp_path}/t"], 2, ["a"]) == alone
    assert inputs.identity_of("/dev/null") != inputs.identity_of("/dev/null")


def test_workers_get_parts_of_a_size_that_keeps_them_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About four parts for each worker, not too small, and not so large that a kill loses much."""
    path = tmp_path / "f"
    path.write_bytes(b"0123456789abcde\n" * 1000)
    source = [Source(str(path), "f", "plain")]
    assert [len(cut(source, workers, None, 160)) for workers in (1, 5, 25)] == [4, 20, 100]
    assert [len(cut(source, workers, None, 4000)) for workers in (1, 5)] == [4, 4]
    assert [len(cut(source, 5, size, 4000)) for size in (0.0016, 1.0)] == [10, 1]
    monkeypatch.setattr(inputs, "_LARGEST_PART", 1600)
    assert len(cut(source, 1, None, 160)) == 10


def test_other_formats_are_named(tmp_path: Path) -> None:
    for name, head in {"bzip2": b"BZh9", "xz": b"\xfd7zXZ", "zip": b"PK\x03\x04"}.items():
        (tmp_path / "f").write_bytes(head)
        with pytest.raises(
            DataError, match=rf"`--input` \(.*f\) is a {name}.* file; give jsonl, p"
        ):
            packing_of(str(tmp_path / "f"))


@pytest.mark.parametrize(
    ("lang", "text"),
    [
        ("english", "One here.| Two there!| Three?"),
        ("english", "Dr. Smith met Mr. Jones.| They spoke."),
        ("english", "J. K. Rowling wrote it.| Yes."),
        ("english", "So did I.| Then we left."),
        ("english", "It costs 3.50 dollars e.g. here.| Ok"),
        ("english", 'He said "go."| She went.'),
        ("english", "Wait... what? no way.| Fine."),
        ("english", "  No end\n\nat all  "),
        ("english", "End of paragraph p.|\n\nNext one."),
        ("english", "\u4eca\u5929\u597d\u3002|\u4f60\u5462\uff1f|\u597d"),
        ("english", ""),
        ("english", " \n "),
        ("german", "Am 3. Mai kam z.B. Anna.| Sie blieb."),
        ("german", "Er kam 1999.| Dann blieb er.| Am 12. Mai."),
        ("english", "On page 3.| Then 12.| Next."),
        ("english", "Ask the Dr.|\n\nNext one.|\n\nlower case.|\n\n and more"),
        ("english", "He (Mr.)| Smith came."),
        ("english", "Choose b.| Then go on."),
        ("dutch", "Op 3. Mei kwam dhr. Smit.| Goed."),
        ("french", "M. Dupont est l\u00e0.| Bien."),
    ],
)
def test_sentences_end_at_the_bars(lang: str, text: str) -> None:
    sentences = [part.strip() for part in text.split("|") if part.strip()]
    assert sentence_splitter(lang, keep_newlines=False)(text.replace("|", "")) == sentences


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='aB. !?\n"\u3002)1', max_size=60), st.sampled_from(LANGUAGES))
def test_sentences_lose_nothing(text: str, lang: str) -> None:
    assert "".join(sentence_splitter(lang, keep_newlines=True)(text)) == text
    joined = "".join(sentence_splitter(lang, keep_newlines=False)(text))
    assert "".join(joined.split()) == "".join(text.split())


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_a_line_that_unpacks_to_gigabytes_is_refused_in_bounded_memory(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 16 << 20)
    path = tmp_path / f"docs.jsonl.{packing}"
    content = b'{"text": "a"}\n' * 3 + b'{"text": "' + b"a" * (200 << 20) + b'"}\n'
    if packing == "gzip":
        path.write_bytes(gzip.compress(content, 1))
    else:
        path.write_bytes(zstandard.ZstdCompressor().compress(content))
    del content
    size = path.stat().st_size
    part = Part(str(path), str(path), 0, size, packing, size)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"docs.* has more than 16,777,216 bytes in line 4, which"):
        for _ in blocks(part):
            pass
    # zstd gives all that a piece of its input holds at once.
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


def test_the_line_of_a_later_part_is_counted_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 4 << 20)
    path = tmp_path / "docs.jsonl"
    first, size = b"{}\n" * 5, 9 << 20
    path.write_bytes(first + b"x" * size)
    # Items of an array come unpacked; those of a plain file may be as long as the file.
    plain = Part(str(path), str(path), len(first), len(first) + size, "plain", size)
    assert sum(len(block) for block, _ in blocks(plain)) == size
    part = Part(str(path), str(path), len(first), len(first) + size, "array", size)
    with pytest.raises(DataError, match="in line 6, which is the longest line that is read"):
        list(blocks(part))


def test_a_line_of_the_greatest_length_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 9 << 20)
    path = tmp_path / "docs.jsonl"
    path.write_bytes(b"x" * (9 << 20) + b"\n{}\n")
    size = path.stat().st_size
    for packing in ("plain", "array"):
        part = Part(str(path), str(path), 0, size, packing, size)
        assert b"".join(block for block, _ in blocks(part)) == path.read_bytes()


def test_one_text_of_each_batch_is_compared_and_none_that_is_long() -> None:
    class Fast:
        def __init__(self) -> None:
            self.compared: list[str] = []

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [[1] * len(text) for text in texts]

        def compare_ids(self, text: str, ids: Sequence[int]) -> None:
            assert len(text) == len(ids)
            self.compared.append(text)

        def compare(self, texts: Sequence[str]) -> None:
            self.compared += texts

    fast: Any = Fast()
    encoder = TextEncoder(None, fast, ["text"], 1, None, None)  # type: ignore[arg-type]
    for _ in range(20):
        encoder._encode([[letter] for letter in "abcdefghij"])
    assert len(fast.compared) == 20 and len(set(fast.compared)) == 10
    encoder._encode([["x" * 20_000, "y" * 17_000], ["z" * 18_000]])
    assert fast.compared[-1] == "y" * 16_384, "the beginning of the shortest"
    encoder._encode([["x" * 20_000, "y" * 16_384]])
    assert fast.compared[-1] == "y" * 16_384
    encoder._encode([[]])
    assert len(fast.compared) == 22


def test_a_long_text_is_encoded_in_parts() -> None:
    tokenizer = build_tokenizer(
        TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tiny.hf_folder()))
    )
    asked: list[int] = []

    class Spied:
        boundary = tokenizer.boundary

        def encode_batch(self, texts: Sequence[str]) -> Any:
            asked.extend(map(len, texts))
            return tokenizer.encode_batch(texts)

    text = " ".join(tiny.sentences()[:500]) * 20
    spied: Any = Spied()
    encoded = TextEncoder(spied, None, ["text"], 1, None, 7)._encode([["a", text], [""], ["b"]])
    ids = [*tokenizer.tokenize("a"), *tokenizer.tokenize(text), 7, *tokenizer.tokenize("b"), 7]
    assert encoded.tokens.tolist() == ids
    assert encoded.documents.tolist() == [2, 0, 1]
    assert len(text) > 6 * PART_CHARACTERS and max(asked) < PART_CHARACTERS + 200


def test_a_line_of_many_blocks_is_not_kept_twice(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * (packed.BLOCK_BYTES * 4) + b"\ny\n")
    part = Part(str(path), "long", 0, path.stat().st_size, "plain", 1)
    found = blocks(part)
    tracemalloc.start()
    block, _ = next(found)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(block) >= packed.BLOCK_BYTES * 4 and kept < 1.5 * len(block)


def test_samples_come_from_all_over_the_input(tmp_path: Path) -> None:
    parts = []
    for name in "abc":
        path = tmp_path / name
        texts = [f"{name}{number}" for number in range(2000)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        size = path.stat().st_size
        parts.append(Part(str(path), name, 0, size, "plain", size))
    samples = set(_samples(parts, ["text"]))
    assert {"a0"} <= samples and {text[0] for text in samples} == set("abc")
    numbers = sorted(int(text[1:]) for text in samples)
    assert numbers[-1] > 1500 and len(numbers) > 500


class Letters:
    """A tokenizer of one id per letter, which refuses texts with a question mark."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any("?" in text for text in texts):
            raise ValueError("a question")
        return [[ord(letter) for letter in text] for text in texts]


def test_lines_keep_their_stream_beside_refused_ones_and_are_counted_by_what_they_hold() -> None:
    """Lines 3 to 8 of a part, dealt to two streams; the tokenizer refuses the fifth."""
    lines = [
        {"text": "a", "title": ["", "b"], "id": 1},
        {"text": ["", ""], "title": "c"},
        {"text": "what?", "title": "d"},
        {"text": "e!", "title": ""},
        {"title": "f", "text": "g"},
    ]
    raw = [json.dumps(line).encode() for line in lines]
    raw.append(b'{"text": "h", "title": "i", "in": {"text": 1, "title": 2}, "id": 1, "id": 2}')
    refused: list[int] = []
    written: dict[tuple[int, int], tuple[str, list[int]]] = {}
    counted: dict[str, Counter[str]] = {}

    def write(key: int, stream: int, encoded: Encoded) -> None:
        text = "".join(map(chr, encoded.tokens.tolist()))
        written[key, stream] = text, encoded.documents.tolist()

    def tally(counts: Mapping[str, Mapping[str, int]]) -> None:
        counted.update({kind: +Counter(named) for kind, named in counts.items()})

    tokenizer: Any = Letters()
    encoder = TextEncoder(tokenizer, None, ["text", "title"], 2, None, ord("!"))
    refuse = lambda number, reason: refused.append(number)  # noqa: E731
    assert encoder.encode(raw, 3, refuse, write, tally) == 5
    assert refused == [5]
    assert written == {
        (0, 0): ("e!!h!", [0, 1, 1]), (0, 1): ("a!g!", [1, 1]),
        (1, 0): ("c!i!", [1, 0, 1]), (1, 1): ("b!f!", [1, 1]),
    }  # fmt: skip
    assert counted == {
        UNREAD: {"id": 2, "in": 1}, TWICE: {}, EMPTY: {"text": 1, "title": 1},
        ENDS_WITHIN: {"text": 1},
    }  # fmt: skip


def test_a_change_of_the_last_bytes_is_seen_where_times_and_size_are_those_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 200_000)
    about = os.stat(path)
    monkeypatch.setattr(inputs.os, "fstat", lambda descriptor: about)
    before = inputs.identity_of(str(path))
    for change in (b"x" * 199_999 + b"y", b"y" + b"x" * 199_999):
        path.write_bytes(change)
        assert inputs.identity_of(str(path)) != before
    path.write_bytes(b"x" * 200_000)
    assert inputs.identity_of(str(path)) == before


def test_groups_of_exactly_the_size_of_a_part_are_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "group_sizes", lambda *_: [10, 4, 6, 11, 3])
    monkeypatch.setattr(inputs, "_size", lambda source: 34)
    parts = cut([Source("f", "f", "parquet")], 1, 10 / 1e6)
    assert [(part.start, part.end, part.num_bytes) for part in parts] == [
        (0, 1, 10), (1, 3, 10), (3, 4, 11), (4, 5, 3),
    ]  # fmt: skip
