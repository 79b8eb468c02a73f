"""Drawings of a schedule over time: one row for each rank, one box for each computation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.disk.figures import new_figure
from megatron_ext.errors import ConfigError
from megatron_ext.schedules.plan import Action, Kind, Plan
from megatron_ext.schedules.price import Price

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    Kind.FORWARD: ("forward", "#7aa6da"),
    Kind.BACKWARD: ("backward", "#8cc98c"),
    Kind.INPUT: ("input gradient", "#6fc3c3"),
    Kind.WEIGHT: ("weight gradient", "#f2c14e"),
    Kind.PAIR: ("forward beside backward", "#b3a2c8"),
}
"""The name and the colour of each kind of computation in a drawing."""


def text(plan: Plan, cost: Price) -> str:
    """Draw the timeline as text, and return it; the shortest computation is three characters wide.

    A computation is drawn as the letter of its `Kind`, the index of its micro-batch, and dashes up
    to its end. A pair is drawn as its forward and its backward pass. The letter is lower-case for
    all chunks of a rank but the first. Dots are idle time.
    """
    scale = max(
        3 * len(entry.action.passes) / (entry.end - entry.start)
        for rank in cost.timeline
        for entry in rank
    )
    rows = []
    for index, rank in enumerate(cost.timeline):
        row = ""
        for entry in rank:
            start = round(entry.start * scale)
            end = round(entry.end * scale)
            box = "".join(_name(part, plan) for part in entry.action.passes)
            box = box[: end - start].ljust(end - start, "-")
            row = row.ljust(start, ".") + box
        rows.append(f"rank {index} |{row.ljust(round(cost.makespan * scale), '.')}|")
    return "\n".join(rows)


def _name(action: Action, plan: Plan) -> str:
    """Return a computation's name in a text, such as F0, or f0 in a later chunk."""
    letter = action.kind.value
    if plan.placement.chunk_of(action.stage) > 0:
        letter = letter.lower()
    return f"{letter}{action.microbatch}"


def save(plan: Plan, cost: Price, path: Path) -> None:
    """Draw the timeline into an image file of the suffix's format; hatch all but a rank's chunk 0.

    Raises:
        ConfigError: the file cannot be written, or its suffix is no image format.
    """
    rows = len(cost.timeline)
    figure = new_figure(figsize=(min(40.0, 4 + 0.25 * cost.makespan), 1.5 + 0.5 * rows))
    from matplotlib.patches import Patch  # after the figure, whose maker sees to the backend

    axes = figure.add_subplot()
    used: set[Kind] = set()
    for index, rank in enumerate(cost.timeline):
        for entry in rank:
            action = entry.action
            length = entry.end - entry.start
            later = plan.placement.chunk_of(action.stage) > 0
            axes.barh(
                index,
                length,
                left=entry.start,
                height=0.9,
                color=STYLES[action.kind][1],
                edgecolor="black",
                linewidth=0.4,
                hatch="//" if later else None,
                alpha=0.75 if later else 1.0,
            )
            middle = entry.start + length / 2
            label = " ".join(str(part.microbatch) for part in action.passes)
            axes.text(middle, index, label, ha="center", va="center", fontsize=7)
            used.add(action.kind)
    axes.set_yticks(range(rows), [f"rank {index}" for index in range(rows)])
    axes.invert_yaxis()
    axes.set_xlim(0, cost.makespan)
    axes.set_xlabel("time")
    axes.set_title(
        f"{plan.schedule}: {rows} ranks, {plan.num_microbatches} micro-batches, "
        f"bubble {cost.bubble_share:.1%}"
    )
    legend = [Patch(color=c, label=name) for kind, (name, c) in STYLES.items() if kind in used]
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)
    write_figure(figure, path)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure to ``path``; an error names the flag ``--png``.

    Raises:
        ConfigError: the file cannot be written, or its suffix is no image format.
    """
    try:
        figure.savefig(path, bbox_inches="tight", dpi=120)
    except (OSError, ValueError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"`--png` ({path}) cannot be written ({why.rstrip('.')}); give a file .png in a folder "
            "that is there."
        ) from error
