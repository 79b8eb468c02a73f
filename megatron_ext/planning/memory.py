"""The peak memory of each pipeline rank: its state, and the most activations held at one time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from megatron_ext.planning.network import Case, Network
from megatron_ext.planning.stages import LayerBytes, Stage
from megatron_ext.planning.state import State, Weight, rank_state
from megatron_ext.schedules.plan import COMPUTE, RECEIVES, Kind, Plan


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank.

    Attributes:
        rank: pipeline rank.
        weights: parameters of each stage of the rank.
        activations: bytes kept at the peak for backward passes and messages.
        transient: bytes allocated at the peak only within a forward or backward pass.
        in_flight: micro-batches held at the peak, summed over the rank's stages.
        fp8_weights: bytes of the 8-bit copies of weights, which exist during a step.
    """

    rank: int
    stages: tuple[Stage, ...]
    weights: tuple[tuple[Weight, ...], ...]
    state: State
    activations: int
    transient: int
    in_flight: int
    fp8_weights: int

    @property
    def all_weights(self) -> list[Weight]:
        """Return the parameters of all stages of the rank, as one list."""
        return [weight for weights in self.weights for weight in weights]

    @property
    def total(self) -> int:
        """Return the rank's peak memory in bytes: its state, 8-bit weights and activations."""
        return self.state.total + self.fp8_weights + self.activations + self.transient


def memory(network: Network, other: Sequence[RankMemory] | None = None) -> list[RankMemory]:
    """Return the memory of each pipeline rank.

    ``other`` is the memory of the same run with another recomputation, which has the same weights
    and the same state; None to count these too.
    """
    stages = network.stages()
    costs = network.of_stages(network.activations, stages)
    deferred = network.of_stages(network.deferred, stages)
    ranks = []
    plan = network.schedule.short()
    kept = _kept(network, stages) if other is None else other
    boundary = network.boundary
    for known in kept:
        peak = walk(plan, known.rank, costs, deferred=deferred, boundary=boundary)
        activations, transient, in_flight = peak
        ranks.append(
            replace(known, activations=activations, transient=transient, in_flight=in_flight)
        )
    return ranks


def _kept(network: Network, stages: Sequence[Stage]) -> list[RankMemory]:
    """Return the memory of each pipeline rank without activations."""
    ranks = []
    states: dict[Hashable, State] = {}
    eight = network.of_stages(network.fp8_weights, stages)
    for rank in range(network.sizes.pp):
        mine = sorted((x for x in stages if x.rank == rank), key=lambda x: x.chunk)
        weights = tuple(network.parameters(stage) for stage in mine)
        # The first rank's gradients are reduced in buckets of another size.
        key = rank == 0, *map(network.kind, mine)
        if key not in states:
            states[key] = rank_state(network.config, network.sizes, rank, weights)
        fp8_weights = sum(eight[stage.index] for stage in mine)
        ranks.append(RankMemory(rank, tuple(mine), weights, states[key], 0, 0, 0, fp8_weights))
    return ranks


def fullest(ranks: Sequence[RankMemory]) -> RankMemory:
    """Return the rank with the highest peak."""
    return max(ranks, key=lambda rank: rank.total)


def worst_case(cases: Sequence[Case]) -> tuple[Network, list[RankMemory]]:
    """Return the network of the `Case` with the highest peak, and its memory on each rank."""
    entries = [(case.network, memory(case.network)) for case in cases]
    return max(entries, key=lambda entry: fullest(entry[1]).total)


USES = {Kind.FORWARD: Kind.RECEIVE_INPUT, Kind.WEIGHT: None}
"""The kind of received message that each kind of computation consumes; None for no message.

Kinds that are not listed, which are backward passes, consume `Kind.RECEIVE_GRADIENT`.
"""


def walk(
    plan: Plan,
    rank: int,
    costs: Sequence[LayerBytes],
    *,
    deferred: Sequence[int] = (),
    boundary: int = 0,
) -> tuple[int, int, int]:
    """Follow a pipeline rank's actions through the schedule, and return its memory peak.

    Args:
        costs: bytes of one micro-batch in each stage of the model.
        deferred: for each stage, the bytes of one micro-batch that it keeps between its
            input-gradient pass and its weight-gradient pass.
        boundary: bytes of a message between stages. Its buffer exists from the receive until the
            computation that consumes the message.

    Returns:
        Three numbers at the peak: bytes kept for backward passes and messages, further bytes that
        only the running pass needs, and micro-batches held, summed over the rank's stages.
    """
    allocated = count = 0
    peak = (0, 0, 0)
    waiting = set[tuple[Kind | None, int, int]]()
    for action in plan.ranks[rank]:
        if action.kind not in COMPUTE:
            if action.kind in RECEIVES:
                waiting.add((action.kind, action.microbatch, action.stage))
                allocated += boundary
            continue
        cost = costs[action.stage]
        message = USES.get(action.kind, Kind.RECEIVE_GRADIENT)
        given = (message, action.microbatch, action.stage)
        arrived = boundary if given in waiting else 0
        waiting.discard(given)
        if action.kind is Kind.FORWARD:
            # The message becomes the input of the first layer, where it is counted.
            allocated = allocated + cost.kept - arrived
            count = count + 1
            arrived = 0
        if allocated + cost.transient > peak[0] + peak[1]:
            peak = (allocated, cost.transient, count)
        allocated -= arrived
        if action.kind is Kind.BACKWARD:
            allocated = allocated - cost.kept
            count = count - 1
        elif action.kind is Kind.INPUT:
            allocated += deferred[action.stage] - cost.kept
        elif action.kind is Kind.WEIGHT:
            allocated = allocated - deferred[action.stage]
            count = count - 1
    return peak
