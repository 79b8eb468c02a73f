"""Writes report.html, a self-contained page on a run that opens from disk.

All strings come from untrusted files; jinja2 escapes each of them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from megatron_ext.extras.report.goodput import (
    CATEGORIES,
    PRODUCTIVE,
    Goodput,
    account,
    show_seconds,
)
from megatron_ext.extras.report.run_folder import RunFolder, time_of
from megatron_ext.extras.report.summary import (
    is_finite,
    losses_of,
    main_loss,
    state_of,
    summary,
    tiles,
)
from megatron_ext.extras.report.tables import (
    FaultStory,
    checkpoint_table,
    data_lines,
    environment_table,
    fault_stories,
    fault_table,
    noticed_table,
    pictures,
    settings_tables,
)
from megatron_ext.extras.report.time_charts import share_bar, time_chart
from megatron_ext.inspect.pages import charts
from megatron_ext.inspect.pages.charts import Curve, Mark
from megatron_ext.inspect.pages.page import page_of, write_page
from megatron_ext.inspect.pages.table import integer_of, moment, text_of
from megatron_ext.train.reporting.files import number
from megatron_ext.train.reporting.loss_plot import SMOOTHED_FROM, smoothed

REPORT_FILE = "report.html"
MAX_MARKS = 60
"""Largest number of faults and events marked on a curve."""
EXPLANATION = (
    "Seconds are wall time, and means over the ranks of the machine that reports. Goodput is "
    "computing, communication and pipeline bubbles of steps that were kept; a step that was done "
    "again after a fault counts as lost, and so does the time until a fault was seen. On a GPU, "
    "which computes behind the host, the parts of a step are the host's."
)


def write_report(run: RunFolder, output: Path | None = None) -> Goodput:
    """Write the page on a run, by default into its folder; return the account of its time.

    Raise an OSError if the page cannot be written.
    """
    path = output or run.path / REPORT_FILE
    goodput = account(run.rows, run.events)
    write_page(path, render(run, goodput, now=time.time(), beside=path.parent))
    return goodput


def render(folder: RunFolder, goodput: Goodput, *, now: float, beside: Path) -> str:
    """Return the HTML of the page on a run.

    Args:
        now: the time of writing, in seconds since the epoch; it decides whether the run is shown as
            running.
        beside: the folder of the page, to which its links are relative.
    """
    stories = fault_stories(folder)
    state = state_of(folder, now)
    noticed = noticed_table(folder)
    return page_of(
        __package__,
        "report.html",
        name=text_of(folder.path.resolve().name or str(folder.path), 200),
        path=text_of(str(folder.path.resolve()), 1000),
        written=moment(now),
        state=state,
        sentences=summary(folder, goodput, stories, state),
        tiles=tiles(folder, goodput, stories),
        charts=curves(folder, stories),
        goodput=goodput,
        shares=shares(goodput),
        categories=list(CATEGORIES),
        explanation=EXPLANATION,
        width=charts.WIDTH,
        height=charts.HEIGHT,
        bar=share_bar(goodput.seconds),
        time_chart=time_chart(goodput, _fault_marks(stories, by_time=True)),
        faults=fault_table(stories),
        pictures=pictures(stories),
        # Without the dot, a folder's name could be read as the scheme of an address.
        root=f"./{quote(os.path.relpath(folder.path, beside))}",
        checkpoints=checkpoint_table(folder),
        noticed=noticed,
        data=data_lines(folder),
        settings=settings_tables(folder),
        environment=environment_table(folder),
        problems=folder.problems,
    )


def shares(goodput: Goodput) -> list[tuple[str, str, str, str, bool]]:
    """Return what the page shows of each category that took time.

    This is (category, used as a CSS class; name; seconds; share of the wall time; whether the
    category counts as goodput).
    """
    wall = goodput.wall or 1.0
    return [
        (name, label, show_seconds(value), f"{value / wall:.1%}", name in PRODUCTIVE)
        for name, label in CATEGORIES.items()
        if (value := goodput.seconds[name]) > 0
    ]


def curves(folder: RunFolder, stories: Sequence[FaultStory]) -> list[Markup]:
    """Draw loss, gradient norm, learning rate and speed over the iterations.

    Faults and other events are marked in each chart.
    """
    train = folder.of_kind("train")
    evaluations = folder.of_kind("evaluation")
    if not train:
        return []
    steps = [row["iteration"] for row in train]
    x_range = min(0, *steps), max(*steps, 1)
    marks = _marks(folder, stories, x_range[1])
    name = main_loss(train)
    losses = list[Curve]()
    for other in dict.fromkeys(n for row in train[-50:] for n in losses_of(row)) or [name]:
        if other is not None:
            first = other == name
            losses += _loss_curves(other, steps, _values(train, other), smooth=first)
    splits = dict.fromkeys(text_of(row.get("split"), 60) for row in evaluations)
    for index, split in enumerate(splits):
        style = "evaluated" if index == 0 else "evaluated-too"
        mine = [row for row in evaluations if text_of(row.get("split"), 60) == split]
        iterations = [row["iteration"] for row in mine]
        values = _values(mine, name or "")
        losses.append(Curve(split, iterations, values, f"{style} line"))
        losses.append(Curve("", iterations, values, f"{style} dots"))
    drawings = [charts.line_chart("Loss", losses, marks, x_range=x_range)]
    for title, key, style in (
        ("Gradient norm", "grad_norm", "norm line"),
        ("Learning rate", "learning_rate", "rate line"),
        ("Tokens per second", "tokens_per_second", "speed line"),
    ):
        curve = Curve(title.lower(), steps, _values(train, key), style)
        drawings.append(charts.line_chart(title, [curve], marks, x_range=x_range, from_zero=True))
    return [chart for chart in drawings if chart is not None]


def _loss_curves(
    name: str, steps: Sequence[int], values: list[float], *, smooth: bool
) -> list[Curve]:
    shown = text_of(name, 60)
    if not smooth:
        return [Curve(shown, steps, values, "other-loss line")]
    if len(values) < SMOOTHED_FROM:
        return [Curve(shown, steps, values, "loss line")]
    raw = Curve(f"{shown}, raw", steps, values, "raw line")
    return [raw, Curve(f"{shown}, smoothed", steps, smoothed(values), "loss line")]


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the values of ``name``, NaN for a row without it."""
    values = []
    for row in rows:
        value = row.get(name)
        if type(value) is float:
            values.append(value)
        else:
            values.append(number(value) if is_finite(value) else math.nan)
    return values


def _fault_marks(stories: Sequence[FaultStory], *, by_time: bool = False) -> list[Mark]:
    """Return marks for the newest faults, at their iterations or, with ``by_time``, their times."""
    marks = []
    for story in stories[-MAX_MARKS:]:
        x = time_of(story.fault) if by_time else integer_of(story.fault, "iteration")
        if x is not None:
            marks.append(Mark(x, "fault", f"{story.number}. {story.headline}", story.target))
    return marks


def _marks(folder: RunFolder, stories: Sequence[FaultStory], last: float) -> list[Mark]:
    """Return marks for faults, spikes and other events at iterations from 0 to ``last``."""
    marks = _fault_marks(stories)
    for event in folder.events_of("spike", "non_finite", "mismatch")[-MAX_MARKS:]:
        iteration = integer_of(event, "iteration")
        if iteration is not None:
            word = text_of(event["kind"], 20).replace("_", " ")
            marks.append(Mark(iteration, "spike", f"{word} at iteration {iteration}", "noticed"))
    resumed = [row["iteration"] for row in folder.of_kind("resumed")]
    restored = {integer_of(story.restart or {}, "restored_iteration") for story in stories}
    for iteration in [iteration for iteration in resumed if iteration not in restored][-MAX_MARKS:]:
        marks.append(Mark(iteration, "resumed", f"resumed at iteration {iteration}", "faults"))
    return [mark for mark in marks if 0 <= mark.x <= last]
