"""The peak memory of each pipeline rank: its state, and a walk through the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.network import Case, Network
from megatron_ext.planning.stages import LayerBytes, Stage
from megatron_ext.planning.state import State, Weight, rank_state
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.plan import COMPUTE, RECEIVES, Kind, Plan

_plan = lru_cache(maxsize=64)(build_plan)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the ranks of one place in the pipeline.

    Attributes:
        rank: pipeline rank.
        stages: stages that it holds.
        weights: parameters of each of its stages.
        state: what it keeps between steps.
        activations: the most that the schedule lets it hold of all micro-batches in flight.
        transient: bytes at the peak that live within one forward or backward pass.
        in_flight: micro-batches held at the peak, summed over its stages.
        fp8_weights: weights in 8 bits, which are kept within a step.
    """

    rank: int
    stages: tuple[Stage, ...]
    weights: tuple[tuple[Weight, ...], ...]
    state: State
    activations: int
    transient: int
    in_flight: int
    fp8_weights: int = 0

    @property
    def total(self) -> int:
        """Return state and activations at the peak."""
        return self.state.total + self.fp8_weights + self.activations + self.transient


def step_plan(config: RunConfig) -> Plan:
    """Return the pipeline schedule of a step."""
    parallel = config.parallel
    schedule = parallel.pipeline_schedule or "no-pipelining"
    return _plan(
        schedule.removeprefix("core-"),
        pipeline_size=parallel.pipeline_model_parallel_size,
        num_microbatches=num_microbatches(config),
        num_chunks=parallel.virtual_pipeline_model_parallel_size or 1,
        group_size=parallel.microbatch_group_size_per_vp_stage,
    )


def num_microbatches(config: RunConfig) -> int:
    """Return the micro-batches of each data-parallel rank in a step of the whole batch."""
    micro, batch = config.training.batch_sizes
    return max(1, batch // (micro * config.parallel.data_parallel_size))


def memory(network: Network, plan: Plan | None = None) -> list[RankMemory]:
    """Return the memory of each pipeline rank.

    Args:
        plan: the schedule of a step, where it is at hand.
    """
    plan = plan or step_plan(network.config)
    stages = network.stages()
    costs = [network.activations(stage) for stage in stages]
    deferred = [network.deferred(stage) for stage in stages]
    found = []
    for rank in range(network.sizes.pp):
        mine = [stage for stage in stages if stage.rank == rank]
        mine.sort(key=lambda stage: stage.chunk)
        weights = tuple(tuple(network.weights(stage)) for stage in mine)
        held, transient, count = walk(
            plan, rank, costs, deferred=deferred, boundary=network.boundary
        )
        found.append(
            RankMemory(
                rank=rank,
                stages=tuple(mine),
                weights=weights,
                state=rank_state(network.config, network.sizes, rank, weights),
                activations=held,
                transient=transient,
                in_flight=count,
                fp8_weights=sum(network.fp8_weights(stage) for stage in mine),
            )
        )
    return found


def fullest(ranks: Sequence[RankMemory]) -> RankMemory:
    """Return the rank that needs most."""
    return max(ranks, key=lambda rank: rank.total)


def worst_case(cases: Sequence[Case]) -> tuple[Network, list[RankMemory]]:
    """Return the network whose batches need most memory, and its memory."""
    found = [(case.network, memory(case.network)) for case in cases]
    return max(found, key=lambda entry: fullest(entry[1]).total)


def walk(
    plan: Plan,
    rank: int,
    costs: Sequence[LayerBytes],
    *,
    deferred: Sequence[int] = (),
    boundary: int = 0,
) -> tuple[int, int, int]:
    """Go through a rank's actions.

    Args:
        plan: the schedule.
        rank: pipeline rank.
        costs: bytes of one micro-batch in each stage of the model.
        deferred: bytes that each stage keeps for weight gradients that are put off; only read where
            the schedule puts them off.
        boundary: bytes of a message, whose buffer exists from the receive to its use.

    Returns:
        Bytes held and transient bytes at the peak, and the stage activations held there.
    """
    held = count = 0
    peak, waiting = (0, 0, 0), set[tuple[Kind | None, int, int]]()
    for action in plan.ranks[rank]:
        if action.kind not in COMPUTE:
            if action.kind in RECEIVES:
                waiting.add((action.kind, action.microbatch, action.stage))
                held += boundary
            continue
        cost = costs[action.stage]
        given = (USES[action.kind], action.microbatch, action.stage)
        arrived = boundary if given in waiting else 0
        waiting.discard(given)
        if action.kind is Kind.FORWARD:
            # What has arrived is the input of the first layer, which counts there.
            held, count, arrived = held + cost.kept - arrived, count + 1, 0
        peak = max(peak, (held, cost.transient, count), key=lambda at: at[0] + at[1])
        held -= arrived
        if action.kind is Kind.BACKWARD:
            held, count = held - cost.kept, count - 1
        elif action.kind is Kind.INPUT:
            held += deferred[action.stage] - cost.kept
        elif action.kind is Kind.WEIGHT:
            held, count = held - deferred[action.stage], count - 1
    return peak


USES = {
    Kind.FORWARD: Kind.RECEIVE_INPUT,
    Kind.BACKWARD: Kind.RECEIVE_GRADIENT,
    Kind.INPUT: Kind.RECEIVE_GRADIENT,
    Kind.WEIGHT: None,
}
"""The message that a computation uses up."""
