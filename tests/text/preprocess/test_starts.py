"""Files as people have them: marks, blank lines, arrays, encodings, and what a report counts."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megatron_ext.errors import DataError
from megatron_ext.text.preprocess import starts
from megatron_ext.text.preprocess.cli import main
from megatron_ext.text.preprocess.run import Report
from tests.text import tiny
from tests.text.preprocess.runs import check_pair, huggingface, left_in
from tests.text.preprocess.runs import run as run_files

TEXTS = ["the first document", "a \u00e9 second\n one"]
LINES = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in TEXTS]
MARK = b"\xef\xbb\xbf"
ARRAY = json.dumps([{"text": text} for text in TEXTS], indent=1, ensure_ascii=False).encode()


def run(folder: Path, content: bytes, name: str = "in", **more: Any) -> tuple[Report, list[str]]:
    (folder / name).write_bytes(content)
    return run_files(folder, folder / name, workers=1, engine="native", **more)


@pytest.mark.parametrize(
    "content",
    [
        MARK + b"\n".join(LINES),
        b"\n".join([*LINES, b"", b" \r", b""]),
        b"\n".join([LINES[0], MARK + LINES[1], MARK]),
        b"\r\n".join([MARK + LINES[0], MARK + LINES[1], b""]),
        ARRAY,
        MARK + b" \n" + ARRAY + b" \n",
        b"[" + b",".join(LINES) + b"]",
        gzip.compress(MARK + LINES[0] + b"\n", mtime=0) + gzip.compress(LINES[1], mtime=0),
        gzip.compress(ARRAY, mtime=0),
        zstandard.compress(ARRAY),
    ],
)
def test_the_same_texts_are_the_same_documents(tmp_path: Path, content: bytes) -> None:
    report, _ = run(tmp_path, content)
    check_pair(tmp_path, TEXTS)
    assert (report.documents, report.rejected) == (2, 0)
    assert not (tmp_path / "out.parts").exists()


def test_an_array_larger_than_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "BLOCK_BYTES", 7)
    more = [{"a": "]},{"}, True, False, None, -1.5e-7, "\u00e9\U0001f600"]
    rows = [{"text": "x" * n, "more": [n, *more]} for n in range(40)]
    for number, indent in enumerate((None, 2)):
        path = tmp_path / f"{number}"
        path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
        starts.unpack_array(str(path), "plain", "in", tmp_path / "items")
        lines = (tmp_path / "items").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows
    good = json.dumps(rows).encode()
    for content, sentence in (
        (good[:-3] + b"\xff" + good[-3:], rf"is not UTF-8 \(byte {len(good) - 2}\); convert it"),
        (good + b" " * 3000 + b"{}", r"it goes on after the end of the array \(40 items\)"),
        (good[:-1] + b" " * 3000, "the file ends after its item 40, not a comma or a bracket"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            starts.unpack_array(str(path), "plain", "in", tmp_path / "items")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (ARRAY[:-3], r"begins as a JSON array, but its item 2 is not valid JSON \("),
        (ARRAY[:-1], "begins as a JSON array, but the file ends after its item 2, not a comma"),
        (ARRAY + b"{}", r"but it goes on after the end of the array \(2 items\); mend it, or give"),
        (ARRAY.replace(b"},", b"}"), "but '{' follows its item 1, not a comma or a bracket; mend"),
        (b'[{"text": "\xe9"}]', r"is not UTF-8 \(byte 12\); convert it by `iconv`"),
        (b'[{"title": "a"}]', r"in item 1 has no key 'text' \(it has title; .*\); mend the line"),
        (b"[]", r"gives no token, with 0 empty documents and 0 refused lines; give files with"),
        (b"", r"gives no token, with 0 empty documents and 0 refused lines; give files with"),
        (b'{"text": ""}\n{"text": []}\n', r"gives no token, with 2 empty documents and 0 refused"),
        (b"\n".join(LINES).decode().encode("utf-16"), "is text in UTF-16, but UTF-8 is needed; co"),
        (LINES[0].decode().encode("utf-16-be"), "is text in UTF-16BE, but UTF-8 is needed; conv"),
        (LINES[0].decode().encode("utf-16-le"), "is text in UTF-16LE, but UTF-8 is needed; conv"),
        (f"[{LINES[0].decode()}]".encode("utf-16-be"), "is text in UTF-16BE, but UTF-8 is needed"),
        (f"[{LINES[0].decode()}]".encode("utf-16-le"), "is text in UTF-16LE, but UTF-8 is needed"),
        (LINES[0].decode().encode("utf-32"), "is text in UTF-32, but UTF-8 is needed; convert it"),
        (gzip.compress(LINES[0].decode().encode("utf-16"), mtime=0), "is text in UTF-16, but"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        run(tmp_path, content)
    assert left_in(tmp_path) == []


def test_a_report_counts_what_was_not_used(tmp_path: Path) -> None:
    lines = [
        b'{"text": "a", "id": 1, "meta": {"text": "b"}}', b'{"text": "", "id": 2}', b" ", MARK,
        b'{"text": null}', b'{"text": 3}', b'{"title": "x"}', b'{"text": 4}', b'{"text": "\xe9"}',
        b'{"text": "x", "text": "y"}', b'{"text": "more %s inside"}' % tiny.END.encode(), b"", b"",
    ]  # fmt: skip
    flags = {"on_bad_line": "quarantine", "flags": None}
    report, _ = run(tmp_path, b"\n".join(lines), **flags)
    check_pair(tmp_path, ["a", "", "y", f"more {tiny.END} inside"])
    kind = "under key 'text', not a text or a list of texts"
    assert report.remarks[:5] == [
        "1 blank lines at the end of inputs were skipped.",
        f"Reasons of refused lines: has int {kind} (2), is blank (2), has no key 'text' (1), has "
        f"null {kind} (1), is not UTF-8 (1).",
        "Keys of the lines that were not used: id (2), meta (1).",
        "Keys that lines have twice, of which the last value was used: text (1).",
        "Empty texts, stored as documents without a token: text (1).",
    ]
    assert report.rejected == 7


def test_names_that_a_sentence_leaves_out_are_in_a_file(tmp_path: Path) -> None:
    row = {"text": "a", **dict.fromkeys((f"key{number}" for number in range(45)), 1)}
    report, _ = run(tmp_path, json.dumps(row).encode() + b'\n{"text": "b", "key44": 2}')
    path = tmp_path / "out_remarks.json"
    unread, where = report.remarks
    assert unread.startswith("Keys of the lines that were not used: key44 (2), key0 (1), ")
    assert unread.endswith("and 5 more.") and str(path) in where
    (names,) = json.loads(path.read_text()).values()
    assert names == {"key44": 2, **{f"key{number}": 1 for number in range(44)}}
    run(tmp_path, b'{"text": "a", "other": 1}')
    assert not path.exists()


@pytest.mark.parametrize("size", [1e-6, 1])
def test_blank_lines_within_a_file_are_bad_lines(tmp_path: Path, size: float) -> None:
    content = b"\n".join([LINES[0], b"", LINES[1], b"", b"\r", b" "])
    with pytest.raises(DataError, match="in line 2 is blank; mend the line, or set bad lines as"):
        run(tmp_path, content, part_megabytes=size)
    report, _ = run(tmp_path, content, part_megabytes=size, on_bad_line="quarantine")
    check_pair(tmp_path, TEXTS)
    assert (report.rejected, report.remarks[0][:13]) == (1, "3 blank lines")


def test_contiguous_partitions_leave_blank_lines_out(tmp_path: Path) -> None:
    lines = [LINES[0], b"", b'{"text": 1}', b"", LINES[1], LINES[0], b"", b""]
    more: dict[str, Any] = {"partitions": 2, "keep_sequential_samples": True}
    run(tmp_path, b"\n".join(lines), on_bad_line="quarantine", **more)
    check_pair(tmp_path, [TEXTS[0]], "0_text_document")
    check_pair(tmp_path, [TEXTS[1], TEXTS[0]], "1_text_document")
    # Here only the blank lines at the end have no documents.
    run(tmp_path, b"\n".join([*LINES, LINES[0], b"", b"", b""]), **more)
    check_pair(tmp_path, [*TEXTS, TEXTS[0]], "0_text_document")


def test_nothing_accepted_ends_with_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(b'{"a": 1}\n{"b": 2}\n')
    words = ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "out")]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert main([*words, "--on-bad-line", "quarantine"]) == 1
    said = capsys.readouterr().err
    assert "gives no token, with 0 empty documents and 2 refused lines; give files with" in said
    assert "error: Reasons of refused lines: has no key 'text' (2)." in said
    assert "error: 2 bad lines are in" in said
    assert left_in(tmp_path) == ["out.rejected.jsonl"]


def test_the_end_of_document_within_a_text_is_told(tmp_path: Path) -> None:
    content = json.dumps({"text": f"one {tiny.END} two"}).encode()
    report, _ = run(tmp_path, content, flags=huggingface())
    (remark,) = report.remarks
    assert remark == (
        "The end-of-document token is spelled out 1 times within texts, and was stored as that "
        "token there too."
    )


def test_columns_that_are_not_used_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": TEXTS, "id": [1, 2], "url": ["a", "b"]})
    parquet.write_table(table, tmp_path / "in.parquet")
    _, said = run_files(tmp_path, tmp_path / "in.parquet", workers=1, engine="native")
    check_pair(tmp_path, TEXTS)
    assert "Columns of the tables that are not used: id (1 files), url (1 files)." in said
