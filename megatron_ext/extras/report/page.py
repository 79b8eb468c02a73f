"""Writes report.html, a self-contained page on a run that opens from disk.

All strings come from untrusted files; jinja2 escapes each of them.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from megatron_ext.extras.report.chart_data import (
    PlottedRun,
    chart_data,
    chart_style,
    policy,
    scripts,
)
from megatron_ext.extras.report.goodput import (
    CATEGORIES,
    PRODUCTIVE,
    Goodput,
    account,
    show_seconds,
)
from megatron_ext.extras.report.run_folder import RunFolder, time_of
from megatron_ext.extras.report.samples import samples_of
from megatron_ext.extras.report.summary import state_of, summary, tiles
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
from megatron_ext.extras.report.time_charts import Mark, share_bar, time_chart
from megatron_ext.inspect.pages.page import page_of, write_page
from megatron_ext.inspect.pages.table import Table, integer_of, moment, text_of

REPORT_FILE = "report.html"
MAX_MARKS = 60
"""Largest number of faults and events marked on a curve."""
EXPLANATION = (
    "Seconds are wall time, and means over the ranks of the machine that reports. Goodput is "
    "computing, communication and pipeline bubbles of steps that were kept; a step that was done "
    "again after a fault counts as lost, and so does the time until a fault was seen. On a GPU, "
    "which computes behind the host, the parts of a step are the host's."
)
_MAX_COMMAND = 100_000


def write_report(run: RunFolder, output: Path | None = None) -> Goodput:
    """Write the page on a run, by default into its folder; return the account of its time.

    Raise an OSError if the page cannot be written.
    """
    path = output or run.path / REPORT_FILE
    goodput = account(run.rows, run.events)
    # Without the dot, a folder's name could be read as the scheme of an address.
    root = f"./{quote(os.path.relpath(run.path, path.parent))}"
    write_page(path, render(run, goodput, now=time.time(), root=root))
    return goodput


def render(
    folder: RunFolder, goodput: Goodput, *, now: float, root: str, live: bool = False
) -> str:
    """Return the HTML of the page on a run.

    Args:
        now: the time of writing, in seconds since the epoch; it decides whether the run is shown as
            running.
        root: the address of the save folder, to which the page's links lead.
        live: whether a server sends the page, which then asks the server for changes.
    """
    stories = fault_stories(folder)
    state = state_of(folder, now)
    noticed = noticed_table(folder)
    environment = environment_table(folder)
    shown, num_samples = samples_of(folder.path, folder.began)
    run = PlottedRun.of(_name(folder.path), folder, goodput)
    texts = scripts(live=live)
    return page_of(
        __package__,
        "report.html",
        "charts.html",
        name=_name(folder.path),
        path=text_of(str(folder.path.resolve()), 1000),
        written=moment(now),
        state=state,
        sentences=summary(folder, goodput, stories, state),
        tiles=tiles(folder, goodput, stories, state),
        charts=chart_data([run], marks_of(folder, stories)),
        chart_style=chart_style(),
        goodput=goodput,
        shares=shares(goodput),
        categories=list(CATEGORIES),
        explanation=EXPLANATION,
        bar=share_bar(goodput.seconds),
        time_chart=time_chart(goodput, _fault_marks(stories, by_time=True)),
        samples=shown,
        num_samples=num_samples,
        faults=fault_table(stories),
        pictures=pictures(stories),
        root=root,
        checkpoints=checkpoint_table(folder),
        noticed=noticed,
        data=data_lines(folder),
        command=command_of(folder),
        settings=settings_tables(folder),
        environment=environment,
        environment_text=_as_text(environment),
        problems=[*folder.problems, *folder.unfinished_lines(running=state.kind == "busy")],
        live=live,
        scripts=texts,
        policy=policy(texts, live=live),
    )


def _name(path: Path) -> str:
    return text_of(path.resolve().name or str(path), 200)


def command_of(folder: RunFolder) -> str:
    """Return the command line of a run, with a line for its folder; "" if the run has none."""
    facts = folder.start_facts
    command = facts.get("command")
    where = facts.get("folder")
    if not isinstance(command, str):
        return ""
    lines = [f"cd {shlex.quote(where)}"] if isinstance(where, str) else []
    return "\n".join(text_of(line, _MAX_COMMAND) for line in [*lines, command])


def _as_text(table: Table) -> str:
    """Return a table of two columns as lines of text."""
    return "\n".join(f"{name}: {value}" for name, value in table.rows)


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


def _fault_marks(stories: Sequence[FaultStory], *, by_time: bool = False) -> list[Mark]:
    """Return marks for the newest faults, at their iterations or, with ``by_time``, their times."""
    marks = []
    for story in stories[-MAX_MARKS:]:
        x = time_of(story.fault) if by_time else integer_of(story.fault, "iteration")
        if x is not None:
            marks.append(Mark(x, "fault", f"{story.number}. {story.headline}", story.target))
    return marks


def marks_of(folder: RunFolder, stories: Sequence[FaultStory]) -> list[Mark]:
    """Return marks for faults, spikes and other events at the iterations that the run has seen."""
    last = max((row["iteration"] for row in folder.rows), default=0)
    marks = _fault_marks(stories)
    for event in folder.events_of("spike", "non_finite", "mismatch")[-MAX_MARKS:]:
        iteration = integer_of(event, "iteration")
        if iteration is not None:
            word = text_of(event["kind"], 20).replace("_", " ")
            marks.append(Mark(iteration, "spike", f"{word} at iteration {iteration}", "noticed"))
    target = "faults" if stories else "charts"
    resumed = [row["iteration"] for row in folder.of_kind("resumed")]
    restored = {integer_of(story.restart or {}, "restored_iteration") for story in stories}
    for iteration in [iteration for iteration in resumed if iteration not in restored][-MAX_MARKS:]:
        marks.append(Mark(iteration, "resumed", f"resumed at iteration {iteration}", target))
    return [mark for mark in marks if 0 <= mark.x <= last]
