"""Draws what each rank did in the seconds before a fault: one row per rank, over time.

It runs as a separate program with the folder of a post-mortem as its argument, so that drawing
does not delay a recovery.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.disk.events import PICTURE, TIMELINE
from megatron_ext.disk.figures import new_figure
from megatron_ext.disk.reading import read_json_object
from megatron_ext.disk.writing import cleared

COLOURS = {
    "data": "#b07aa1",
    "forward": "#4e79a7",
    "backward": "#59a14f",
    "bubble": "#e0e0e0",
    "reduce": "#f28e2b",
    "update": "#edc948",
    "save": "#76b7b2",
    "evaluate": "#9c755f",
}
"""Colour of each phase of a step; phases that are not listed are drawn white."""
_SECONDS_SHOWN = 20.0
_STEPS_SHOWN = 3


def spans(events: Sequence[Sequence[Any]]) -> Iterator[tuple[float, float, str]]:
    """Yield the start, end and phase of each stretch of time between two events of a rank.

    Times are in seconds; the last stretch ends at 0, when the fault was detected. ``events`` are
    the rank's events in timeline.json: [time, kind, name, phase, step].
    """
    for event, after in zip(events, [*events[1:], [0.0]], strict=True):
        if after[0] > event[0]:
            yield event[0], after[0], event[3]


def first_time(ranks: Sequence[dict[str, Any]]) -> float:
    """Return the time at which the drawing starts, in seconds relative to the fault (negative).

    ``ranks`` is the list of that name in timeline.json (`postmortem`).

    The drawing shows the last `_STEPS_SHOWN` steps, but no more than `_SECONDS_SHOWN` seconds.
    """
    steps = [e[0] for rank in ranks for e in rank["events"] if e[1] == "STEP"]
    last = sorted({round(time, 3) for time in steps})[-_STEPS_SHOWN * len(ranks) :]
    events = [e[0] for rank in ranks for e in rank["events"]]
    start = min(last or events, default=-1.0)
    return max(start, -_SECONDS_SHOWN)


def draw(folder: Path) -> None:
    """Read ``timeline.json`` in a post-mortem's ``folder``, and write ``picture.svg`` there."""
    timeline = read_json_object(folder / TIMELINE)
    ranks = timeline["ranks"]
    start = first_time(ranks)
    figure = new_figure(figsize=(12, 1.8 + 0.45 * len(ranks)), layout="constrained")
    from matplotlib.patches import Patch  # after the figure, whose maker sees to the backend

    axes = figure.subplots()
    for row, rank in enumerate(ranks):
        for begin, end, phase in spans(rank["events"]):
            if end > start:
                begin = max(begin, start)
                colour = COLOURS.get(phase, "#ffffff")
                axes.barh(row, end - begin, left=begin, color=colour, height=0.8)
        for event in rank["events"]:
            if event[1] == "STEP" and event[0] >= start:
                axes.plot([event[0]] * 2, [row - 0.45, row + 0.45], color="black", linewidth=0.8)
                axes.text(event[0], row - 0.42, f" {event[4]}", fontsize=7, va="top")
        if rank["events"] and rank["first"]:
            last = rank["events"][-1][0]
            axes.plot([max(last, start)], [row], marker="X", color="#e15759", markersize=11)
    axes.set_yticks(range(len(ranks)), [f"rank {rank['rank']}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlim(start, 0.0)
    axes.set_xlabel(
        "seconds before the fault was seen; a number is a step, the cross is where it began"
    )
    axes.set_title("\n".join(textwrap.wrap(timeline["title"], 130)), fontsize=8)
    legend = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8)
    figure.savefig(cleared(folder / PICTURE))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
