"""The values of a run become panels of curves, which keep what is extreme when they are thinned."""

import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.extras.report import curves as curves_module
from megatron_ext.extras.report import samples
from megatron_ext.extras.report.chart_data import PlottedRun, chart_data
from megatron_ext.extras.report.comparison import names_of, render_comparison
from megatron_ext.extras.report.curves import Curve, Panel, panels_of, progress_of, thinned
from megatron_ext.extras.report.goodput import account
from megatron_ext.extras.report.run_folder import RunFolder, read_run_folder
from megatron_ext.video.sampling import clips
from tests.extras.report.made_runs import (
    BEGAN,
    Row,
    faulty_run,
    launched_row,
    steps_of,
    time_row,
    write_lines,
)
from tests.extras.report.whole_page import WholePage, check_page, curves_of

NAN = math.nan


def train(iteration: int, **facts: Any) -> Row:
    return {"kind": "train", "iteration": iteration, "lm loss": 3.0, **facts}


def evaluated(iteration: int, split: str = "validation", **facts: Any) -> Row:
    row: Row = {"kind": "evaluation", "iteration": iteration, "split": split, "lm loss": 2.0}
    return row | {"val/loss": 2.0} | facts


def shown(*rows: Row) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the points by panel and curve."""
    return {
        panel.title: {c.label: list(zip(c.xs, c.ys, strict=True)) for c in panel.curves}
        for panel in panels_of(RunFolder(Path("x"), rows=list(rows)))
    }


def test_losses_of_other_sizes_have_panels_of_their_own() -> None:
    facts = {"z_loss": 9.0, "mtp_1 loss": 4.0, "mtp_2 loss": 5.0, "train/loss": 3.0}
    panels = shown(train(5, **facts), train(10, **facts), evaluated(12, z_loss=8.0))
    assert list(panels) == ["Loss", "Z loss", "Mtp # loss"]
    assert panels["Loss"] == {
        "lm loss": [(5, 3.0), (10, 3.0)],
        "lm loss, validation": [(12, 2.0)],
    }
    assert panels["Z loss"] == {"z_loss": [(5, 9.0), (10, 9.0)], "z_loss, validation": [(12, 8.0)]}
    assert list(panels["Mtp # loss"]) == ["mtp_1 loss", "mtp_2 loss"]
    # A loss that is logged for some steps only is shown too, and so are evaluations alone.
    assert list(shown(train(5), train(10, **{"old loss": 1.0}))) == ["Loss", "Old loss"]
    assert shown(evaluated(3)) == {"Loss": {"lm loss, validation": [(3, 2.0)]}}
    assert shown() == {}


def test_every_number_of_a_row_has_its_panel_and_what_never_changes_has_none() -> None:
    rows = [
        train(i, **{"own thing": 1, "memory/allocated": 2e9, "loss_scale": 1.0, "flag": True,
                    "text": "a", "skipped_iterations": i // 10, "grad_norm": NAN,
                    **{f"layer {n} norm": float(n) for n in range(3)},
                    "max_attention_logit": 9.0, "max_attention_logit/layer 1": 9.0})
        for i in (5, 10)
    ]  # fmt: skip
    panels = shown(*rows, time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10)))
    assert list(panels) == [
        "Loss", "Gradient norm", "Parts of a step in seconds", "Memory in GB", "Skipped iterations",
        "Own thing", "Layer # norm", "Largest logits of attention",
    ]  # fmt: skip
    assert len(panels["Largest logits of attention"]) == 2
    assert panels["Memory in GB"]["allocated"] == [(5, 2.0), (10, 2.0)]
    assert panels["Parts of a step in seconds"]["waiting for data"] == [(10, pytest.approx(0.02))]
    assert len(panels["Layer # norm"]) == 3
    assert [math.isnan(y) for _, y in panels["Gradient norm"]["gradient norm"]] == [True, True]


def test_of_rows_of_one_iteration_the_last_counts_and_iterations_rise() -> None:
    rows = train(9), train(5), train(9, **{"lm loss": 1.0}), train(7, **{"lm loss": 10**400})
    assert shown(*rows) == {"Loss": {"lm loss": [(5, 3.0), (7, math.inf), (9, 1.0)]}}


def test_more_curves_than_fit_a_page_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves_module, "MAX_CURVES", 2)
    folder = RunFolder(Path("x"), rows=[train(1, a=1.0, b=2.0, c=3.0)])
    assert [panel.title for panel in panels_of(folder)] == ["Loss", "A"]
    assert folder.problems == ["2 more curves of metrics.jsonl are not shown."]


def test_a_thinned_curve_keeps_extremes_ends_and_what_is_not_finite() -> None:
    random = np.random.default_rng(3)
    ys = random.standard_normal(20_001).tolist()
    ys[777], ys[12_345] = 99.0, -99.0
    ys[5_000:6_000] = [NAN] * 1000
    ys[9_001] = math.inf
    curve = Curve("Loss", "loss", list(range(20_001)), ys)
    found = thinned(curve, 400)
    assert len(found.xs) < 420 and found.xs == sorted(set(found.xs))
    assert all(y == ys[int(x)] or y != y for x, y in zip(found.xs, found.ys, strict=True))
    assert {777, 12_345, 9_001, 5_000, 5_999, 0, 20_000} <= set(map(int, found.xs))
    assert found.means is not None
    # Means stand for all values: here for 101 values each, of which 1000 are missing.
    xs, means = found.means
    assert xs[0] == 50 and means[0] == pytest.approx(np.mean(ys[:101]))
    assert not any(5_050 < x < 5_950 for x in xs) and np.isfinite(means).all()
    short = Curve("Loss", "loss", [1, 2], [NAN, 4.0])
    assert thinned(short).means is None and thinned(short).xs == [1, 2]


@pytest.mark.parametrize("count", [401, 402, 799, 801])
def test_each_part_of_a_thinned_curve_keeps_its_lowest_and_highest_value(count: int) -> None:
    ys = [float(number * 7 % 11) for number in range(count)]
    found = thinned(Curve("", "", list(range(count)), ys), 400)
    size = math.ceil(2 * count / 400)
    points = dict(zip(found.xs, found.ys, strict=True))
    for start in range(0, count, size):
        part = [y for x, y in points.items() if start <= x < start + size]
        assert {min(part), max(part)} == {
            min(ys[start : start + size]),
            max(ys[start : start + size]),
        }


def test_an_iteration_has_its_hours_and_samples() -> None:
    rows = [
        time_row(BEGAN, BEGAN + 3600, 0, 10, **steps_of(10)),
        time_row(BEGAN + 3600, BEGAN + 10_800, 10, 30, **steps_of(20)),
        train(10, consumed_samples=160), train(30, consumed_samples=640),
    ]  # fmt: skip
    folder = RunFolder(Path("x"), rows=rows)
    progress = progress_of(folder, account(rows))
    assert progress.iterations == [0, 10, 30]
    assert progress.hours == pytest.approx([0, 1, 3]) and progress.samples == [0, 160, 640]
    run = PlottedRun("a", folder, account(rows), panels_of(folder), progress)
    assert chart_data([run]).axes == ["iteration", "samples", "hours"]
    many = RunFolder(Path("x"), rows=[train(i, consumed_samples=i) for i in range(5000)])
    progress = progress_of(many, account([]))
    assert len(progress.iterations) <= 450 and progress.iterations[-1] == 4999
    assert progress.hours == []


def plotted(*panels: Panel) -> PlottedRun:
    folder = RunFolder(Path("x"))
    goodput = account([])
    return PlottedRun("a", folder, goodput, list(panels), progress_of(folder, goodput))


def test_a_table_has_the_last_and_extreme_values_beside_the_charts() -> None:
    curve = Curve("Loss", "lm loss", [5, 10, 15, 20], [4.0, 1.0, 2.0, NAN])
    never = Curve("Loss", "b", [5], [math.inf])
    data = chart_data([plotted(Panel("Loss", [curve, never]))])
    assert data.values.rows == [
        ("lm loss", "2", "15", "4", "1", "10", "4", "5", "1"),
        ("b", *["–"] * 7, "1"),
    ]
    (figure,) = data.figures
    assert figure.description.startswith("Loss. lm loss ends at 2; b is never finite.")
    assert data.axes == ["iteration"] and '"y":[4.0,1.0,2.0,null]' in data.json


def test_runs_are_laid_over_each_other_beside_what_differs(tmp_path: Path) -> None:
    faulty_run(tmp_path / "a" / "run")
    launched = launched_row(BEGAN, 0, 0)
    settings = {**launched["settings"], "optimizer": [["--lr", "</script><b>", "none"]]}
    rows = [{**launched, "settings": settings}, train(7, **{"lm loss": 1.5, "z_loss": 8.0})]
    write_lines(tmp_path / "b" / "run" / "metrics.jsonl", rows)
    (tmp_path / "none").mkdir()
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "none"]
    text = render_comparison([read_run_folder(path) for path in paths], now=BEGAN)
    check_page(text)
    told = WholePage(text).texts
    assert {"a/run", "b/run", "400 / 400", "2.318 at 350", "</script><b>"} <= set(told)
    assert "--train-iters" not in told and "<b>" not in re.sub("<script.*?</script>", "", text)
    panels = {panel["title"]: panel["series"] for panel in curves_of(text)["panels"]}
    names = [(series["name"], series["run"]) for series in panels["Loss"]]
    assert names == [
        ("a/run: lm loss", 0), ("a/run: lm loss, validation", 0), ("b/run: lm loss", 1),
    ]  # fmt: skip
    # A panel with one curve of each run names the runs alone; colours tell runs, dashes curves.
    assert [series["name"] for series in panels["Gradient norm"]] == ["a/run"]
    assert [s["colour"] for s in panels["Loss"]] == ["computing", "computing", "restart"]
    assert [bool(series["dash"]) for series in panels["Loss"]] == [False, True, False]


def test_runs_are_named_by_the_parts_of_their_paths_that_differ() -> None:
    assert names_of([Path("/x/a/run"), Path("/y/b/run")]) == ["a/run", "b/run"]
    assert names_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert names_of([Path("/x/a/run"), Path("/y/a/run")]) == ["x/a/run", "y/a/run"]


def test_samples_are_spread_over_the_run_and_have_the_names_that_runs_give_them(
    tmp_path: Path,
) -> None:
    assert (samples.SHEET, samples.LIST) == (clips.CONTACT_SHEET, clips.LIST)
    assert samples.samples_of(tmp_path) == ([], 0)
    for iteration in range(1, 31):
        folder = tmp_path / "samples" / f"iter_{iteration:07}"
        folder.mkdir(parents=True)
        (folder / clips.LIST).write_text(f'{{"path": "{clips.clip_name(0)}", "text": "a\\nb"}}\n')
        (folder / clips.CONTACT_SHEET).write_bytes(
            b"\x89PNG\r\n\x1a\n" if iteration > 1 else b"<svg"
        )
    (tmp_path / "samples" / "iter_0000031").symlink_to(tmp_path)
    shown, count = samples.samples_of(tmp_path)
    assert count == 30 and [one.iteration for one in shown] == [1, 5, 9, 13, 18, 22, 26, 30]
    assert [bool(one.picture) for one in shown] == [False, *[True] * 7]
    assert shown[-1].clips == [("sample_000.mp4", "a b")]
    assert shown[-1].folder == "samples/iter_0000030"
    os.utime(tmp_path / "samples" / "iter_0000001", (BEGAN, BEGAN))
    assert samples.samples_of(tmp_path, BEGAN + 3600)[1] == 29
