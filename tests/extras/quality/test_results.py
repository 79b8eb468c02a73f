"""The figures as lines, JSON, a list of duplicates and a page; the tool as users run it."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.extras.quality.measure import Quality, QualityOptions, measure
from megatron_ext.extras.quality.page import quality_page
from megatron_ext.extras.quality.results import check_output, lines, write_duplicates
from megatron_ext.extras.quality.spans import suffix_library
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer
from tests.extras.quality.made import write
from tests.extras.report.whole_page import WholePage
from tests.tools.test_dataset_tools import run

EVIL = "<script>alert(1)</script> 'a' \"b\" & \x1b\x1b\x1b"


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Write two datasets with 5 copies in 3 groups, and an empty document."""
    random = np.random.default_rng(0)
    texts = [bytes(random.integers(97, 123, 80).astype(np.uint8)) for _ in range(40)]
    one = [EVIL.encode(), *texts[:20], EVIL.encode(), texts[3], b""]
    other = [*texts[20:], texts[3], texts[30], texts[30]]
    made = ((tmp_path / "a&b", one), (tmp_path / "c", other))
    return [write(path, [list(text) for text in texts]) for path, texts in made]


@pytest.fixture
def quality(prefixes: list[str]) -> Quality:
    return measure(prefixes, ByteLevelTokenizer(), QualityOptions())[0]


def test_lines_tell_the_figures(quality: Quality) -> None:
    told = "\n".join(lines(quality))
    for part in (
        f"quality    47 documents with {quality.tokens:,} tokens in 2 datasets; 1 are empty",
        "exact      3 groups; 5 documents (10.6%) with ",
        "  3 documents: a&b:4 a&b:22 c:20\n",
        "  3 documents: c:10 c:21 c:22\n",
        "  2 documents: a&b:0 a&b:21\n",
        "characters ",
    ):
        assert part in told, part
    assert ("note       Repeated spans need" in told) == (suffix_library() is None)


def test_the_page_holds_the_figures_and_runs_no_text(quality: Quality) -> None:
    text = quality_page(quality, now=1e9)
    page = WholePage(text)
    told = " ".join(page.texts)
    for part in (
        "Exact duplicates: 3 groups; 5 documents (10.6%) with",
        f"{quality.tokens:,}",
        "a&b:4 a&b:22 c:20",
        "2001-09-09 01:46:40 UTC",
        "Documents by length in tokens",
        "alert(1)",
    ):
        assert part in told, part
    assert "script" not in page.tags
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org)", text)
    # A column for each bin of lengths that holds documents: 0, 32-63 and 64-127.
    assert text.count('<path class="columns"') == 3
    assert "64–127: 44 documents" in text
    defined = set(re.findall(r"--([\w-]+):", text))
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= defined


def test_the_list_of_duplicates_names_what_to_drop(prefixes: list[str], tmp_path: Path) -> None:
    found, documents = measure(prefixes, None, QualityOptions())
    jsonl, parquet = tmp_path / "d.jsonl", tmp_path / "d.parquet"
    assert write_duplicates(found, documents, jsonl) == 8
    rows = [json.loads(line) for line in jsonl.read_text().splitlines()]
    a, c = prefixes
    assert [tuple(row.values()) for row in rows] == [
        (0, a, 0, "first"), (0, a, 21, "exact"),
        (1, a, 4, "first"), (1, a, 22, "exact"), (1, c, 20, "exact"),
        (2, c, 10, "first"), (2, c, 21, "exact"), (2, c, 22, "exact"),
    ]  # fmt: skip
    pa = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
    assert write_duplicates(found, documents, parquet) == 8
    assert pa.read_table(parquet).to_pylist() == rows


def test_near_duplicates_are_marked_in_the_list(prefixes: list[str], tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="near duplicates need rensa")
    text = list(range(200, 300))
    prefix = write(tmp_path / "near", [text, [*text[:95], 1], [*text[:95], 1], [7] * 50, text])
    found, documents = measure([prefix], None, QualityOptions(near_duplicates=0.8))
    write_duplicates(found, documents, tmp_path / "d.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    kinds = [(row["document"], row["kind"]) for row in rows]
    assert kinds == [(0, "first"), (1, "near"), (2, "exact"), (4, "exact")]
    assert {row["group"] for row in rows} == {0}


def test_the_tool_writes_all_that_is_asked_for(prefixes: list[str], tmp_path: Path) -> None:
    files = {name: tmp_path / "new" / f"q.{name}" for name in ("html", "json", "jsonl")}
    flags = ["--html", files["html"], "--json", files["json"], "--duplicates-out", files["jsonl"]]
    done = run("inspect_dataset.py", *prefixes, "--samples", "0", *flags)
    assert (done.returncode, done.stderr) == (0, "warning: 1 of 24 documents are empty.\n")
    for path in files.values():
        assert f"written    {path}" in done.stdout and path.stat().st_size > 100
    told = json.loads(files["json"].read_text())
    assert (told["documents"], told["exact"]["groups"], told["exact"]["documents"]) == (47, 3, 5)
    place = {"dataset": prefixes[0], "document": 4, "token": 0}
    assert told["exact"]["largest"][0]["places"][0] == place
    assert told["near"] is None and told["texts"] is None
    assert any("need a tokenizer" in note for note in told["notes"])


def test_datasets_without_documents_have_figures_too(tmp_path: Path) -> None:
    found, _ = measure([write(tmp_path / "d", [])], ByteLevelTokenizer(), QualityOptions())
    assert lines(found)[0] == "quality    0 documents with 0 tokens in 1 dataset; 0 are empty"
    assert "Exact duplicates: none." in " ".join(WholePage(quality_page(found, now=1e9)).texts)


def test_a_sample_says_that_it_is_one(prefixes: list[str]) -> None:
    done = run("inspect_dataset.py", *prefixes, "--samples", "0", "--sample-documents", "9")
    assert "quality    9 documents with" in done.stdout
    assert "All figures are of 9 of 47 documents, chosen by the seed" in done.stdout


def test_files_that_cannot_be_written_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for flag, path, sentence in (
        ("--duplicates-out", tmp_path / "d.csv", "must end in .parquet or .jsonl; rename it."),
        ("--html", tmp_path, "is a folder; give the name of a file."),
        ("--json", tmp_path / "file" / "q.json", "give a file that can."),
    ):
        with pytest.raises(ConfigError) as caught:
            check_output(flag, path)
        assert str(caught.value).startswith(f"`{flag}` ({path}) ")
        assert str(caught.value).endswith(sentence)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    check_output("--duplicates-out", tmp_path / "d.jsonl")
    with pytest.raises(ConfigError, match="needs the package pyarrow, which is not installed; run"):
        check_output("--duplicates-out", tmp_path / "d.parquet")


def test_texts_need_a_tokenizer(prefixes: list[str]) -> None:
    done = run("inspect_dataset.py", *prefixes, "--text-documents", "9")
    assert done.returncode == 2
    assert done.stderr == (
        "error: `--text-documents` (9) are decoded by a tokenizer; give `--tokenizer-type` too.\n"
    )
