"""``loss.png``: losses, learning rate and gradient norm of a run, for a person to look at."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.training.reporting.metrics_file import read_metrics
from megatron_ext.training.reporting.records import EvaluationRecord, IterationRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECONDS_BETWEEN_PLOTS = 60.0


def plot_metrics(rows: list[dict[str, Any]], path: Path, title: str = "") -> None:
    """Draw the rows of a metrics file; without a training row nothing is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train = [row for row in rows if row["kind"] == "train"]
    if not train:
        return
    figure, (losses, norms) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    try:
        _plot_losses(losses, train, [row for row in rows if row["kind"] == "evaluation"])
        _plot_norms(norms, train)
        losses.set_title(title or "training loss")
        temporary = path.with_name(f".{path.name}.tmp")
        figure.savefig(temporary, format="png", dpi=110)
        os.replace(temporary, path)
    finally:
        plt.close(figure)


def _plot_losses(axes: Axes, train: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    names = [name for name in train[0] if name.endswith("loss")]
    steps = [row["iteration"] for row in train]
    for name in names:
        axes.plot(steps, [row.get(name) for row in train], marker=_marker(steps), label=name)
    for split in dict.fromkeys(row["split"] for row in evaluations):
        mine = [row for row in evaluations if row["split"] == split and "lm loss" in row]
        axes.plot(
            [row["iteration"] for row in mine],
            [row["lm loss"] for row in mine],
            linestyle="--",
            marker="o",
            label=f"{split}",
        )
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _plot_norms(axes: Axes, train: list[dict[str, Any]]) -> None:
    steps = [row["iteration"] for row in train]
    axes.plot(steps, [row["grad_norm"] for row in train], color="tab:gray", marker=_marker(steps))
    axes.set_ylabel("gradient norm", color="tab:gray")
    axes.set_xlabel("iteration")
    axes.grid(alpha=0.3)
    rates = axes.twinx()
    rates.plot(steps, [row["learning_rate"] for row in train], color="tab:red")
    rates.set_ylabel("learning rate", color="tab:red")
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))


def _marker(steps: list[int]) -> str:
    return "." if len(steps) < 60 else ""


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
