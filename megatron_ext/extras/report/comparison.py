"""Writes a page that lays the curves of several runs over each other, beside their settings."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.extras.report.chart_data import (
    COLOURS,
    PlottedRun,
    chart_data,
    chart_style,
    policy,
    scripts,
)
from megatron_ext.extras.report.curves import LOSS, TRAINED
from megatron_ext.extras.report.goodput import account, show_seconds
from megatron_ext.extras.report.run_folder import RunFolder, read_run_folder
from megatron_ext.extras.report.summary import planned_iterations, reached_iteration, state_of
from megatron_ext.extras.report.tables import FAULT, NOT_GIVEN, settings_tables
from megatron_ext.inspect.pages.charts import show
from megatron_ext.inspect.pages.page import page_of, write_page
from megatron_ext.inspect.pages.table import NOTHING, Table, moment, text_of

COMPARISON_FILE = "comparison.html"


def write_comparison(folders: Sequence[Path], output: Path) -> None:
    """Write the page on several runs; raise an OSError if it cannot be written."""
    runs = [read_run_folder(folder) for folder in folders]
    write_page(output, render_comparison(runs, now=time.time()))


def render_comparison(folders: Sequence[RunFolder], *, now: float, live: bool = False) -> str:
    """Return the HTML of the page on several runs.

    Args:
        now: the time of writing, in seconds since the epoch; it decides which runs are shown as
            running.
        live: whether a server sends the page, which then asks the server for changes.
    """
    names = names_of([folder.path for folder in folders])
    runs = [
        PlottedRun.of(name, folder, account(folder.rows, folder.events))
        for name, folder in zip(names, folders, strict=True)
    ]
    problems = [
        f"{run.name}: {problem}"
        for run in runs
        for problem in (
            *run.folder.problems,
            *run.folder.unfinished_lines(running=state_of(run.folder, now).kind == "busy"),
        )
    ]
    texts = scripts(live=live)
    return page_of(
        __package__,
        "comparison.html",
        "charts.html",
        name=text_of(" · ".join(names), 200),
        written=moment(now),
        runs=_run_table(runs, now),
        colours=[COLOURS[index % len(COLOURS)] for index in range(len(runs))],
        charts=chart_data(runs),
        chart_style=chart_style(),
        settings=settings_that_differ(runs),
        problems=problems,
        live=live,
        scripts=texts,
        policy=policy(texts, live=live),
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each folder: the fewest last parts of the paths that differ."""
    resolved = [path.resolve() for path in paths]
    for count in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-count:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return [text_of(name, 100) for name in names]


def _run_table(runs: Sequence[PlottedRun], now: float) -> Table:
    columns = (
        "run", "state", "iteration", "loss", "lowest evaluated", "tokens/s, median", "goodput",
        "wall time", "faults", "folder",
    )  # fmt: skip
    table = Table(columns, numeric=frozenset(columns[2:9]))
    for run in runs:
        folder = run.folder
        state = state_of(folder, now)
        reached = reached_iteration(folder, state)
        planned = planned_iterations(folder)
        of = "" if planned is None else f" / {planned:,}"
        losses = [curve for panel in run.panels if panel.title == LOSS for curve in panel.curves]
        lasts = [c.facts.last for c in losses if c.source == TRAINED and c.facts is not None]
        lows = [
            (c.facts.lowest, c.facts.lowest_at)
            for c in losses
            if c.source != TRAINED and not c.source.startswith("test") and c.facts is not None
        ]
        speeds = sorted(
            speed
            for row in folder.of_kind("train")
            if type(speed := row.get("tokens_per_second")) is float and math.isfinite(speed)
        )
        low = min(lows, default=None)
        wall = run.goodput.wall
        table.rows.append(
            (
                run.name,
                state.word,
                NOTHING if reached is None else f"{reached:,}{of}",
                show(lasts[0]) if lasts else NOTHING,
                NOTHING if low is None else f"{show(low[0])} at {low[1]:,.0f}",
                show(round(speeds[len(speeds) // 2])) if speeds else NOTHING,
                f"{run.goodput.share:.1%}" if wall else NOTHING,
                show_seconds(wall) if wall else NOTHING,
                str(len(folder.events_of(FAULT))),
                text_of(str(folder.path.resolve()), 1000),
            )
        )
    return table


def settings_that_differ(runs: Sequence[PlottedRun]) -> Table:
    """Return a table of the settings that are not the same in all runs."""
    by_run = list[dict[tuple[str, str], str]]()
    defaults: dict[tuple[str, str], str] = {}
    for run in runs:
        own: dict[tuple[str, str], str] = {}
        for title, settings in settings_tables(run.folder):
            section = title.removesuffix(NOT_GIVEN)
            for flag, value, default in settings.rows:
                own[section, flag] = value
                defaults[section, flag] = default
        by_run.append(own)
    table = Table(("section", "setting", *(run.name for run in runs)))
    for key, default in defaults.items():
        # A run that recorded no settings at all may have had any.
        values = [own.get(key, f"{default} (default)") if own else NOTHING for own in by_run]
        if len({*values} - {NOTHING}) > 1:
            table.rows.append((*key, *values))
    return table
