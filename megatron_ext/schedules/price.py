"""The time and memory that a plan of a pipeline schedule costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.schedules.plan import EVEN, Durations, Plan, Timed, most_held, timeline


@dataclass(frozen=True)
class Price:
    """The time and memory of one simulated step.

    Attributes:
        makespan: time from the first start to the last end.
        bubble: idle time of the busiest rank; ``bubble_share`` is ``bubble / makespan``.
        peak_activations: for each rank, the peak number of activations that it holds: one for each
            micro-batch and stage, from the forward pass until the weight gradients are computed.
    """

    timeline: list[list[Timed]]
    makespan: float
    bubble: float
    bubble_share: float
    peak_activations: list[int]


def price(plan: Plan, durations: Durations = EVEN, latency: float = 0.0) -> Price:
    """Simulate a plan and return its time and memory; ``latency`` is the time of a message."""
    timed = timeline([list(rank) for rank in plan.ranks], plan.placement, durations, latency)
    makespan, bubble = span(timed)
    share = bubble / makespan if makespan else 0.0
    return Price(timed, makespan, bubble, share, [most_held(rank) for rank in plan.ranks])


def span(timed: Sequence[Sequence[Timed]]) -> tuple[float, float]:
    """Return the time from the first start to the last end, and the busiest rank's idle time."""
    makespan = max((rank[-1].end for rank in timed if rank), default=0.0)
    work = max(sum(entry.end - entry.start for entry in rank) for rank in timed)
    return makespan, makespan - work
