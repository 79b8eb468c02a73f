"""The order of DualPipe-V, whose forward passes meet backward passes of the other direction."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.plan import Action, Kind, Order


class _Passes:
    """Builds the order of one rank: each pass is that of its chunk's next micro-batch."""

    def __init__(self, placement: Placement, rank: int, *, pairs: bool) -> None:
        self.stages = [placement.stage_of(rank, chunk) for chunk in (0, 1)]
        self.next = {Kind.FORWARD: [0, 0], Kind.BACKWARD: [0, 0]}
        self.pairs = pairs
        self.order: Order = []
        self.owed = deque[Action]()

    def _take(self, kind: Kind, chunk: int) -> Action:
        microbatch = self.next[kind][chunk]
        self.next[kind][chunk] += 1
        return Action(kind, microbatch, self.stages[chunk])

    def forward(self, chunk: int) -> None:
        self.order.append(self._take(Kind.FORWARD, chunk))

    def backward(self, chunk: int) -> None:
        self.order.append(self._take(Kind.BACKWARD, chunk))

    def input_gradient(self, chunk: int) -> None:
        """Run a backward pass, but leave its weight gradients to a later `weight_gradient`."""
        action = replace(self._take(Kind.BACKWARD, chunk), kind=Kind.INPUT)
        self.order.append(action)
        self.owed.append(replace(action, kind=Kind.WEIGHT))

    def weight_gradient(self) -> None:
        """Compute the weight gradients that have waited longest."""
        self.order.append(self.owed.popleft())

    def both(self, chunk: int) -> None:
        """Run a forward pass of a chunk and a backward pass of the other, as a pair if allowed."""
        forward = self._take(Kind.FORWARD, chunk)
        backward = self._take(Kind.BACKWARD, 1 - chunk)
        if self.pairs:
            self.order.append(forward.beside(backward))
        else:
            self.order += [forward, backward]


def dualpipe_v(placement: Placement, num_microbatches: int, *, pairs: bool) -> list[Order]:
    """Return each rank's order of DualPipe-V: two chunks in V shape (arXiv:2412.19437, fig. 5).

    DualPipe's two directions, cut in half: micro-batches on the way back through chunk 1 take the
    place of those that come from the other end. In the steady phase a forward pass of a chunk runs
    with a backward pass of the other chunk, which is of an earlier micro-batch. Weight gradients
    are put off where a rank would otherwise be idle.

    The schedule is made for at least ``2 * pipeline_size`` micro-batches, and holds at most one
    activation more than that, of half a rank's layers each. With fewer micro-batches, those that
    are missing are left out of it.
    """
    size = placement.pipeline_size
    count = max(num_microbatches, 2 * size)
    orders = []
    for rank in range(size):
        later = size - rank - 1
        passes = _Passes(placement, rank, pairs=pairs)
        for _ in range(2 * later):
            passes.forward(0)
        for _ in range(rank + 1):
            passes.forward(0)
            passes.forward(1)
        for _ in range(later):
            passes.input_gradient(1)
            passes.weight_gradient()
            passes.forward(1)
        for index in range(count - size - later):
            if index == 0 and later == 0:
                # The forward pass would make the other ranks' first gradient wait.
                passes.forward(0)
                passes.backward(1)
            else:
                passes.both(0)
            passes.both(1)
        for _ in range(later):
            passes.backward(1)
            passes.both(1)
        # The last passes put off their weight gradients, which fill the cool-down.
        for index in range(2 * (rank + 1)):
            run = passes.backward if index <= rank else passes.input_gradient
            run(1 - index % 2)
        for _ in range(later):
            passes.weight_gradient()
            passes.input_gradient(0)
        for _ in range(rank + 1):
            passes.weight_gradient()
        orders.append(_without_missing(passes.order, num_microbatches))
    return orders


def _without_missing(order: Order, num_microbatches: int) -> Order:
    """Return an order without the passes of micro-batches that a step does not have."""
    kept = []
    for action in order:
        parts = [part for part in action.passes if part.microbatch < num_microbatches]
        kept += [action] if len(parts) == len(action.passes) else parts
    return kept
