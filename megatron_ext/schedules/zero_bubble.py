"""The orders of zero-bubble schedules, which compute weight gradients when a rank would be idle."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import inf

from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.plan import EVEN, Action, Durations, Kind, Order, gives, needs


def zb_h1(placement: Placement, num_microbatches: int) -> list[Order]:
    """Return each rank's order of ZB-H1 (arXiv:2401.10241, section 2.2).

    Rank r warms up as in 1F1B. It computes each weight gradient r micro-batches after the input
    gradient of the same micro-batch. So each rank holds at most ``pipeline_size`` activations, as
    in 1F1B. The bubble is ``(pipeline_size - 1) * (forward + input_gradient - weight_gradient)``;
    if these three times are equal, it is a third of 1F1B's.
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
    """The state of one rank in the scheduler of `zb_v`.

    ``counts`` is the number of computations done so far, by kind and chunk.
    """

    placement: Placement
    rank: int
    num_microbatches: int
    free_at: float = 0.0
    order: Order = field(default_factory=list)
    counts: dict[Kind, list[int]] = field(
        default_factory=lambda: {k: [0, 0] for k in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)}
    )

    def may_forward(self, chunk: int) -> bool:
        """Return whether one more forward pass of a chunk stays within the memory of 1F1B.

        The limit is ``2 * pipeline_size`` activations in both chunks together, since a chunk is
        half as large as a stage of 1F1B. Chunk 0 must also leave room for the activations that
        chunk 1 needs before the first gradient arrives.
        """
        size = self.placement.pipeline_size
        done = self.counts
        if sum(done[Kind.FORWARD]) - sum(done[Kind.WEIGHT]) >= 2 * size:
            return False
        pending = done[Kind.FORWARD][0] - done[Kind.INPUT][0]
        return chunk == 1 or pending < 2 * size - self.rank - 1

    def choose(self, now: float, ends: dict[tuple[Kind, int, int], float]) -> Action | None:
        """Return the next computation, or None if the rank is busy or no computation is ready.

        Args:
            now: the simulated time.
            ends: end time of each computation chosen so far, by the key that `gives` returns.
        """
        if self.free_at > now:
            return None
        for kind, chunk in product((Kind.INPUT, Kind.FORWARD, Kind.WEIGHT), (1, 0)):
            microbatch = self.counts[kind][chunk]
            if microbatch == self.num_microbatches:
                continue
            if kind is Kind.FORWARD and not self.may_forward(chunk):
                continue
            action = Action(kind, microbatch, self.placement.stage_of(self.rank, chunk))
            if all(ends.get(key, inf) <= now for key in needs(action, self.placement)):
                return action
        return None


def zb_v(placement: Placement, num_microbatches: int, durations: Durations = EVEN) -> list[Order]:
    """Return each rank's order of ZB-V (arXiv:2405.15362): two chunks in V shape, memory of 1F1B.

    A greedy simulation with ``durations`` builds the orders. A free rank runs the ready computation
    with the highest priority: input gradients, then forward passes, then weight gradients, and
    chunk 1 before chunk 0. The orders are valid for any durations, but tuned to the given ones.
    """
    ranks = [_Rank(placement, rank, num_microbatches) for rank in range(placement.pipeline_size)]
    ends = dict[tuple[Kind, int, int], float]()
    now = 0.0
    while any(len(rank.order) < 6 * num_microbatches for rank in ranks):
        for rank in ranks:
            action = rank.choose(now, ends)
            if action is not None:
                rank.order.append(action)
                rank.counts[action.kind][placement.chunk_of(action.stage)] += 1
                rank.free_at = ends[gives(action)] = now + durations.of(action.kind)
        now = min(rank.free_at for rank in ranks if rank.free_at > now)
    return [rank.order for rank in ranks]
