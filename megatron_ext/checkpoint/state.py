"""The state of a run under Megatron-LM's keys, cut into shards by megatron-core.

It holds model, optimizer, schedule and random generators. A task may add state of its own
(`ExtraState`), such as other networks.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from megatron_ext.checkpoint.optimizer_state import (
    counted,
    is_decoupled,
    is_distributed,
    leave_out_nothing,
    load_optimizer,
    mend_padded_buckets,
    prime,
)
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext

Chunks = list[DistributedDataParallel]
CRITIC = "critic"
"""Begins the names of a second network, which judges the model of the run."""
SHARDING = "distrib_optim_sharding_type"
_SCHEDULES = (
    "give the flags of the run that saved it, or `--override-opt-param-scheduler` or "
    "`--use-checkpoint-opt-param-scheduler`"
)


def content_metadata(optimizer: MegatronOptimizer | None, *, reshardable: bool) -> dict[str, Any]:
    """Return how the state is cut; megatron-core stores this and needs it to load.

    Args:
        reshardable: make the optimizer state load in any layout, otherwise only in any
            data-parallel size.
    """
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if is_distributed(optimizer):
        metadata[SHARDING] = "fully_reshardable" if reshardable else "dp_reshardable"
        if reshardable:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def chunk_keys(model: Chunks) -> list[str]:
    """Return ``model``, or ``model0``, ``model1``, … with virtual stages."""
    return ["model"] if len(model) == 1 else [f"model{index}" for index in range(len(model))]


def sharded_state(
    model: Chunks,
    optimizer: MegatronOptimizer | None,
    *,
    metadata: dict[str, Any],
    is_loading: bool,
) -> dict[str, Any]:
    """Return the sharded tensors of model and optimizer; all ranks call this together."""
    state: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=metadata)
        for key, chunk in zip(chunk_keys(model), unwrap_model(model), strict=True)
    }
    if optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False):
        prime(optimizer)
        with counted(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(
                state, is_loading=is_loading, metadata=metadata
            )
        leave_out_nothing(state["optimizer"])
        if is_distributed(optimizer) and not is_loading:
            mend_padded_buckets(optimizer, state["optimizer"])
    return state


def common_state(
    iteration: int, progress: dict[str, Any], run_config: dict[str, Any]
) -> dict[str, Any]:
    """Return the state that all ranks share; Megatron-LM's loader looks at its ``args``."""
    flat: dict[str, Any] = {}
    for section in run_config.values():
        if isinstance(section, dict):
            flat.update(section)
    flat.update(progress)
    return {
        "args": argparse.Namespace(**flat),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": progress.get("floating_point_operations", 0.0),
    }


def apply_state(
    loaded: dict[str, Any],
    model: Chunks,
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *,
    with_optimizer: bool,
) -> None:
    """Put loaded values into model, optimizer and schedule."""
    for key, chunk in zip(chunk_keys(model), model, strict=True):
        # An empty pipeline stage has nothing to load.
        if key in loaded:
            chunk.load_state_dict(loaded[key])
    if optimizer is None:
        return
    if not with_optimizer:
        # The fp32 copies follow the loaded weights.
        optimizer.reload_model_params()
        return
    if not getattr(optimizer, "is_stub_optimizer", False):
        rates = [
            {key: group[key] for key in ("max_lr", "min_lr")} for group in optimizer.param_groups
        ]
        load_optimizer(optimizer, loaded["optimizer"])
        if scheduler is not None:
            _settle_rates(optimizer.param_groups, rates, scheduler)
    if scheduler is not None and "opt_param_scheduler" in loaded:
        _load_schedule(scheduler, loaded["opt_param_scheduler"])


def _settle_rates(
    groups: list[dict[str, Any]],
    rates: list[dict[str, float]],
    scheduler: OptimizerParamScheduler,
) -> None:
    """Decide between the learning rates of the flags and those that loaded groups bring along.

    megatron-core's schedule reads a group's own rates first, so that a checkpoint's rates would win
    over `--override-opt-param-scheduler`.

    Args:
        groups: parameter groups as they were loaded.
        rates: learning rates of the flags, for each group.
        scheduler: says which of the two count.
    """
    for group, own in zip(groups, rates, strict=True):
        if scheduler.override_opt_param_scheduler:
            group.update(own)
        theirs = {key: group.setdefault(key, rate) for key, rate in own.items()}
        if scheduler.use_checkpoint_opt_param_scheduler or not is_decoupled(group):
            continue
        for key, name in (("max_lr", "--decoupled-lr"), ("min_lr", "--decoupled-min-lr")):
            if theirs[key] != own[key]:
                raise CheckpointError(
                    f"`{name}` ({own[key]}) is not the checkpoint's ({theirs[key]}); {_SCHEDULES}."
                )


def _load_schedule(scheduler: OptimizerParamScheduler, state: dict[str, Any]) -> None:
    try:
        scheduler.load_state_dict(state)
    except AssertionError as error:
        raise CheckpointError(
            f"The learning-rate schedule is not the checkpoint's ({error}); {_SCHEDULES}."
        ) from error
    # megatron-core has set rates and decay before it read the decay of the checkpoint.
    scheduler.step(0)


def random_state(context: ParallelContext, *, every_replica: bool = False) -> ShardedObject:
    """Return the states of this rank's generators under Megatron-LM's key.

    All ranks call this together.

    Args:
        every_replica: keep the states of all data-parallel ranks, which differ only after
            ``--data-parallel-random-init``.
    """
    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    states: list[Any] = [own]
    if every_replica:
        states = [None] * context.pgs.dp.size()
        torch.distributed.all_gather_object(states, own, group=context.pgs.dp)
    layout = context.layout
    sizes: tuple[int, ...] = (
        layout.pipeline_model_parallel_size,
        layout.tensor_model_parallel_size,
    )
    ranks: tuple[int, ...] = (context.pp_rank, context.tp_rank)
    replica = context.pgs.dp_cp.rank()
    if layout.expert_model_parallel_size > 1:
        # Experts differ between data-parallel ranks, and so do their states.
        sizes, ranks = (*sizes, context.pgs.dp_cp.size()), (*ranks, replica)
        replica = 0
    return ShardedObject("rng_state", states, sizes, ranks, replica_id=replica)


def restore_random_state(context: ParallelContext, states: list[dict[str, Any]]) -> None:
    """Set the generators to what `random_state` stored."""
    state = states[context.dp_rank] if len(states) > 1 else states[0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graph_safe = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name: tensor_parallel.convert_cuda_rng_state(value, to_graphable=graph_safe)
            for name, value in state["rng_tracker_states"].items()
        }
    )


class ExtraState(Protocol):
    """State that a task adds to that of a run; all ranks call each method together."""

    def state_to_save(self, metadata: dict[str, Any], *, with_optimizer: bool) -> dict[str, Any]:
        """Return sharded and common state, under keys that no run of Megatron-LM has.

        Args:
            metadata: tells megatron-core how to cut sharded state.
            with_optimizer: moments and schedules are saved too.
        """

    def state_to_load(
        self, path: Path, metadata: dict[str, Any], *, with_optimizer: bool
    ) -> dict[str, Any]:
        """Return the state that a checkpoint shall fill; see `state_to_save`.

        Raises:
            CheckpointError: the checkpoint does not fit.
        """

    def load(self, loaded: dict[str, Any], *, with_optimizer: bool, notes: list[str]) -> None:
        """Take over loaded state.

        Args:
            loaded: the whole state, in which the entries of `state_to_load` are filled in.
            notes: gets a sentence about everything that starts anew.
        """


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of a load besides weights and optimizer.

    Attributes:
        iteration: training steps done; 0 with ``--finetune``.
        progress: the counters that were saved.
        run_config: the configuration of the run that saved.
        path: folder of the checkpoint.
        notes: sentences about what was not loaded, and why.
    """

    iteration: int
    progress: dict[str, Any]
    run_config: dict[str, Any]
    path: Path
    notes: list[str] = field(default_factory=list)
