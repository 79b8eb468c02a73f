"""Writes report.html: one page on a run that opens from disk and needs nothing else.

All strings come from files that may be of strangers; jinja2 escapes each of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megatron_ext.errors import say_to_stderr
from megatron_ext.train.reporting import charts
from megatron_ext.train.reporting.charts import Curve, Mark, show
from megatron_ext.train.reporting.files import SMOOTHED_FROM, smoothed
from megatron_ext.train.reporting.goodput import (
    CATEGORIES,
    ENDED,
    LAUNCHED,
    PRODUCTIVE,
    TIME,
    Goodput,
    account,
    number,
    show_seconds,
)
from megatron_ext.train.reporting.run_folder import RunFolder, read_run_folder, time_of
from megatron_ext.train.reporting.tables import (
    FaultStory,
    checkpoint_table,
    environment_table,
    fault_stories,
    fault_table,
    integer_of,
    moment,
    newest_whole,
    noticed_table,
    pictures,
    settings_tables,
    text_of,
)

REPORT_FILE = "report.html"
MAX_MARKS = 60
"""Most faults and events that are marked on a curve."""
EXPLANATION = (
    "Seconds are wall time, and means over the ranks of the machine that reports. Goodput is "
    "computing, communication and pipeline bubbles of steps that were kept; a step that was done "
    "again after a fault counts as lost, and so does the time until a fault was seen. On a GPU, "
    "which computes behind the host, the parts of a step are the host's."
)
_SECONDS_OF_SILENCE = 120.0
"""Time without a row or an event after which a run counts as dead."""


@cache
def style_sheet() -> str:
    """Return the style sheet that the pages of this package share."""
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def write_report(
    folder: Path, output: Path | None = None, sections: Sequence[type] = ()
) -> Path:
    """Write the report of a save folder, by default into it, and return its path.

    ``sections`` are the classes of a program's own settings, whose defaults the page then knows.
    An OSError is raised if the page cannot be written.
    """
    path = output or folder / REPORT_FILE
    text = render(read_run_folder(folder), sections, now=time.time(), beside=path.parent)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


def try_to_write_report(folder: Path, sections: Sequence[type] = ()) -> Path | None:
    """Write the report of a save folder; a failure is a warning, since no run may end by it."""
    try:
        return write_report(folder, sections=sections)
    except Exception as error:
        say_to_stderr(f"warning: {folder / REPORT_FILE} cannot be written ({error!r}).")
        return None


def render(
    folder: RunFolder, sections: Sequence[type] = (), *, now: float, beside: Path
) -> str:
    """Return the page on a run at the time ``now``; its links start at the folder ``beside``."""
    # Imported here, since only a page needs it.
    from jinja2 import Environment, StrictUndefined

    goodput = account(folder.rows, folder.events)
    stories = fault_stories(folder)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    )
    state = state_of(folder, now)
    noticed = noticed_table(folder)
    return template.render(
        style=Markup(style_sheet()),
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
        bar=charts.share_bar(goodput.seconds),
        time_chart=charts.time_chart(goodput, [time_of(s.fault) for s in stories[-MAX_MARKS:]]),
        faults=fault_table(stories),
        pictures=pictures(stories),
        root=os.path.relpath(folder.path, beside),
        checkpoints=checkpoint_table(folder),
        noticed=noticed,
        settings=settings_tables(folder.settings, sections),
        environment=environment_table(folder),
        problems=folder.problems,
    )


@dataclass(frozen=True)
class State:
    """How a run stands: a word, a sentence, and ``kind``, which is good, busy, warn or bad."""

    kind: str
    word: str
    sentence: str


def state_of(folder: RunFolder, now: float) -> State:
    """Return how a run stands at the time ``now``, as far as its files tell."""
    timed = [row for row in folder.rows if row["kind"] in (TIME, LAUNCHED, ENDED)]
    if not timed and not folder.rows:
        return State("warn", "no data", "The folder holds no metrics of a run.")
    last = timed[-1] if timed else {}
    if last.get("kind") == ENDED:
        code, reason = integer_of(last, "exit_code"), text_of(last.get("reason"), 200)
        if code:
            return State("bad", "failed", f"The run failed with exit code {code} ({reason}).")
        if reason == "finished":
            return State("good", "finished", "The run came to its end.")
        return State("good", "stopped", f"The run stopped before its last step ({reason}).")
    seen = max([_moment_of(last), *map(time_of, folder.events[-1:])])
    if not timed:
        sentence = "An older version wrote these files, which do not tell how the run ended."
        return State("warn", "unknown", sentence)
    if now - seen < _SECONDS_OF_SILENCE:
        return State("busy", "running", "The run was running when this page was written.")
    sentence = f"No row tells how the run ended; its last sign of life is of {moment(seen)} UTC."
    return State("warn", "no end", sentence)


def _moment_of(row: Mapping[str, Any]) -> float:
    for name in ("to", "time"):
        with contextlib.suppress(KeyError, ValueError):
            return number(row[name])
    return 0.0


def main_loss(train: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of a run's first loss, by which the others are named too."""
    return next((name for row in train for name in _losses(row)), None)


def _losses(row: Mapping[str, Any]) -> list[str]:
    # `train/loss` repeats another loss under a common name.
    return [name for name in row if name.endswith("loss") and "/" not in name]


def summary(
    folder: RunFolder, goodput: Goodput, stories: Sequence[FaultStory], state: State
) -> list[str]:
    """Return sentences that say what ran, how far it came, how it ended, and whose fault it was."""
    train = folder.of_kind("train")
    found = [*_what_ran(folder), state.sentence]
    if train:
        last, steps = train[-1], _planned(folder)
        of = "" if steps is None else f" of {steps:,}"
        samples = integer_of(last, "consumed_samples")
        used = "" if samples is None else f" with {samples:,} samples"
        wall = f" in {show_seconds(goodput.wall)}" if goodput.wall else ""
        found.append(f"It reached iteration {last['iteration']:,}{of}{used}{wall}.")
        name = main_loss(train)
        values = [row[name] for row in train if _is_finite(row.get(name or ""))]
        if name is not None and values:
            text = f"The {text_of(name, 60)} went from {show(values[0])} to {show(values[-1])}"
            found.append(text + _validation(folder, name) + ".")
    if stories:
        found += _faults_told(stories)
    elif goodput.launches:
        found.append("No fault was seen.")
    newest = newest_whole(folder)
    if newest is not None:
        found.append(f"The newest whole checkpoint is of iteration {newest:,}.")
    if goodput.wall:
        text = goodput.sentence()
        found.append(f"{text[0].upper()}{text[1:]}.")
    return found


def _what_ran(folder: RunFolder) -> list[str]:
    parallel, model = (folder.settings.get(name) or {} for name in ("parallel", "model"))
    launched = (folder.of_kind(LAUNCHED) or [{}])[-1]
    size = integer_of(launched, "world_size") or integer_of(parallel, "world_size")
    if size is None:
        return []
    names = {
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "context": "context_parallel_size",
    }
    sizes = {word: integer_of(parallel, name) or 1 for word, name in names.items()}
    sizes["data"] = max(1, size // math.prod(sizes.values()))
    layout = " × ".join(f"{word} {count}" for word, count in sizes.items())
    where = f" on {text_of(launched['host'], 100)}" if "host" in launched else ""
    ranks = "1 rank" if size == 1 else f"{size} ranks ({layout})"
    layers, hidden = (integer_of(model, name) for name in ("num_layers", "hidden_size"))
    trained = "" if layers is None else f" trained a model of {layers} layers, hidden size {hidden}"
    return [f"{ranks}{where}{trained or ' trained'}."]


def _planned(folder: RunFolder) -> int | None:
    launched = folder.of_kind(LAUNCHED)
    told = integer_of(launched[-1], "num_iterations") if launched else None
    return told or integer_of(folder.settings.get("training") or {}, "train_iters")


def _validation(folder: RunFolder, name: str) -> str:
    rows = [r for r in folder.of_kind("evaluation") if _is_finite(r.get(name))]
    if not rows:
        return ""
    split = text_of(rows[-1].get("split"), 60)
    return f", {split} {show(rows[-1][name])} at iteration {rows[-1]['iteration']:,}"


def _faults_told(stories: Sequence[FaultStory]) -> list[str]:
    """Return sentences on the number of faults, how they ended, and the last three of them."""
    survived = sum(story.restart is not None for story in stories)
    lost = sum(integer_of(story.restart or {}, "steps_lost") or 0 for story in stories)
    if len(stories) == 1:
        head = "1 fault was seen" + (" and survived" if survived else ", and not survived")
    else:
        head = f"{len(stories)} faults were seen, {survived} of them survived"
    steps = "1 step was" if lost == 1 else f"{lost} steps were"
    told = "; ".join(story.headline for story in stories[-3:])
    which = "the last ones: " if len(stories) > 3 else ""
    return [f"{head}; {steps} done again ({which}{told})."]


def _is_finite(value: object) -> bool:
    try:
        number(value)
    except ValueError:
        return False
    return True


def tiles(
    folder: RunFolder, goodput: Goodput, stories: Sequence[FaultStory]
) -> list[tuple[str, str]]:
    """Return the figures that stand at the top of the page, each with its name."""
    train = folder.of_kind("train")
    found = []
    if train:
        last = train[-1]
        found.append(("iteration", f"{last['iteration']:,}"))
        name = main_loss(train)
        if name is not None and _is_finite(last.get(name)):
            found.append((text_of(name, 40), show(last[name])))
        speeds = [r["tokens_per_second"] for r in train if _is_finite(r.get("tokens_per_second"))]
        if speeds:
            found.append(("tokens/s, median", show(round(sorted(speeds)[len(speeds) // 2]))))
    if goodput.wall:
        found += [("goodput", f"{goodput.share:.1%}"), ("wall time", show_seconds(goodput.wall))]
    found.append(("faults", str(len(stories))))
    if folder.checkpoints:
        newest = newest_whole(folder)
        found.append(("newest checkpoint", "none whole" if newest is None else f"{newest:,}"))
    return found


def shares(goodput: Goodput) -> list[tuple[str, str, str, str, bool]]:
    """Return for each category its class, words, seconds, share, and whether it is goodput."""
    wall = goodput.wall or 1.0
    return [
        (name, label, show_seconds(value), f"{value / wall:.1%}", name in PRODUCTIVE)
        for name, label in CATEGORIES.items()
        if (value := goodput.seconds[name]) > 0
    ]


def curves(folder: RunFolder, stories: Sequence[FaultStory]) -> list[Markup]:
    """Draw loss, gradient norm, learning rate and speed over the iterations, with marks."""
    train, evaluations = folder.of_kind("train"), folder.of_kind("evaluation")
    if not train:
        return []
    steps = [row["iteration"] for row in train]
    x_range = min(0, *steps), max(*steps, 1)
    marks = _marks(folder, stories, x_range[1])
    name = main_loss(train)
    losses = list[Curve]()
    for other in dict.fromkeys(n for row in train[-50:] for n in _losses(row)) or [name]:
        if other is not None:
            first = other == name
            losses += _loss_curves(other, steps, _values(train, other), smooth=first)
    for split in dict.fromkeys(text_of(row.get("split"), 60) for row in evaluations):
        mine = [row for row in evaluations if text_of(row.get("split"), 60) == split]
        at, values = [row["iteration"] for row in mine], _values(mine, name or "")
        losses.append(Curve(split, at, values, "evaluated line"))
        losses.append(Curve("", at, values, "evaluated dots"))
    found = [charts.line_chart("Loss", losses, marks, x_range=x_range)]
    for title, key, style in (
        ("Gradient norm", "grad_norm", "norm line"),
        ("Learning rate", "learning_rate", "rate line"),
        ("Tokens per second", "tokens_per_second", "speed line"),
    ):
        curve = Curve(title.lower(), steps, _values(train, key), style)
        found.append(charts.line_chart(title, [curve], marks, x_range=x_range, from_zero=True))
    return [chart for chart in found if chart is not None]


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
    """Return the values of a name, NaN where a row has none."""
    found = []
    for row in rows:
        value = row.get(name)
        if type(value) is float:
            found.append(value)
        else:
            found.append(number(value) if _is_finite(value) else math.nan)
    return found


def _marks(folder: RunFolder, stories: Sequence[FaultStory], last: float) -> list[Mark]:
    """Return the marks of faults and of spikes and the like, those within the curves."""
    found = [
        Mark(at, "fault", f"{story.number}. {story.headline}", story.target)
        for story in stories[-MAX_MARKS:]
        if (at := integer_of(story.fault, "iteration")) is not None
    ]
    spikes = [(i, e) for i, e in enumerate(folder.events_of("spike", "non_finite", "mismatch"))]
    for _, event in spikes[-MAX_MARKS:]:
        at = integer_of(event, "iteration")
        if at is not None:
            word = text_of(event["kind"], 20).replace("_", " ")
            found.append(Mark(at, "spike", f"{word} at iteration {at}", "noticed"))
    resumed = [row["iteration"] for row in folder.of_kind("resumed")]
    told = {integer_of(story.restart or {}, "restored_iteration") for story in stories}
    for at in [at for at in resumed if at not in told][-MAX_MARKS:]:
        found.append(Mark(at, "resumed", f"resumed at iteration {at}", "faults"))
    return [mark for mark in found if 0 <= mark.x <= last]
