"""The report of a run is one whole page that reads well, whatever its folder holds."""

import base64
import json
import os
import re
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.extras.report import page
from megatron_ext.extras.report.goodput import CATEGORIES
from megatron_ext.extras.report.page import write_report
from megatron_ext.extras.report.run_folder import read_run_folder
from megatron_ext.inspect.pages import charts
from megatron_ext.inspect.pages.charts import Axis, show
from megatron_ext.inspect.pages.page import page_of, style_sheet
from tests.extras.report.made_runs import (
    BEGAN,
    faulty_run,
    launched_row,
    long_run,
    time_row,
    train_row,
    write_lines,
)  # fmt: skip
from tests.extras.report.whole_page import WholePage, check_page, curves_of

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><path d="M0 0H9V9Z"/></svg>'
EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def _written(folder: Path) -> tuple[str, WholePage]:
    """Write the report of a folder; return it after checks that hold for every page."""
    write_report(read_run_folder(folder))
    text = (folder / "report.html").read_text(encoding="utf-8")
    check_page(text)
    return text, WholePage(text)


def test_the_page_of_a_faulty_run_tells_its_story(tmp_path: Path) -> None:
    faulty_run(tmp_path)
    for number in (1, 2, 3):
        post_mortem = tmp_path / f"postmortem_{number}"
        post_mortem.mkdir()
        (post_mortem / "report.txt").write_text(f"story of <rank> {number}")
        (post_mortem / "picture.svg").write_bytes(SVG)
    text, found = _written(tmp_path)
    for sentence in (
        "4 ranks (tensor 2 × pipeline 2 × context 1 × data 1) on node-07 trained a model of 4 "
        "layers, hidden size 64.",
        "The run came to its end.",
        "It reached iteration 400 of 400 with 6,400 samples in 7 min 15 s.",
        "3 faults were seen, all of them survived; 7 steps were done again (rank 2: SIGKILL at "
        "iteration 143; rank 0: hang at iteration 217; rank 3: exception at iteration 305).",
        "The newest whole checkpoint is of iteration 400.",
        "Goodput 90.1% of 7 min 15 s; the largest losses: lost steps 9.21 s (2.1%), ",
        "iteration 142 (memory)",
        "backward of micro-batch 3, stage 1",
        "samples: 2960, 2961, 2962",
        "--tensor-model-parallel-size",
        "7b714f7c0ffee",
    ):
        assert sentence in " ".join(found.texts), sentence
    assert "story of &lt;rank&gt; 2" in text
    assert found.addresses.count("././postmortem_2/") == 1
    assert sum(a.startswith("data:image/svg") for a in found.addresses) == 3
    # Each fault stands on the curves and on the chart of time, and leads to its row.
    assert found.addresses.count("#fault-2") == 1
    marks = [(x["kind"], x["x"], x["target"]) for x in curves_of(text)["marks"]]
    assert marks[1] == ("fault", 217, "fault-2") and marks[3] == ("spike", 185, "noticed")
    assert found.tags.count("svg") == 1 and found.tags.count("desc") == 1
    titles = [panel["title"] for panel in curves_of(text)["panels"]]
    assert titles == ["Loss", "Gradient norm", "Learning rate", "Tokens per second",
                      "Seconds per step", "Parts of a step in seconds"]  # fmt: skip
    assert "python pretrain_gpt.py --num-layers 4 --save run" in found.texts


def test_a_finished_run_has_reached_its_last_step(tmp_path: Path) -> None:
    """The last steps may be fewer than those between two rows of metrics."""
    random = np.random.default_rng(0)
    rows = [{**launched_row(BEGAN, 0, 0), "num_iterations": 54}, train_row(50, 54, random)]
    ended = {"kind": "ended", "iteration": 54, "time": BEGAN + 9, "launched_at": BEGAN}
    write_lines(tmp_path / "metrics.jsonl", [*rows, {**ended, "reason": "finished"}])
    (tmp_path / "config.yaml").write_text("training: {train_iters: 54}\n")
    _, found = _written(tmp_path)
    told = " ".join(found.texts)
    assert "The run came to its end." in told
    reached = r"It reached iteration 54 of 54( in [^;]+)?; the last metrics are of iteration 50\."
    assert re.search(reached, told)
    assert "54 / 54" in found.texts


def test_a_restart_that_no_event_tells_is_told_by_the_rows(tmp_path: Path) -> None:
    faulty_run(tmp_path)
    events = tmp_path / "faults.jsonl"
    lines = [line for line in events.read_text().splitlines() if '"restart"' not in line]
    events.write_text("\n".join(lines))
    _, found = _written(tmp_path)
    told = " ".join(found.texts)
    assert "3 faults were seen, all of them survived; 7 steps were done again" in told
    assert "iteration 216" in told and told.count("1.50 s") == 3


def test_the_page_of_an_empty_or_half_run_says_so(tmp_path: Path) -> None:
    _, found = _written(tmp_path)
    assert "The folder holds no metrics of a run." in " ".join(found.texts)
    random = np.random.default_rng(0)
    rows = [launched_row(BEGAN, 0, 0), train_row(1, 10, random), time_row(BEGAN, BEGAN + 9, 0, 1)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    _, found = _written(tmp_path)
    assert "No row tells how the run ended; its last sign of life is of" in " ".join(found.texts)
    now = time.time()
    rows[2] = time_row(now - 9, now, 0, 1, launched_at=BEGAN)
    write_lines(tmp_path / "metrics.jsonl", rows)
    _, found = _written(tmp_path)
    assert "running" in found.texts


def test_the_page_of_a_run_that_failed_names_the_exit_code(tmp_path: Path) -> None:
    ended = {"kind": "ended", "iteration": 1, "time": BEGAN + 9, "launched_at": BEGAN}
    rows = [launched_row(BEGAN, 0, 0), time_row(BEGAN, BEGAN + 9, 0, 1)]
    write_lines(tmp_path / "metrics.jsonl", [*rows, {**ended, "exit_code": 137}])
    _, found = _written(tmp_path)
    assert "The run failed with exit code 137." in " ".join(found.texts)
    # The ranks of an earlier generation ended on purpose, the last ones did not.
    resized = [{**ended, "reason": "resize"}, launched_row(BEGAN + 9, 1, 1)]
    write_lines(tmp_path / "metrics.jsonl", [*rows, *resized, {**ended, "exit_code": 1}])
    _, found = _written(tmp_path)
    assert "The run failed with exit code 1." in " ".join(found.texts)
    told = [{**ended, "reason": "signal"}, {**ended, "exit_code": 143}]
    write_lines(tmp_path / "metrics.jsonl", [*rows, *told])
    _, found = _written(tmp_path)
    assert "stopped before its last step, as it was asked to (signal)" in " ".join(found.texts)


def test_a_folder_of_an_older_version_has_its_curves(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [train_row(i, 30, random) for i in range(1, 31)]
    lines = "".join(json.dumps({**row, "grad_norm": float("nan")}) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "config.yaml").write_text("model: {num_layers: 4, gone: 3}\nown: {cap: 30}\n")
    text, found = _written(tmp_path)
    told = " ".join(found.texts)
    assert "It reached iteration 30 with 480 samples." in told
    assert "not a setting of this version" in told and "not known here" in told
    # All norms are NaN, which their chart marks.
    assert found.tags.count("figure") == 5 and "gradient norm is never finite" in text


def test_a_damaged_folder_has_a_page_that_tells_the_damage(tmp_path: Path) -> None:
    faulty_run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[5:5] = [b"\xff\xfe\x00\n", b"[1, 2]\n", b'{"kind": 3}\n', b'{"kind": "time"\n']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"kind": "tr')
    (tmp_path / "config.yaml").write_text("a: [1\n")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("many")
    (tmp_path / "iter_0000300" / "__0_0.distcp").write_bytes(b"short")
    _, found = _written(tmp_path)
    told = " ".join(found.texts)
    assert "4 lines of metrics.jsonl are damaged and left out." in told
    assert "The last line of metrics.jsonl is not whole and left out; it was being written" in told
    assert (
        "config.yaml cannot be read (it is no valid YAML in line 2: did not find expected" in told
    )
    assert "latest_checkpointed_iteration.txt holds 'many'" in told
    assert "has 5 bytes instead of 12345" in told


def test_strings_of_strangers_are_text_and_links_do_not_lead_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret.svg"
    secret.write_bytes(SVG + b"secret")
    folder = tmp_path / 'javascript:alert(1)"<b>'
    faulty_run(folder)
    for number in (1, 2):
        (folder / f"postmortem_{number}").mkdir()
    (folder / "postmortem_1" / "picture.svg").symlink_to(secret)
    (folder / "postmortem_2" / "picture.svg").write_bytes(EVIL.encode())
    (folder / "postmortem_3").symlink_to(tmp_path)
    config = {EVIL: {EVIL: EVIL}, "model": {"num_layers": EVIL}, "parallel": 7}
    (folder / "config.yaml").write_text(json.dumps(config))
    evil = {"iteration": 390, EVIL: EVIL, "lm loss": EVIL, "train/loss": [EVIL]}
    rows = [
        {"kind": "train", **evil, f"{EVIL} loss": 2.5},
        {"kind": "evaluation", "split": EVIL, "lm loss": 3.0, "iteration": 390},
        {"kind": "launched", **evil, "host": EVIL, "settings": {EVIL: [[EVIL] * 3]},
         "data": [EVIL, {EVIL: EVIL}, *["a" * 50] * 5000]},
        {"kind": "ended", "iteration": 1, "reason": EVIL, "launched_at": BEGAN, "time": BEGAN + 1},
        {"kind": EVIL, "iteration": 10**30},
    ]  # fmt: skip
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    facts = {"cause": EVIL, "where": {EVIL: [EVIL]}, "rank": EVIL, "iteration": EVIL}
    events = [
        {"kind": "fault", "time": BEGAN + 9, **facts, "seen_after": EVIL, "postmortem": "../x"},
        {"kind": "restart", "time": EVIL, "steps_lost": EVIL, "restored_from": EVIL},
        {"kind": "saved", "time": 1e300, "iteration": EVIL, "seconds": EVIL, "asynchronous": EVIL},
        {"kind": "spike", "time": BEGAN + 9, "iteration": [1], EVIL: {"a": {"b": EVIL}}},
    ]
    with (folder / "faults.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))
    text, found = _written(folder)
    assert base64.b64encode(b"secret")[:6].decode() not in text
    assert not any(address.startswith("data:") for address in found.addresses)
    assert "alert(1)</script>" in " ".join(found.texts)
    assert "<script>alert" not in text
    # Names in the curves' data end no element either, and are what they were.
    names = [x["name"] for panel in curves_of(text)["panels"] for x in panel["series"]]
    assert f"{EVIL} loss" in names and f"lm loss, {EVIL}" in names
    assert "… and 4902 more, in metrics.jsonl" in found.texts
    assert len(text) < 1_000_000


@pytest.mark.slow
def test_a_huge_run_has_a_small_page_soon(tmp_path: Path) -> None:
    """Processor time is measured, of which a quiet machine needs 2 seconds for these rows."""
    long_run(tmp_path, 50_000)
    peak = {"kind": "train", "iteration": 50_001, "lm loss": 4.0, "grad_norm": 123.0}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(peak) + "\n")
    begun = time.process_time()
    text, _ = _written(tmp_path)
    assert time.process_time() - begun < 6
    assert len(text) < 1_000_000
    (loss,) = curves_of(text)["panels"][0]["series"]
    assert len(loss["x"]) <= 2402 and loss["x"][-1] == 50_001
    (norms,) = curves_of(text)["panels"][1]["series"]
    assert max(norms["y"]) == 123.0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 400), (2.1, 7.6), (3, 3), (0, 1e-5), (0, 7)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    axis = Axis.over(low, high)
    assert 2 <= len(axis.ticks) <= 8
    assert axis.low - 1e-9 <= axis.ticks[0] and axis.ticks[-1] <= axis.high + 1e-9
    steps = {round((b - a) / (axis.ticks[1] - axis.ticks[0]), 6) for a, b in pairwise(axis.ticks)}
    assert steps == {1.0}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (2.3456, "2.346"), (1024.0, "1,024"), (0.0005, "0.0005"), (3e-5, "3e-5"),
     (12345678, "1.23e7"), (float("inf"), "inf")],
)  # fmt: skip
def test_numbers_are_short(value: float, shown: str) -> None:
    assert show(value) == shown


def _luminance(colour: str) -> float:
    """Return the relative luminance of a colour as WCAG 2.2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_colours_stand_out_in_both_themes(theme: int) -> None:
    """Text has the contrast 4.5 that WCAG asks for, and parts of charts have 3."""
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", style_sheet())
    colours = {name: pair[theme] for name, *pair in found}
    grounds = [colours[name] for name in ("page", "card", "hover")]
    for name in ("text", "faint", "link", "good", "warn", "bad"):
        assert min(_contrast(colours[name], ground) for ground in grounds) >= 4.5, name
    for name in CATEGORIES:
        assert _contrast(colours[name], colours["card"]) >= 3, name
    assert set(CATEGORIES) < set(colours)


def test_every_category_and_variable_has_its_style() -> None:
    layout = Path(charts.__file__).with_name("layout.html").read_text()
    text = layout + Path(page.__file__).with_name("report.html").read_text() + style_sheet()
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    defined = set(re.findall(r"--([\w-]+):", text))
    assert used <= defined


def test_pages_take_no_template_from_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where a path is not what it seems, templates come from the package, in a sandbox."""
    (tmp_path / "page.html").write_text("{{ ''.__class__ }}")
    monkeypatch.setattr(Path, "with_name", lambda self, name: tmp_path / name)
    monkeypatch.setattr(Path, "parent", property(lambda self: tmp_path))
    with pytest.raises(FileNotFoundError):
        page_of("megatron_ext.extras.report", "page.html")


@pytest.mark.parametrize("name", ["metrics.jsonl", "faults.jsonl", "config.yaml"])
def test_the_report_waits_for_no_pipe_and_reads_no_device(name: str, tmp_path: Path) -> None:
    faulty_run(tmp_path)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (tmp_path / name).unlink()
        make(tmp_path / name)
        problems = read_run_folder(tmp_path).problems
        assert f"{name} cannot be read (it is a pipe, a device or a socket, not a regular" in str(
            problems
        )
    write_report(read_run_folder(tmp_path))


def test_deep_yaml_is_told_in_the_report(tmp_path: Path) -> None:
    """libyaml's loader would end the process by a segmentation fault."""
    faulty_run(tmp_path)
    (tmp_path / "config.yaml").write_text("[" * 50_000)
    assert "config.yaml cannot be read (it is nested more than 64 deep)." in _written(tmp_path)[0]
