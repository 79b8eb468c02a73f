"""Zero-bubble orders: input gradients go first, weight gradients fill the gaps."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.layout import Placement
from megatron_ext.schedules.plan import EVEN, Action, Durations, Kind, Order, gives, needs


def zb_h1(placement: Placement, num_microbatches: int) -> list[Order]:
    """ZB-H1 (arXiv:2401.10241, section 2.2): the memory of 1F1B, a third of its bubble.

    Rank r warms up as in 1F1B and runs the weight gradient of a micro-batch r micro-batches late,
    so each rank holds ``pipeline_size`` activations at most. The bubble is
    ``(pipeline_size - 1) * (forward + input_gradient - weight_gradient)``.
    """
    orders = []
    for rank in range(placement.pipeline_size):
        ahead = placement.pipeline_size - rank
        order = [Action(Kind.FORWARD, i, rank) for i in range(min(ahead, num_microbatches))]
        for i in range(num_microbatches):
            order.append(Action(Kind.INPUT, i, rank))
            if i >= rank:
                order.append(Action(Kind.WEIGHT, i - rank, rank))
            if i + ahead < num_microbatches:
                order.append(Action(Kind.FORWARD, i + ahead, rank))
        late = range(max(0, num_microbatches - rank), num_microbatches)
        orders.append(order + [Action(Kind.WEIGHT, i, rank) for i in late])
    return orders


@dataclass
class _Rank:
    """What one rank has done so far; counts are indexed by kind and chunk."""

    placement: Placement
    rank: int
    num_microbatches: int
    free_at: float = 0.0
    order: Order = field(default_factory=list)
    counts: dict[Kind, list[int]] = field(
        default_factory=lambda: {k: [0, 0] for k in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)}
    )

    def may_forward(self, chunk: int) -> bool:
        """Whether the memory of 1F1B leaves room for one more forward pass.

        A rank holds ``2 * pipeline_size`` activations of its half-size chunks. On the way there it
        leaves room for those that it will hold on the way back before any gradient arrives.
        """
        size, done = self.placement.pipeline_size, self.counts
        if sum(done[Kind.FORWARD]) - sum(done[Kind.WEIGHT]) >= 2 * size:
            return False
        pending = done[Kind.FORWARD][0] - done[Kind.INPUT][0]
        return chunk == 1 or pending < 2 * size - self.rank - 1

    def choose(self, now: float, ends: dict[tuple[Kind, int, int], float]) -> Action | None:
        """The best computation that is ready, None while the rank is busy or has to wait."""
        if self.free_at > now:
            return None
        for kind in (Kind.INPUT, Kind.FORWARD, Kind.WEIGHT):
            for chunk in (1, 0):
                microbatch = self.counts[kind][chunk]
                if microbatch == self.num_microbatches:
                    continue
                if kind is Kind.FORWARD and not self.may_forward(chunk):
                    continue
                action = Action(kind, microbatch, self.placement.stage_of(self.rank, chunk))
                keys = needs(action, self.placement)
                if all(key in ends and ends[key] <= now for key in keys):
                    return action
        return None

    def take(self, action: Action, end: float) -> None:
        """Run a computation until ``end``."""
        self.order.append(action)
        self.counts[action.kind][self.placement.chunk_of(action.stage)] += 1
        self.free_at = end


def zb_v(placement: Placement, num_microbatches: int, durations: Durations = EVEN) -> list[Order]:
    """ZB-V (arXiv:2405.15362): two chunks on each rank, there and back, in the memory of 1F1B.

    A list scheduler: time runs, and a rank that is free takes the first computation that is ready,
    input gradients before forward passes before weight gradients, later stages first.

    Args:
        placement: there and back.
        num_microbatches: any number.
        durations: what the order is made for; it is right for any times, and best for these.
    """
    ranks = [_Rank(placement, rank, num_microbatches) for rank in range(placement.pipeline_size)]
    ends: dict[tuple[Kind, int, int], float] = {}
    now = 0.0
    while any(len(rank.order) < 6 * num_microbatches for rank in ranks):
        for rank in ranks:
            action = rank.choose(now, ends)
            if action is not None:
                rank.take(action, now + durations.of(action.kind))
                ends[gives(action)] = rank.free_at
        now = min(rank.free_at for rank in ranks if rank.free_at > now)
    return [rank.order for rank in ranks]
