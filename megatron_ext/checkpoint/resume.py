"""States of all random generators, one for each model-parallel rank.

What of a checkpoint, besides its weights, is there, fits, and is asked for.
"""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron_ext.checkpoint.changes import check_changes
from megatron_ext.checkpoint.compatibility import check_optimizer, same_model_ranks
from megatron_ext.checkpoint.files import checksum_fault, read_manifest
from megatron_ext.checkpoint.stored import RUN_CONFIG, CheckpointRef, find, read_json, refusal
from megatron_ext.checkpoint.unpickling import common_state_of
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout

if TYPE_CHECKING:
    from megatron_ext.config.checkpoint import CheckpointConfig
    from megatron_ext.config.run import RunConfig


def random_state(context: ParallelContext, *, every_replica: bool = False) -> ShardedObject:
    """This rank's states, under Megatron-LM's key; all ranks call this together.

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


def why_states_do_not_fit(path: Path, arguments: Namespace, layout: Layout) -> str | None:
    """Why a run cannot go on with the states of a checkpoint, kept for each model-parallel rank.

    Args:
        path: the checkpoint.
        arguments: of the run that saved it.
        layout: of this run.

    Returns:
        A sentence, None if they fit.
    """
    if getattr(arguments, "no_save_rng", False):
        return f"{path} holds no random states, so they start from `--seed`."
    same = same_model_ranks(arguments, layout)
    apart = getattr(arguments, "data_parallel_random_init", False)
    if layout.expert_model_parallel_size > 1 or apart:
        same = same and getattr(arguments, "data_parallel_size", None) == layout.data_parallel_size
    return None if same else "The layout has changed, so the random states start from `--seed`."


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


def check_resume(config: RunConfig) -> None:
    """Compare a run with the checkpoint that it loads, as far as that needs no model.

    Ranks compare all of it again, and weights too. Every rank may call this by itself.

    Args:
        config: the resolved configuration of the run.

    Raises:
        CheckpointError: flags of the model, or optimizer state, that do not go with the run's.
    """
    found = find(config.checkpoint)
    if found is None:
        return
    path = found.path
    files = read_manifest(path) or {}
    small = [name for name in (COMMON_STATE_FNAME, RUN_CONFIG) if name in files]
    fault = checksum_fault(path, files, small)
    if fault is not None:
        raise CheckpointError(refusal(found.root, found.iteration, fault))
    common = common_state_of(path)
    arguments = common.get("args", Namespace())
    trains = not config.training.skip_train
    goes_on = trains and loads_optimizer(found, config.checkpoint, arguments, [])
    check_changes(
        path,
        config,
        read_json(path / RUN_CONFIG),
        weights_only=found.weights_only,
        with_optimizer=goes_on,
    )
    if goes_on:
        check_optimizer(
            path,
            dict(common.get("content_metadata") or {}),
            arguments,
            Layout.from_config(config.parallel),
            distributed=config.optimizer.use_distributed_optimizer,
            has_main_weights=config.precision.bf16 or config.precision.fp16,
        )


def loads_optimizer(
    found: CheckpointRef, config: CheckpointConfig, arguments: Namespace, notes: list[str]
) -> bool:
    """Whether the optimizer is wanted and there.

    Args:
        found: the checkpoint.
        config: of the run that loads.
        arguments: of the run that saved.
        notes: gets a sentence where the optimizer starts anew.
    """
    if found.weights_only or config.no_load_optim:
        return False
    if getattr(arguments, "no_save_optim", False):
        notes.append(f"{found.path} holds no optimizer, so it starts anew.")
        return False
    return True


def loads_random(
    found: CheckpointRef,
    config: CheckpointConfig,
    arguments: Namespace,
    layout: Layout,
    notes: list[str],
) -> bool:
    """Whether the random states are wanted, there, and fit a layout; arguments as above."""
    if found.weights_only or config.no_load_rng:
        return False
    note = why_states_do_not_fit(found.path, arguments, layout)
    notes += [] if note is None else [note]
    return note is None
