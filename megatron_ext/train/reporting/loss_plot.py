"""The chart of losses, gradient norms and learning rates that a run draws, ``loss.png``."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.disk.figures import new_figure
from megatron_ext.disk.writing import cleared
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.reporting.records import EvaluationRecord, IterationRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECONDS_BETWEEN_PLOTS = 60.0
SMOOTHED_FROM = 200
"""Number of points above which a plotted loss is smoothed."""

Row = dict[str, Any]


def plot_metrics(rows: list[Row], path: Path, title: str = "") -> None:
    """Plot the rows of a `MetricsFile` to a PNG; do nothing if no row is about training steps."""
    train = [row for row in rows if row["kind"] == "train"]
    if not train:
        return
    figure = new_figure(figsize=(9, 8), layout="constrained")
    losses, norms, rates = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1.4, 1.4))
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    resumed = [row["iteration"] for row in rows if row["kind"] == "resumed"]
    _plot_losses(losses, train, evaluations, resumed)
    _draw(norms, *_series(train, "grad_norm"), color="tab:gray")
    _draw(rates, *_series(train, "learning_rate"), color="tab:green")
    norms.set_ylim(bottom=0)
    rates.set_ylim(bottom=0)
    for axes, label in ((losses, "loss"), (norms, "gradient norm"), (rates, "learning rate")):
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rates.set_xlabel("iteration")
    rates.set_xlim(left=0)
    losses.set_title(title or "training loss", loc="left", fontsize=11)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(cleared(temporary), format="png", dpi=120)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def losses_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the losses in a row of metrics.jsonl."""
    # `train/loss` repeats another loss under a common name.
    return [name for name in row if name.endswith("loss") and "/" not in name]


def _plot_losses(axes: Axes, train: list[Row], evaluations: list[Row], resumed: list[int]) -> None:
    names = dict.fromkeys(name for row in train for name in losses_of(row))
    for name in names:
        _draw(axes, *_series(train, name), label=f"{name}, training")
    first = next(iter(names), "lm loss")
    for split in dict.fromkeys(row["split"] for row in evaluations):
        steps, values = _series([row for row in evaluations if row["split"] == split], first)
        label = f"{first}, {split}"
        if not steps:
            continue
        axes.plot(steps, values, linestyle="--", marker="o", markersize=4, label=label)
    for step in resumed:
        axes.axvline(step, color="tab:gray", linestyle=":", linewidth=1)
        style: dict[str, Any] = {"verticalalignment": "top", "fontsize": 8, "color": "tab:gray"}
        style |= {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate("resumed", (step, 0.97), xytext=(4, 0), **style)
    axes.legend(frameon=False, fontsize=9)


def _draw(axes: Axes, steps: list[int], values: list[float], **style: Any) -> None:
    """Plot ``values`` over ``steps`` with the line ``style`` of matplotlib.

    A long curve whose ``style`` names no colour is smoothed, and drawn over a faint line of the
    values themselves.
    """
    if len(values) < SMOOTHED_FROM or style.get("color"):
        marker = "." if len(values) < 60 else ""
        axes.plot(steps, values, marker=marker, markersize=4, linewidth=1.4, **style)
        return
    (line,) = axes.plot(steps, smoothed(values), linewidth=1.6, **style)
    axes.plot(steps, values, linewidth=0.8, alpha=0.3, color=line.get_color())


def smoothed(values: list[float]) -> list[float]:
    """Return the bias-corrected exponential moving average of ``values``, one mean for each value.

    The time constant is ``len(values) / 50``, but at least 2. For a non-finite value the previous
    mean is repeated.
    """
    keep = 1 - 1 / max(2.0, len(values) / 50)
    mean = 0.0
    weight = 0.0
    out = []
    for value in values:
        if math.isfinite(value):
            mean = keep * mean + (1 - keep) * value
            weight = keep * weight + 1 - keep
        out.append(mean / weight if weight else math.nan)
    return out


def _series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Return the iterations and values of ``name``, from the rows that have it."""
    mine = [row for row in rows if row.get(name) is not None]
    return [row["iteration"] for row in mine], [float(row[name]) for row in mine]


class LossPlot:
    """Redraws ``loss.png`` at most once a minute, and at the end."""

    def __init__(self, metrics: Path, title: str) -> None:
        self._metrics = metrics
        self._title = title
        self._drawn_at = time.monotonic()

    def on_iteration(self, record: IterationRecord) -> None:
        if time.monotonic() - self._drawn_at > SECONDS_BETWEEN_PLOTS:
            self.close()

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Do nothing; the next drawing includes the evaluation."""

    def close(self) -> None:
        picture = self._metrics.with_name("loss.png")
        try:
            plot_metrics(read_metrics(self._metrics), picture, self._title)
        except ImportError as error:
            raise OSError(f"matplotlib cannot be imported: {error}") from error
        self._drawn_at = time.monotonic()
