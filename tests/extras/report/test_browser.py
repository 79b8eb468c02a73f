"""A browser draws the page as it is on the disk, and runs nothing that comes from the run."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ext.extras.report.comparison import write_comparison
from megatron_ext.extras.report.page import write_report
from megatron_ext.extras.report.run_folder import read_run_folder
from tests.extras.report.made_runs import faulty_run

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path is not None), None)
EVIL = "</script><img src=x onerror=document.title=1>"


def shown(page: Path) -> str:
    """Return the document that a browser makes of a page."""
    assert BROWSER is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    words += [f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]
    ended = subprocess.run(
        [BROWSER, *words], capture_output=True, text=True, check=True, timeout=120
    )
    return ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_all_charts_and_runs_no_script_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / EVIL.replace("/", "")
    faulty_run(run)
    row = {"kind": "train", "iteration": 395, EVIL: 1.0, f"{EVIL} loss": 2.0, "lm loss": "NaN"}
    start = {"kind": "launched", "iteration": 0, "host": EVIL, "command": EVIL, "folder": EVIL}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(row)}\n{json.dumps(start)}\n")
    with (run / "faults.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "fault", "time": 2e9, "cause": EVIL, "iteration": 7}) + "\n")
    write_report(read_run_folder(run))
    other = tmp_path / "b"
    faulty_run(other)
    write_comparison([run, other], tmp_path / "comparison.html")
    for page, title in (
        (run / "report.html", "training report"),
        (tmp_path / "comparison.html", "comparison of runs"),
    ):
        document = shown(page)
        panels = re.findall(r'<figure class="chart" data-panel=', document)
        assert len(panels) >= 8 and document.count('class="uplot') == len(panels)
        told, *_ = re.findall("<title>(.*?)</title>", document)
        assert told.endswith(f" – {title}") and len(told) > len(title) + 3
        # What the script adds itself, such as the names of curves, is text as well.
        assert "&lt;img src=x" in document and "<img src=" not in document
