"""Summarizes in sentences what ran, how far it got, how it ended, and what was at fault."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.extras.report.curves import main_loss
from megatron_ext.extras.report.goodput import Goodput, show_seconds
from megatron_ext.extras.report.run_folder import RunFolder, time_of
from megatron_ext.extras.report.tables import FaultStory, newest_whole
from megatron_ext.inspect.pages.charts import show
from megatron_ext.inspect.pages.table import integer_of, moment, text_of
from megatron_ext.train.reporting.files import ENDED, LAUNCHED, OF_TIME, TIME, number
from megatron_ext.train.reporting.records import FINISHED

_SECONDS_OF_SILENCE = 120.0
"""Seconds without a new event or row in metrics.jsonl until a run no longer counts as running."""


_TELL_ITERATION = ("train", "evaluation", "resumed", TIME, LAUNCHED)
FINISHED_WORD = "finished"
"""Value of `State.word` for a run that completed."""


@dataclass(frozen=True)
class State:
    """The state of a run in words; ``kind`` (good, busy, warn or bad) is its style on the page."""

    kind: str
    word: str
    sentence: str


def state_of(folder: RunFolder, now: float) -> State:
    """Return the state of a run at time ``now``, as far as its files show."""
    timed = [row for row in folder.rows if row["kind"] in OF_TIME]
    if not timed and not folder.rows:
        return State("warn", "no data", "The folder holds no metrics of a run.")
    last = timed[-1] if timed else {}
    if last.get("kind") == ENDED:
        # The launcher records the exit code; the reporting rank, if it lives, records the reason.
        started = max((i for i, row in enumerate(timed) if row["kind"] != ENDED), default=-1)
        ends = timed[started + 1 :]
        code = next((c for row in ends[::-1] if (c := integer_of(row, "exit_code"))), 0)
        reason = next((row["reason"] for row in ends[::-1] if "reason" in row), None)
        if reason is None or (code and reason == FINISHED):
            return State("bad", "failed", f"The run failed with exit code {code}.")
        if reason == FINISHED:
            return State("good", FINISHED_WORD, "The run came to its end.")
        text = f"The run stopped before its last step, as it was asked to ({text_of(reason, 200)})."
        return State("good", "stopped", text)
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


def reached_iteration(folder: RunFolder, state: State) -> int | None:
    """Return the last iteration that a run has finished; None before its first row.

    The rows of time tell it, since metrics are logged only every few steps. If a run went back to
    an earlier step, this is the step at which it is now.
    """
    # The launcher, whose row of the end has no reason, knows only what rows before it say.
    told = (
        row["iteration"]
        for row in reversed(folder.rows)
        if row["kind"] in _TELL_ITERATION or (row["kind"] == ENDED and "reason" in row)
    )
    reached: int | None = next(told, None)
    if reached is None:
        return None
    planned = planned_iterations(folder)
    finished = state.word == FINISHED_WORD and planned is not None
    return max(reached, planned) if finished and planned is not None else reached


def summary(
    folder: RunFolder, goodput: Goodput, stories: Sequence[FaultStory], state: State
) -> list[str]:
    """Return sentences on what ran, how far it got, how it ended, and what was at fault."""
    train = folder.of_kind("train")
    sentences = [*_what_ran(folder), state.sentence]
    reached = reached_iteration(folder, state)
    if train and reached is not None:
        last = train[-1]
        steps = planned_iterations(folder)
        of = "" if steps is None else f" of {steps:,}"
        samples = integer_of(last, "consumed_samples")
        wall = f" in {show_seconds(goodput.wall)}" if goodput.wall else ""
        if reached == last["iteration"]:
            used = "" if samples is None else f" with {samples:,} samples"
            sentences.append(f"It reached iteration {reached:,}{of}{used}{wall}.")
        else:
            at = f"the last metrics are of iteration {last['iteration']:,}"
            sentences.append(f"It reached iteration {reached:,}{of}{wall}; {at}.")
        name = main_loss(train)
        values = [row[name] for row in train if is_finite(row.get(name))] if name else []
        if name and values:
            text = f"The {text_of(name, 60)} went from {show(values[0])} to {show(values[-1])}"
            sentences.append(text + _validation(folder, name) + ".")
    if stories:
        sentences += _fault_sentences(stories)
    elif goodput.launches:
        sentences.append("No fault was seen.")
    newest = newest_whole(folder)
    if newest is not None:
        sentences.append(f"The newest whole checkpoint is of iteration {newest:,}.")
    if goodput.wall:
        text = goodput.sentence()
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return sentences


def _what_ran(folder: RunFolder) -> list[str]:
    parallel, model = (folder.settings.get(name) or {} for name in ("parallel", "model"))
    launched = folder.start_facts
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


def planned_iterations(folder: RunFolder) -> int | None:
    """Return the number of iterations that the whole run is to have; None if unknown."""
    num_iterations = integer_of(folder.start_facts, "num_iterations")
    return num_iterations or integer_of(folder.settings.get("training") or {}, "train_iters")


def _validation(folder: RunFolder, name: str) -> str:
    rows = [r for r in folder.of_kind("evaluation") if is_finite(r.get(name))]
    if not rows:
        return ""
    split = text_of(rows[-1].get("split"), 60)
    return f", {split} {show(rows[-1][name])} at iteration {rows[-1]['iteration']:,}"


def _fault_sentences(stories: Sequence[FaultStory]) -> list[str]:
    """Return a sentence on the number of faults, how many were survived, and the last three."""
    survived = sum(story.restart is not None for story in stories)
    lost = sum(integer_of(story.restart or {}, "steps_lost") or 0 for story in stories)
    if len(stories) == 1:
        head = "1 fault was seen" + (" and survived" if survived else ", and not survived")
    else:
        many = {0: "none", len(stories): "all"}.get(survived, str(survived))
        head = f"{len(stories)} faults were seen, {many} of them survived"
    steps = "1 step was" if lost == 1 else f"{lost} steps were"
    headlines = "; ".join(story.headline for story in stories[-3:])
    which = "the last ones: " if len(stories) > 3 else ""
    return [f"{head}; {steps} done again ({which}{headlines})."]


def is_finite(value: object) -> bool:
    try:
        number(value)
    except ValueError:
        return False
    return True


def tiles(
    folder: RunFolder, goodput: Goodput, stories: Sequence[FaultStory], state: State
) -> list[tuple[str, str]]:
    """Return the figures at the top of the page, as pairs of a label and a value in words."""
    train = folder.of_kind("train")
    figures = []
    if train:
        last = train[-1]
        reached = reached_iteration(folder, state)
        planned = planned_iterations(folder)
        of = "" if planned is None else f" / {planned:,}"
        figures.append(("iteration", f"{reached:,}{of}"))
        name = main_loss(train)
        if name is not None and is_finite(last.get(name)):
            figures.append((text_of(name, 40), show(last[name])))
        speeds = [r["tokens_per_second"] for r in train if is_finite(r.get("tokens_per_second"))]
        if speeds:
            figures.append(("tokens/s, median", show(round(sorted(speeds)[len(speeds) // 2]))))
    if goodput.wall:
        figures += [("goodput", f"{goodput.share:.1%}"), ("wall time", show_seconds(goodput.wall))]
    figures.append(("faults", str(len(stories))))
    if folder.checkpoints:
        newest = newest_whole(folder)
        figures.append(("newest checkpoint", "none whole" if newest is None else f"{newest:,}"))
    return figures
