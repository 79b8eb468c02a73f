"""The curves of a run: the values in its rows, grouped into panels and thinned for a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.extras.report.goodput import PREFIX, Goodput
from megatron_ext.extras.report.run_folder import Row, RunFolder
from megatron_ext.inspect.pages.table import text_of
from megatron_ext.train.reporting.files import TIME, number
from megatron_ext.train.reporting.loss_plot import losses_of
from megatron_ext.train.reporting.records import LARGEST_LOGIT

MAX_POINTS = 2400
"""Number of points above which a curve is thinned; see `thinned`."""
MAX_CURVES = 200
"""Largest number of curves that a page shows of a run."""
TRAINED = "training"
"""The source of values that a run logs while it trains; other sources are splits of evaluations."""
LAYERS = "layers"
"""The source of parameter norms, whose names say all."""
LOSS, PARTS, MEMORY = "Loss", "Parts of a step in seconds", "Memory in GB"
_TITLES = {
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "seconds_per_iteration": "Seconds per step",
    "params_norm": "Norm of the parameters",
    "num_zeros": "Zeros in the gradient",
    "loss_scale": "Loss scale",
    "global_batch_size": "Global batch size",
    "skipped_iterations": "Skipped iterations",
    "nan_iterations": "Iterations with a loss that is not finite",
    "total_skipped_iterations": "Skipped iterations since the start",
    "failed_saves": "Failed saves since the start",
}
"""Panels of values that are not losses, in order: by key in metrics.jsonl, the title."""
NOT_SMOOTHED = frozenset(_TITLES.values()) - {
    "Gradient norm",
    "Tokens per second",
    "Seconds per step",
    "Norm of the parameters",
    "Zeros in the gradient",
}
"""Panels of schedules and counts, whose exact values are of interest."""
_SHOWN_IF_VARIED = tuple(_TITLES)[6:]
_PARTS_OF_A_STEP = {
    "data": "waiting for data",
    "reduce": "communication",
    "bubble": "pipeline bubbles",
}
_NO_CURVE = {"iteration", "consumed_samples", "launched_at", "generation"}
_MEMORY = "memory/"
_REPEATED = ("train/", "val/")
"""Prefixes of names under which a row repeats values for other tools."""


@dataclass(frozen=True)
class Curve:
    """Values over iterations, which rise; a value that is not finite is a gap that is marked.

    Attributes:
        panel: the title of the panel that has the curve.
        source: `TRAINED`, or the split of an evaluation, whose points are drawn as dots.
    """

    panel: str
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    source: str = TRAINED

    @property
    def label(self) -> str:
        return self.name if self.source in (TRAINED, LAYERS) else f"{self.name}, {self.source}"

    @cached_property
    def facts(self) -> CurveFacts | None:
        """Return the facts of the finite values; None if there are none."""
        ys = np.asarray(self.ys, dtype=np.float64)
        places = np.flatnonzero(np.isfinite(ys))
        if places.size == 0:
            return None
        finite = ys[places]
        low = places[finite.argmin()]
        high = places[finite.argmax()]
        return CurveFacts(
            first=self.ys[places[0]],
            last=self.ys[places[-1]],
            last_at=self.xs[places[-1]],
            lowest=self.ys[low],
            lowest_at=self.xs[low],
            highest=self.ys[high],
            highest_at=self.xs[high],
            num_odd=len(self.ys) - int(places.size),
        )


@dataclass(frozen=True)
class CurveFacts:
    """Values of a curve and their iterations; ``num_odd`` values are not finite and left out."""

    first: float
    last: float
    last_at: float
    lowest: float
    lowest_at: float
    highest: float
    highest_at: float
    num_odd: int


@dataclass
class Panel:
    """Curves that share a chart."""

    title: str
    curves: list[Curve] = field(default_factory=list)


def main_loss(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the first loss in ``rows`` of metrics.jsonl; None without one."""
    return next((name for row in rows for name in losses_of(row)), None)


def panels_of(folder: RunFolder) -> list[Panel]:
    """Return the panels of a run: the main loss, other losses, then all other values.

    Each auxiliary loss has a panel of its own, since their sizes differ; names that differ in
    numbers alone, such as those of layers, share one. If there are more than `MAX_CURVES` curves,
    the others are left out, and a sentence is added to the problems of ``folder``.
    """
    train = folder.of_kind("train")
    evaluations = folder.of_kind("evaluation")
    first = main_loss(train) or main_loss(evaluations)
    curves = _curves(train, TRAINED, first)
    for split in dict.fromkeys(text_of(row.get("split"), 60) for row in evaluations):
        mine = [row for row in evaluations if text_of(row.get("split"), 60) == split]
        curves += _curves(mine, split, first)
    curves += _parts_of_steps(folder.of_kind(TIME))
    if len(curves) > MAX_CURVES:
        more = len(curves) - MAX_CURVES
        folder.problems.append(f"{more} more curves of metrics.jsonl are not shown.")
        del curves[MAX_CURVES:]
    panels: dict[str, Panel] = {}
    for curve in curves:
        panels.setdefault(curve.panel, Panel(curve.panel)).curves.append(curve)
    titles = list(_TITLES.values())
    known = [LOSS, *(title for title in panels if title.endswith("loss"))]
    known += [*titles[:4], PARTS, MEMORY, *titles[4:]]
    order = {title: place for place, title in reversed(list(enumerate(known)))}
    return sorted(panels.values(), key=lambda panel: order.get(panel.title, len(known)))


def _title(name: str) -> str:
    """Return the title of the panel for a value that is not the main loss."""
    if name.startswith(_MEMORY):
        return MEMORY
    if name.startswith("norm of layer "):
        return "Norm of each layer"
    if name.split("/")[0] == LARGEST_LOGIT:
        return "Largest logits of attention"
    shown = re.sub(r"\d+", "#", text_of(name, 60)).replace("_", " ")
    return _TITLES.get(name) or shown[:1].upper() + shown[1:]


def _curves(rows: Sequence[Row], source: str, first_loss: str | None) -> list[Curve]:
    """Return a curve for each value in ``rows``; of rows of one iteration, the last one counts."""
    by_iteration = {row["iteration"]: row for row in rows}
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for iteration in sorted(by_iteration):
        for name, value in by_iteration[iteration].items():
            if type(value) is not float and type(value) is not int:
                continue
            if name in _NO_CURVE or name.startswith(_REPEATED):
                continue
            xs, ys = columns.setdefault(name, ([], []))
            xs.append(iteration)
            ys.append(_as_float(value))
    curves = []
    for name, (xs, ys) in columns.items():
        if name in _SHOWN_IF_VARIED and len(set(ys)) == 1:
            continue
        shown = _TITLES[name].lower() if name in _TITLES else text_of(name, 60)
        if name.startswith(_MEMORY):
            shown = shown.removeprefix(_MEMORY)
            ys = [y / 1e9 for y in ys]
        panel = LOSS if name == first_loss else _title(name)
        curves.append(Curve(panel, shown, xs, ys, source))
    return curves


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _parts_of_steps(rows: Iterable[Row]) -> list[Curve]:
    """Return the mean seconds per step of waiting, communication and bubbles, from rows of time."""
    found: dict[str, dict[int, float]] = {name: {} for name in _PARTS_OF_A_STEP}
    for row in rows:
        try:
            count = row["iteration"] - int(number(row["before"]))
            if count > 0:
                for name, values in found.items():
                    values[row["iteration"]] = number(row.get(PREFIX + name, 0.0)) / count
        except (KeyError, ValueError):
            continue
    return [
        Curve(PARTS, _PARTS_OF_A_STEP[name], sorted(values), [values[x] for x in sorted(values)])
        for name, values in found.items()
        if any(values.values())
    ]


@dataclass(frozen=True)
class Thinned:
    """The points of a curve that a page draws.

    ``means`` are points at the middle of each part of a thinned curve; smoothing starts from them,
    since the mean of lowest and highest values is not that of all values. None if all points are
    there.
    """

    xs: list[float]
    ys: list[float]
    means: tuple[list[float], list[float]] | None


def thinned(curve: Curve, limit: int = MAX_POINTS) -> Thinned:
    """Return about ``limit`` points of a curve at most.

    A longer curve is cut into parts of successive points. Each part keeps its lowest and highest
    value, and its first and last value that are not finite. The first and last point are kept too.
    """
    count = len(curve.xs)
    if count <= limit:
        return Thinned(list(curve.xs), list(curve.ys), None)
    size = math.ceil(2 * count / limit)
    num_parts = math.ceil(count / size)
    xs = _in_parts(curve.xs, num_parts, size)
    ys = _in_parts(curve.ys, num_parts, size)
    finite = np.isfinite(ys)
    there = np.isfinite(xs)
    odd = there & ~finite
    chosen = np.zeros_like(odd)
    parts = np.arange(num_parts)
    chosen[parts, np.where(finite, ys, np.inf).argmin(axis=1)] = True
    chosen[parts, np.where(finite, ys, -np.inf).argmax(axis=1)] = True
    chosen &= finite
    chosen[parts, odd.argmax(axis=1)] |= odd.any(axis=1)
    chosen[parts, size - 1 - odd[:, ::-1].argmax(axis=1)] |= odd.any(axis=1)
    chosen.reshape(-1)[[0, count - 1]] = True
    counts = finite.sum(axis=1)
    some = counts > 0
    sums = np.where(finite, ys, 0.0).sum(axis=1)[some]
    middles = np.where(finite, xs, 0.0).sum(axis=1)[some] / counts[some]
    means = middles.tolist(), (sums / counts[some]).tolist()
    return Thinned(xs[chosen].tolist(), ys[chosen].tolist(), means)


def _in_parts(values: Sequence[float], num_parts: int, size: int) -> NDArray[np.float64]:
    """Return values in rows of ``size``; NaN fills the last row."""
    padded = np.full(num_parts * size, np.nan)
    padded[: len(values)] = values
    return padded.reshape(num_parts, size)


@dataclass(frozen=True)
class Progress:
    """The hours of wall time and the samples that a run had used at some iterations."""

    iterations: list[float]
    hours: list[float]
    samples: list[float]


def progress_of(folder: RunFolder, goodput: Goodput, limit: int = 400) -> Progress:
    """Return hours and samples at about ``limit`` iterations; a list is empty if nothing is known.

    Between those iterations the page interpolates.
    """
    ends: dict[float, float] = {0.0: 0.0}
    for row in folder.of_kind(TIME):
        try:
            ends[row["iteration"]] = goodput.elapsed(number(row["to"])) / 3600
        except (KeyError, ValueError):
            continue
    samples: dict[float, float] = {0.0: 0.0}
    for row in folder.of_kind("train"):
        try:
            samples[row["iteration"]] = number(row.get("consumed_samples"))
        except ValueError:
            continue
    known = sorted({*ends, *samples})
    step = max(1, len(known) // limit)
    iterations = sorted({*known[::step], known[-1]})

    def at(values: dict[float, float]) -> list[float]:
        if len(values) < 2:
            return []
        xs = sorted(values)
        found = np.interp(iterations, xs, [values[x] for x in xs])
        # An axis never goes back, even if the clock of a machine did.
        rising: list[float] = np.maximum.accumulate(found).tolist()
        return rising

    return Progress(iterations, at(ends), at(samples))
