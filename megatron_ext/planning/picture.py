"""The schedule over time and the memory of each pipeline rank, drawn into one PNG file each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ext.device.gpus import GB, Gpu
from megatron_ext.planning.memory import RankMemory, memory, step_plan
from megatron_ext.planning.network import Network
from megatron_ext.schedules.picture import save as save_schedule
from megatron_ext.schedules.picture import write_figure
from megatron_ext.schedules.plan import price

COLORS = {
    "weights": "#7aa6da",
    "gradients": "#8cc98c",
    "optimizer": "#f2c14e",
    "EMA": "#c39bd3",
    "activations": "#e08e79",
    "for a moment": "#bbbbbb",
}


def parts_of(rank: RankMemory) -> dict[str, int]:
    """Return the bytes of a rank by the names of `COLORS`."""
    state = rank.state
    values = (state.parameters, state.gradients, state.optimizer, state.average)
    return dict(zip(COLORS, (*values, rank.activations, rank.transient), strict=True))


def save(network: Network, path: Path, gpu: Gpu | None = None) -> list[Path]:
    """Draw the schedule of a run and its memory.

    Args:
        path: where the picture of the schedule goes; the picture of the memory lies next to it,
            with ``_memory`` in its name.
        gpu: its memory is drawn as a line.

    Returns:
        Both files.
    """
    plan = step_plan(network.config)
    save_schedule(plan, price(plan), path)
    second = path.with_name(f"{path.stem}_memory{path.suffix}")
    save_memory(memory(network, plan), second, gpu)
    return [path, second]


def save_memory(ranks: Sequence[RankMemory], path: Path, gpu: Gpu | None) -> None:
    """Draw one bar for each pipeline rank, cut by what fills it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(30.0, 4 + 0.6 * len(ranks)), 4.5))
    axes = figure.add_subplot()
    bottoms = [0.0] * len(ranks)
    for name, color in COLORS.items():
        heights = [parts_of(rank)[name] / GB for rank in ranks]
        if any(heights):
            axes.bar(range(len(ranks)), heights, bottom=bottoms, color=color, label=name)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    if gpu is not None:
        axes.axhline(gpu.memory / GB, color="black", linestyle="--", label=gpu.name)
    axes.set_xticks(range(len(ranks)), [str(rank.rank) for rank in ranks])
    axes.set_xlabel("pipeline rank")
    axes.set_ylabel("GB")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    write_figure(figure, path)
