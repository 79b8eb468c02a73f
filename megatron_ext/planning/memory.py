"""The peak memory of each pipeline rank: its state, and a walk through the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_ext.planning.buffers import State, bucket_size, chunk_state
from megatron_ext.planning.contents import LayerBytes, Ranks, Stage
from megatron_ext.planning.models import network_of
from megatron_ext.planning.network import Network
from megatron_ext.planning.parameters import Weight
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.plan import COMPUTE, RECEIVES, Kind, Plan

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

_plan = lru_cache(maxsize=64)(build_plan)

RECOMPUTATION: dict[str, dict[str, object]] = {
    "none": {"recompute_granularity": None},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_modules": None,
    },
}
"""The modes of a text run, as fields of `ModelConfig`."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the ranks of one place in the pipeline.

    Attributes:
        rank: pipeline rank.
        stages: that it holds.
        weights: parameters of each of its stages.
        state: what it keeps between steps.
        activations: the most that the schedule lets it hold of all micro-batches in flight.
        transient: of the peak, what lives for a moment within one forward or backward pass.
        copies: of weights in 8 bits, which are kept within a step.
        in_flight: micro-batches of a stage held at the peak, of all its stages.
    """

    rank: int
    stages: tuple[Stage, ...]
    weights: tuple[tuple[Weight, ...], ...]
    state: State
    activations: int
    transient: int
    in_flight: int
    copies: int = 0

    @property
    def total(self) -> int:
        """State and activations at the peak."""
        return self.state.total + self.copies + self.activations + self.transient


def step_plan(config: RunConfig) -> Plan:
    """The pipeline schedule of a step."""
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
    """Of each data-parallel rank, in a step of the whole batch."""
    micro, batch = config.training.batch_sizes
    return max(1, batch // (micro * config.parallel.data_parallel_size))


def memory(
    config: RunConfig, plan: Plan | None = None, network: Network | None = None
) -> list[RankMemory]:
    """The memory of each pipeline rank.

    Args:
        config: a resolved run; of text with its vocabulary.
        plan: its schedule, where it is at hand.
        network: its model; None for that of a text run.

    Raises:
        ConfigError: see `network_of`.
    """
    network, plan = network or network_of(config), plan or step_plan(config)
    everything = network.stages()
    costs = [network.activations(stage) for stage in everything]
    deferred = [network.deferred(stage) for stage in everything]
    found = []
    for rank in range(network.sizes.pp):
        mine = tuple(stage for stage in everything if stage.rank == rank)
        mine = tuple(sorted(mine, key=lambda stage: stage.chunk))
        lists = tuple(tuple(network.weights(stage)) for stage in mine)
        held, transient, count = walk(
            plan, rank, costs, deferred=deferred, boundary=network.boundary
        )
        found.append(
            RankMemory(
                rank=rank,
                stages=mine,
                weights=lists,
                state=rank_state(config, network.sizes, rank, lists),
                activations=held,
                transient=transient,
                in_flight=count,
                copies=sum(network.copies(stage) for stage in mine),
            )
        )
    return found


def rank_state(
    config: RunConfig,
    sizes: Ranks,
    rank: int,
    chunks: Sequence[Sequence[Weight]],
    *,
    replica: int = 0,
    expert_replica: int = 0,
) -> State:
    """What a rank keeps between steps of all its chunks; see `chunk_state`."""
    total = State()
    for index, chunk in enumerate(chunks):
        trained = sum(x.numel for c in chunks for x in c if not x.frozen)
        size = bucket_size(config, sizes, trained)
        total += chunk_state(
            config,
            sizes,
            chunk,
            size=size if rank == 0 and index == 0 else None,
            replica=replica,
            expert_replica=expert_replica,
        )
    return total


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
        costs: of one micro-batch in each stage of the model.
        deferred: what weight gradients that are put off need, of each stage; only asked for where
            the schedule does so.
        boundary: bytes of a message, whose buffer exists from the receive to its use.

    Returns:
        Bytes held and bytes of the moment at the peak, and the stage activations held there.
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


def with_recomputation(config: RunConfig, mode: str) -> RunConfig:
    """The same run with another mode of `modes_of`."""
    if not config.video.video:
        model = replace(config.model, **RECOMPUTATION[mode])  # type: ignore[arg-type]
        return replace(config, model=model)
    blocks = None if mode == "full" else 0
    if config.video.uses_dit or config.video.streams:
        count = config.model.num_layers or 0
        streaming = replace(config.streaming, recompute_blocks=0 if blocks == 0 else count)
        return replace(config, streaming=streaming)
    mmdit = replace(config.mmdit, recompute_double_blocks=blocks, recompute_single_blocks=blocks)
    return replace(config, mmdit=mmdit)


def modes_of(config: RunConfig) -> list[str]:
    """Modes of recomputation that a plan compares; graphs keep all activations."""
    if config.cuda_graphs.cuda_graph_impl != "none":
        return ["none"]
    return ["none", "full"] if config.video.video else list(RECOMPUTATION)
