"""The status of a run is told from its files, while it runs, after a stop and after its end."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console

from megatron_ext.data.indexed import check_indexed_dataset
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess import status
from megatron_ext.text.preprocess.cli import main
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.parts import PartMarker
from tests.text import tiny
from tests.text.preprocess.runs import run


def shown(folder: Path) -> str:
    out = io.StringIO()
    status.show_status(str(folder / "out"), Console(width=200, file=out))
    return out.getvalue()


def cells(text: str, name: str) -> list[str]:
    """Return the cells of the row that starts with ``name``."""
    (row,) = [line for line in text.splitlines() if f"│ {name}" in line]
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    documents = tiny.corpus(12_000)
    documents[5]["text"] = 7
    tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    words = [sys.executable, str(tiny.ROOT / "tools" / "preprocess_data.py"), "--workers", "2"]
    words += ["--input", "in.jsonl", "--output-prefix", str(tmp_path / "out"), "--engine=native"]
    words += ["--part-megabytes", "0.2", "--on-bad-line", "quarantine"]
    words += ["--tokenizer-type", "SentencePieceTokenizer"]
    words += ["--tokenizer-model", str(tiny.sentencepiece_model())]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        while not list((tmp_path / "out.parts").glob("p000000.*.json")):
            assert process.poll() is None
            time.sleep(0.01)
        text = shown(tmp_path)
    name, parts, size, documents_, tokens, rejected, rate = cells(text, "in.jsonl")
    done, total = map(int, parts.split("/"))
    assert 0 < done < total
    assert 0 < float(size.split("/")[0]) < float(size.split("/")[1])
    assert int(documents_) > 100 * done and int(tokens) > int(documents_)
    assert (rejected, name) == ("1", "in.jsonl") and float(rate) > 0
    assert re.search(r"The run is running; \d parts are being encoded; a part was last fin", text)
    assert re.search(
        r"Since this start: [\d.]+ MB/s, \d+ tokens/s, 1 machine, .* ETA 00:\d\d\.", text
    )
    assert process.returncode == 0
    text = shown(tmp_path)
    info = check_indexed_dataset(tmp_path / "out_text_document")
    found = cells(text, f"{tmp_path}/out_text_document")
    assert found[1:] == [str(info.num_documents), str(info.num_tokens)] == ["11999", found[2]]
    assert f"Rejected lines: 1; they are in {tmp_path}/out.rejected.jsonl." in text


def test_a_stopped_run_and_its_failed_tasks_are_told(tmp_path: Path) -> None:
    for number in range(30):
        tiny.write_jsonl(tmp_path / f"{number:02}.jsonl", tiny.corpus(3))
    tiny.write_jsonl(tmp_path / "99.jsonl", [{"txt": "x"}])
    with pytest.raises(DataError):
        run(tmp_path, f"{tmp_path}/*.jsonl", workers=1)
    failed = {"kind": "refused", "messages": ["99.jsonl line 1 has no key 'text'"]}
    (tmp_path / "out.parts" / "failed.0.json").write_text(json.dumps(failed))
    (tmp_path / "out.parts" / "p000001.0.k0.s0.bin").symlink_to("gone")  # as if removed meanwhile
    text = shown(tmp_path)
    (tmp_path / "out.parts" / "p000001.0.k0.s0.bin").unlink()
    assert cells(text, f"{tmp_path}/99.jsonl")[1] == "0/1"
    assert cells(text, "11 other inputs")[1] == "11/11"
    assert cells(text, "all")[1:4] == ["30/31", *cells(text, "all")[2:3], "90"]
    assert "The run is not running; the same command goes on with it; 0 parts are being" in text
    assert "A task has failed: 99.jsonl line 1 has no key 'text'" in text
    assert run(tmp_path, f"{tmp_path}/[0-8]*.jsonl")[0].documents == 90


def test_the_command_needs_only_the_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output-prefix", str(tmp_path / "none"), "--status"]) == 2
    assert "none.parts nor datasets; give the prefix of the run." in capsys.readouterr().err
    run(tmp_path, tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(9)))
    assert main(["--status", "--output_prefix", str(tmp_path / "out"), "--input", "a"]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["--status", "--output-prefix", str(tmp_path / "out"), "--worker"]) == 2
    assert "Unknown flag `--worker`; did you mean `--workers`?" in capsys.readouterr().err
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "plan.json").write_text("{}")
    with pytest.raises(DataError, match="plan.json cannot be read"):
        status.show_status(str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="has neither a run in "):
        status.show_status(str(tmp_path / "elsewhere"))
    (tmp_path / "early" / "out.parts").mkdir(parents=True)
    text = " ".join(shown(tmp_path / "early").split())
    assert text == f"The run in {tmp_path}/early/out.parts has not cut its input into parts yet."


def marker(number: int, **more: Any) -> PartMarker:
    facts = {"lines": 9, "documents": 8, "tokens": 100, "rejected": 1, "skipped": 0, "sizes": {}}
    own = {"host": "a", "seconds": 2.0, "ended": 1020.0, **facts, **more}
    return PartMarker(f"p{number:06}.x", "key", **own)


PARTS = [Part("/in", "in", 0, 1, "plain", size * 10**6) for size in (1, 2, 3, 4)]
MARKERS = [
    marker(0, ended=999.0, tokens=10**6, seconds=50.0, host="of yesterday"),
    marker(1, ended=1020.0, seconds=3.0, tokens=200, documents=5),
    marker(2, ended=1050.0, seconds=5.0, tokens=300, host="b", rejected=4),
    None,
]


def test_speed_and_time_left_are_those_of_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since this start 5 of 10 MB were read and 4 are left; the run stands still or goes on."""
    monkeypatch.setattr(status.time, "time", lambda: 1100.0)
    (tmp_path / "started").write_text("1000")
    assert list(status._lines(tmp_path, PARTS, MARKERS)) == [
        "The run is not running; the same command goes on with it; 0 parts are being encoded; "
        "a part was last finished 50 s ago.",
        "Since this start: 0.1 MB/s, 10 tokens/s, 2 machines, 4.0 s for a part; ETA 00:40.",
    ]
    for name, age in (("000003.a", 59), ("000003.b", 99), ("000002.c", 1), ("000009.d", 1)):
        path = tmp_path / f"p{name}.k0.s0.bin"
        path.touch()
        os.utime(path, (1100 - age, 1100 - age))
    assert list(status._lines(tmp_path, PARTS, MARKERS)) == [
        "The run is running; 1 parts are being encoded; a part was last finished 50 s ago.",
        "Since this start: 0.1 MB/s, 5 tokens/s, 2 machines, 4.0 s for a part; ETA 01:20.",
    ]
    (tmp_path / "started").write_text("1060")
    os.utime(tmp_path / "p000003.a.k0.s0.bin", (1040, 1040))
    assert list(status._lines(tmp_path, PARTS, MARKERS)) == [
        "The run is not running; the same command goes on with it; 0 parts are being encoded; "
        "no part was finished since this start."
    ]


def test_a_row_sums_up_its_finished_parts() -> None:
    row = status._Row("[in]", PARTS, MARKERS)
    assert row.cells() == ["\\[in]", "3/4", "6.0/10.0", "21", "1000500", "6", "0.1"]
    assert status._Row("in", PARTS[3:], [None]).cells()[1:] == [
        "0/1",
        "0.0/4.0",
        "0",
        "0",
        "0",
        "n/a",
    ]


def rows_of(inputs: int, unfinished: int) -> list[list[str]]:
    """Return names and numbers of parts of the table's rows, where one input is not finished."""
    names = [f"in{number:02}" for number in range(inputs)]
    parts = [Part("/in", name, 0, 1, "plain", 10**6) for name in names]
    markers = [None if n == unfinished else marker(n, tokens=n) for n in range(inputs)]
    table = status._table("out", parts, markers)
    return [[*each] for each in zip(*(table.columns[i].cells for i in (0, 1, 4)), strict=True)]


def test_a_table_has_the_unfinished_inputs_and_the_sum_of_all() -> None:
    assert rows_of(1, 0) == [["in00", "0/1", "0"]]
    assert rows_of(2, 1) == [["in00", "1/1", "0"], ["in01", "0/1", "0"], ["all", "1/2", "0"]]
    twenty = rows_of(20, 7)
    assert [row[0] for row in twenty] == [*(f"in{n:02}" for n in range(20)), "all"]
    assert twenty[-1] == ["all", "19/20", str(sum(range(20)) - 7)]
    more = rows_of(22, 7)
    listed = [7, *(n for n in range(20) if n != 7)]
    assert [row[0] for row in more] == [f"in{n:02}" for n in listed] + ["2 other inputs", "all"]
    assert more[-2:] == [["2 other inputs", "2/2", "41"], ["all", "21/22", str(sum(range(22)) - 7)]]


def test_a_run_that_holds_its_lock_is_running(tmp_path: Path) -> None:
    (tmp_path / "started").write_text(str(time.time() - 500))
    lines = list(status._lines(tmp_path, PARTS[3:], [None]))
    assert lines[0].startswith("The run is not running; ")
    with FileLock(tmp_path / "lock"):
        lines = list(status._lines(tmp_path, PARTS[3:], [None]))
    assert lines == [
        "The run is running; 0 parts are being encoded; no part was finished since this start."
    ]
    lines = list(status._lines(tmp_path, PARTS[3:], [None]))
    assert lines[0].startswith("The run is not running; ")
