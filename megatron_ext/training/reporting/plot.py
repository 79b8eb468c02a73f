"""``loss.png``: losses, learning rate and gradient norm of a run, for a person to look at."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.training.reporting.metrics_file import read_metrics
from megatron_ext.training.reporting.records import EvaluationRecord, IterationRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECONDS_BETWEEN_PLOTS = 60.0
SMOOTHED_FROM = 200  # rows

Row = dict[str, Any]


def plot_metrics(rows: list[Row], path: Path, title: str = "") -> None:
    """Draw the rows of a metrics file; without a training row nothing is drawn."""
    # Without pyplot, which takes a second to import and keeps figures of its own.
    from matplotlib.figure import Figure

    train = [row for row in rows if row["kind"] == "train"]
    if not train:
        return
    figure = Figure(figsize=(9, 8), layout="constrained")
    losses, norms, rates = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1.4, 1.4))
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    resumed = [row["iteration"] for row in rows if row["kind"] == "resumed"]
    _plot_losses(losses, train, evaluations, resumed)
    _plot_line(norms, train, "grad_norm", "gradient norm", "tab:gray")
    _plot_line(rates, train, "learning_rate", "learning rate", "tab:green")
    norms.set_ylim(bottom=0)
    rates.set_ylim(bottom=0)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rates.set_xlabel("iteration")
    rates.set_xlim(left=0)
    losses.set_title(title or "training loss", loc="left", fontsize=11)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plot_losses(axes: Axes, train: list[Row], evaluations: list[Row], resumed: list[int]) -> None:
    # `train/loss` is one of the others under a common name.
    names = dict.fromkeys(
        name for row in train for name in row if name.endswith("loss") and "/" not in name
    )
    for name in names:
        _draw(axes, *_series(train, name), label=f"{name}, training")
    first = next(iter(names), "lm loss")
    for split in dict.fromkeys(row["split"] for row in evaluations):
        mine = [row for row in evaluations if row["split"] == split and first in row]
        steps, values = _series(mine, first)
        label = f"{first}, {split}"
        axes.plot(steps, values, linestyle="--", marker="o", markersize=4, label=label)
    for step in resumed:
        axes.axvline(step, color="tab:gray", linestyle=":", linewidth=1)
        axes.annotate(
            "resumed",
            (step, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            verticalalignment="top",
            fontsize=8,
            color="tab:gray",
        )
    axes.set_ylabel("loss")
    _tidy(axes)
    axes.legend(frameon=False, fontsize=9)


def _plot_line(axes: Axes, train: list[Row], name: str, label: str, color: str) -> None:
    _draw(axes, *_series(train, name), color=color)
    axes.set_ylabel(label)
    _tidy(axes)


def _draw(axes: Axes, steps: list[int], values: list[float], **style: Any) -> None:
    """A line; of a long and noisy run the smoothed line, with the measured one behind it."""
    if len(values) < SMOOTHED_FROM or style.get("color"):
        marker = "." if len(values) < 60 else ""
        axes.plot(steps, values, marker=marker, markersize=4, linewidth=1.4, **style)
        return
    (line,) = axes.plot(steps, _smoothed(values), linewidth=1.6, **style)
    axes.plot(steps, values, linewidth=0.8, alpha=0.3, color=line.get_color())


def _smoothed(values: list[float]) -> list[float]:
    """Exponential moving average over about a fiftieth of the run, without a slow start."""
    keep = 1 - 1 / max(2.0, len(values) / 50)
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        out.append(mean / weight if weight else math.nan)
    return out


def _series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of the rows that have the value."""
    mine = [row for row in rows if row.get(name) is not None]
    return [row["iteration"] for row in mine], [float(row[name]) for row in mine]


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


class LossPlot:
    """Redraws ``loss.png`` at most once a minute, and at the end."""

    def __init__(self, metrics: Path, title: str) -> None:
        self._metrics = metrics
        self._title = title
        self._drawn_at = time.monotonic()

    def _draw(self) -> None:
        plot_metrics(read_metrics(self._metrics), self._metrics.with_name("loss.png"), self._title)
        self._drawn_at = time.monotonic()

    def on_iteration(self, record: IterationRecord) -> None:
        if time.monotonic() - self._drawn_at > SECONDS_BETWEEN_PLOTS:
            self._draw()

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """The next drawing shows it."""

    def close(self) -> None:
        self._draw()
