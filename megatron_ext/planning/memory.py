"""The peak memory of each pipeline rank: its state, and the most activations held at one time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_ext.planning.network import Case, Network
from megatron_ext.planning.pipeline import Schedule
from megatron_ext.planning.stages import LayerBytes, Stage
from megatron_ext.planning.state import State, rank_state
from megatron_ext.planning.weights import Weight
from megatron_ext.schedules.plan import COMPUTE, RECEIVES, Action, Kind, Plan, recomputed_whole


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
        moved: bytes of activations in host memory at its own peak.
    """

    rank: int
    stages: tuple[Stage, ...]
    weights: tuple[tuple[Weight, ...], ...]
    state: State
    activations: int
    transient: int
    in_flight: int
    fp8_weights: int
    moved: int = 0

    @property
    def all_weights(self) -> list[Weight]:
        """Return the parameters of all stages of the rank, as one list."""
        return [weight for weights in self.weights for weight in weights]

    @property
    def host(self) -> int:
        """Return the bytes of host memory that the rank needs for what it moves there."""
        return self.state.host + self.moved

    @property
    def total(self) -> int:
        """Return the rank's peak memory in bytes: its state, 8-bit weights and activations.

        The whole weights before they are sharded may take more than a step.
        """
        step = self.state.total + self.fp8_weights + self.activations + self.transient
        return max(step, self.state.setup)


def memory(network: Network) -> list[RankMemory]:
    """Return the memory of each pipeline rank."""
    return list(rank_memories(network))


def rank_memories(network: Network, *, messages: bool = True) -> Iterator[RankMemory]:
    """Yield the memory of one pipeline rank after the other.

    Without ``messages`` it is somewhat too low, and found faster: received messages that wait for a
    computation are left out.
    """
    schedule = network.schedule
    # A shorter step has the same moments; layouts with other numbers of replicas share it.
    schedule = replace(schedule, num_microbatches=schedule.simulated)
    boundary = network.boundary
    find = _moments if messages else _moments_of_passes
    ways = [network] if schedule.partly is None else [network, network.recomputing_all]
    num_stages = schedule.pipeline_size * schedule.num_chunks
    counted: dict[Hashable, list[tuple[LayerBytes, int, LayerBytes]]] = {}
    for known in stored(network):
        costs: dict[int, LayerBytes] = {}
        deferred: dict[int, int] = {}
        hosted: dict[int, LayerBytes] = {}
        for stage in known.stages:
            kind = network.kind(stage)
            if kind not in counted:
                counted[kind] = [
                    (x.activations(stage), x.deferred(stage), LayerBytes(x.hosted(stage), 0))
                    for x in ways
                ]
            # Micro-batches whose layers are all recomputed count as held by further stages.
            for index, cost in enumerate(counted[kind]):
                place = stage.index + index * num_stages
                costs[place], deferred[place], hosted[place] = cost
        found = find(schedule, known.rank)
        peak = peak_of(found, costs, deferred=deferred, boundary=boundary)
        activations, transient, in_flight = peak
        moved = peak_of(found, hosted)[0] if any(x.kept for x in hosted.values()) else 0
        yield replace(
            known,
            activations=activations,
            transient=transient,
            in_flight=in_flight,
            moved=moved,
        )


def stored(network: Network) -> Iterator[RankMemory]:
    """Yield the memory of each pipeline rank without activations."""
    ranks: list[list[Stage]] = [[] for _ in range(network.sizes.pp)]
    for stage in network.stages():
        ranks[stage.rank].append(stage)
    eight: dict[Hashable, int] = {}
    for rank, stages in enumerate(ranks):
        mine = sorted(stages, key=lambda stage: stage.chunk)
        weights = tuple(network.parameters(stage) for stage in mine)
        kinds = [network.kind(stage) for stage in mine]
        for kind, stage in zip(kinds, mine, strict=True):
            if kind not in eight:
                eight[kind] = network.fp8_weights(stage)
        # The first rank's gradients are reduced in buckets of another size.
        key = rank == 0, *kinds
        if key not in network.states:
            network.states[key] = rank_state(
                network.config, network.sizes, rank, weights, draws_by_name=network.draws_by_name
            )
        fp8_weights = sum(eight[kind] for kind in kinds)
        state = network.states[key]
        yield RankMemory(rank, tuple(mine), weights, state, 0, 0, 0, fp8_weights)


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


@dataclass(frozen=True)
class Moment:
    """A moment at which a pipeline rank computes, with the micro-batches and messages it holds.

    Attributes:
        stage: the stage that computes.
        held: pairs of a stage and the micro-batches whose activations it holds.
        deferred: pairs of a stage and the micro-batches whose weight gradients it still owes.
        waiting: received messages that no computation has used yet.
        count: all micro-batches that the rank holds, summed over its stages.
        beside: the stage whose forward pass runs beside this one's backward pass, in a pair.
    """

    stage: int
    held: tuple[tuple[int, int], ...]
    deferred: tuple[tuple[int, int], ...]
    waiting: int
    count: int
    beside: int | None = None


@lru_cache(maxsize=1 << 14)
def _moments(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """Return the `moments` of a schedule's step, found once for all layouts that have it."""
    return moments(schedule.plan(), rank, schedule.partly)


@lru_cache(maxsize=1 << 14)
def _moments_of_passes(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """Return the `moments` of a schedule's step without its messages."""
    num_stages = schedule.pipeline_size * schedule.num_chunks
    return _followed(_short_orders(schedule)[rank], num_stages, schedule.partly)


@lru_cache(maxsize=8)
def _short_orders(schedule: Schedule) -> Sequence[Sequence[Action]]:
    return schedule.short_orders()


def moments(plan: Plan, rank: int, partly: int | None = None) -> tuple[Moment, ...]:
    """Follow a pipeline rank's actions through a plan; return the unlike moments, in order.

    With ``partly``, the stage of a micro-batch whose layers are all recomputed is counted on after
    the last stage (see `recomputed_whole`).
    """
    return _followed(plan.ranks[rank], plan.placement.num_stages, partly)


def _followed(actions: Sequence[Action], more: int, partly: int | None) -> tuple[Moment, ...]:
    """Return the `moments` of a rank's actions; ``more`` is the number of stages of the model."""
    whole = frozenset() if partly is None else recomputed_whole(actions, partly)
    held: Counter[int] = Counter()
    deferred: Counter[int] = Counter()
    count = 0
    waiting = set[tuple[Kind | None, int, int]]()
    found: dict[Moment, None] = {}
    for action in actions:
        if action.kind not in COMPUTE:
            if action.kind in RECEIVES:
                waiting.add((action.kind, action.microbatch, action.stage))
            continue
        for part in action.passes:
            stage = part.stage
            message = USES.get(part.kind, Kind.RECEIVE_GRADIENT)
            given = (message, part.microbatch, stage)
            if (part.microbatch, stage) in whole:
                stage += more
            if part.kind is Kind.FORWARD:
                # The message becomes the input of the first layer, where it is counted.
                waiting.discard(given)
                held[stage] += 1
                count += 1
            now = tuple(held.items()), tuple(deferred.items())
            beside = None
            if part is action.backward:
                beside = action.stage
                beside += more if (action.microbatch, beside) in whole else 0
            found[Moment(stage, *now, len(waiting), count, beside)] = None
            waiting.discard(given)
            if part.kind in (Kind.BACKWARD, Kind.INPUT):
                held[stage] -= 1
            if part.kind is Kind.INPUT:
                deferred[stage] += 1
            elif part.kind is Kind.WEIGHT:
                deferred[stage] -= 1
            if part.kind in (Kind.BACKWARD, Kind.WEIGHT):
                count -= 1
    return tuple(found)


def peak_of(
    found: Iterable[Moment],
    costs: Sequence[LayerBytes] | Mapping[int, LayerBytes],
    *,
    deferred: Sequence[int] | Mapping[int, int] = (),
    boundary: int = 0,
) -> tuple[int, int, int]:
    """Return the memory peak of a pipeline rank among its moments.

    Args:
        costs: bytes of one micro-batch in each stage of the model, or in those of the rank.
        deferred: for each stage, the bytes of one micro-batch that it keeps between its
            input-gradient pass and its weight-gradient pass.
        boundary: bytes of a message between stages. Its buffer exists from the receive until the
            computation that consumes the message.

    Returns:
        Three numbers at the peak: bytes kept for backward passes and messages, further bytes that
        only the running pass needs, and micro-batches held, summed over the rank's stages.
    """
    peak = (0, 0, 0)
    for moment in found:
        allocated = boundary * moment.waiting
        for stage, number in moment.held:
            allocated += costs[stage].kept * number
        for stage, number in moment.deferred:
            allocated += deferred[stage] * number
        transient = costs[moment.stage].transient
        if moment.beside is not None:
            transient += costs[moment.beside].transient
        if allocated + transient > peak[0] + peak[1]:
            peak = (allocated, transient, moment.count)
    return peak
