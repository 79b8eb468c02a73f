"""tools/report.py writes the page of a folder, or says in one sentence why it cannot."""

from pathlib import Path

import pytest

from megatron_ext.programs.report import main
from tests.extras.report.made_runs import faulty_run


def test_the_page_is_written_into_the_folder_or_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "a run", tmp_path / "pages"
    faulty_run(run)
    (run / "postmortem_1").mkdir()
    other.mkdir()
    (run / "faults.jsonl").write_text('{"kind": "fault", "time": 1790000100, "rank": 1}\n')
    assert main([str(run)]) == 0
    assert main([str(run), "--output", str(other / "page.html")]) == 0
    written = [f"wrote {run / 'report.html'}", f"wrote {other / 'page.html'}"]
    assert capsys.readouterr().out.splitlines() == written
    assert 'href="././postmortem_1/"' in (run / "report.html").read_text()
    assert 'href="./../a%20run/postmortem_1/"' in (other / "page.html").read_text()
    assert not list(run.glob("*.tmp")) + list(run.glob(".*.tmp"))


def test_several_folders_are_compared_in_a_page_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        faulty_run(tmp_path / name)
    assert main(["a", "b", "--html"]) == 0
    assert main(["a", "b", "--html", "other.html"]) == 0
    assert main(["a", "--html"]) == 0
    assert main(["a", "a"]) == 2
    told = capsys.readouterr()
    written = ["wrote comparison.html", "wrote other.html", "wrote a/report.html"]
    assert told.out.splitlines() == written
    assert told.err == "error: `folder` (a) is given twice; give each run once.\n"
    assert "Comparison of runs" in (tmp_path / "other.html").read_text()
    assert not (tmp_path / "b" / "report.html").exists()


def test_folders_and_outputs_that_cannot_be_used_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: `folder` ({tmp_path / 'none'}) must be the save folder of a run; give another.",
        f"error: `folder` ({tmp_path}) must be the save folder of a run, but holds no log such as "
        "metrics.jsonl; give another.",
        f"error: `--output` ({tmp_path / 'no' / 'page.html'}) cannot be written (No such file or "
        "directory); give another path.",
    ]
