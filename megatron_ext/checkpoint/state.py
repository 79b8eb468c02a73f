"""The state of a run under Megatron-LM's keys, cut into shards by megatron-core.

What a checkpoint holds besides the model of a run: other networks, and where a task stands.

What a load gives back.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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

Chunks = list[DistributedDataParallel]
SHARDING = "distrib_optim_sharding_type"
_SCHEDULES = (
    "give the flags of the run that saved it, or `--override-opt-param-scheduler` or "
    "`--use-checkpoint-opt-param-scheduler`"
)


def content_metadata(optimizer: MegatronOptimizer | None, *, reshardable: bool) -> dict[str, Any]:
    """How the state is cut; megatron-core keeps this with the checkpoint and needs it to load.

    Args:
        reshardable: optimizer state that loads in any layout, otherwise in any data-parallel size.
    """
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if is_distributed(optimizer):
        metadata[SHARDING] = "fully_reshardable" if reshardable else "dp_reshardable"
        if reshardable:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def chunk_keys(model: Chunks) -> list[str]:
    """``model``, or ``model0``, ``model1``, … with virtual stages."""
    return ["model"] if len(model) == 1 else [f"model{index}" for index in range(len(model))]


def sharded_state(
    model: Chunks,
    optimizer: MegatronOptimizer | None,
    *,
    metadata: dict[str, Any],
    is_loading: bool,
) -> dict[str, Any]:
    """Sharded tensors of model and optimizer; all ranks call this together."""
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
    """What is the same on all ranks; ``args`` is what Megatron-LM's loader looks at."""
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
    """Put the loaded values where they belong."""
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
    """Decide between the learning rates of the flags and those that groups bring with them.

    megatron-core's schedule reads a group's own rates first, so that those of a checkpoint would
    win over `--override-opt-param-scheduler`.

    Args:
        groups: as they were loaded.
        rates: of the flags, for each group.
        scheduler: whose flags decide.

    Raises:
        CheckpointError: rates of their own differ, and no flag says which ones count.
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


CRITIC = "critic"
"""Begins the names of the weights of a network that judges the model of the run."""


class ExtraState(Protocol):
    """Adds its own keys to the state of a run; all ranks call each method together."""

    def state_to_save(self, metadata: dict[str, Any], *, with_optimizer: bool) -> dict[str, Any]:
        """Sharded and common state, under keys that no run of Megatron-LM has.

        Args:
            metadata: how megatron-core is to cut sharded state.
            with_optimizer: moments and schedules are wanted too.
        """

    def state_to_load(
        self, path: Path, metadata: dict[str, Any], *, with_optimizer: bool
    ) -> dict[str, Any]:
        """What is asked of a checkpoint; arguments as of `state_to_save`.

        Raises:
            CheckpointError: the checkpoint does not fit.
        """

    def load(self, loaded: dict[str, Any], *, with_optimizer: bool, notes: list[str]) -> None:
        """Take over what was read.

        Args:
            loaded: whole state, in which the entries of `state_to_load` are filled in.
            with_optimizer: as it was given to `state_to_load`.
            notes: gets a sentence about whatever starts anew.
        """


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded besides weights and optimizer.

    Attributes:
        iteration: training steps done; 0 with ``--finetune``.
        progress: the counters that were saved.
        run_config: the configuration of the run that saved.
        path: the folder.
        notes: what was not loaded, and why.
    """

    iteration: int
    progress: dict[str, Any]
    run_config: dict[str, Any]
    path: Path
    notes: list[str] = field(default_factory=list)
