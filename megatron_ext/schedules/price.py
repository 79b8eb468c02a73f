"""What a plan costs: time, bubble and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.schedules.plan import (
    COMPUTE,
    EVEN,
    Action,
    Durations,
    Kind,
    Plan,
    Timed,
    timeline,
)


@dataclass(frozen=True)
class Price:
    """Cost of one step.

    Attributes:
        timeline: for each rank, when it computes what.
        makespan: time from the first start to the last end.
        bubble: time that the busiest rank is idle: the makespan without its work.
        bubble_share: ``bubble / makespan``.
        peak_activations: for each rank, the most stage activations held at once; one is let go
            when its weight gradient is done.
    """

    timeline: list[list[Timed]]
    makespan: float
    bubble: float
    bubble_share: float
    peak_activations: list[int]


def price(plan: Plan, durations: Durations = EVEN, latency: float = 0.0) -> Price:
    """Simulate a plan with given times of its actions.

    Args:
        plan: any.
        durations: of one stage's computations.
        latency: of a message between two ranks.
    """
    timed = timeline([list(rank) for rank in plan.ranks], plan.placement, durations, latency)
    makespan = max((rank[-1].end for rank in timed if rank), default=0.0)
    work = max(sum(entry.end - entry.start for entry in rank) for rank in timed)
    bubble = makespan - work
    return Price(
        timeline=timed,
        makespan=makespan,
        bubble=bubble,
        bubble_share=bubble / makespan if makespan else 0.0,
        peak_activations=[_peak(rank) for rank in plan.ranks],
    )


def _peak(actions: Sequence[Action]) -> int:
    """Most activations held at once; one that is never let go counts for its own time only."""
    trains = any(action.kind is not Kind.FORWARD for action in actions if action.kind in COMPUTE)
    held = peak = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            peak = max(peak, held + 1)
            held += trains
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            held -= 1
    return peak
