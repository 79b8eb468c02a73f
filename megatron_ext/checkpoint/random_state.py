"""States of all random generators, one for each model-parallel rank."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject

from megatron_ext.checkpoint.fit import same_model_ranks
from megatron_ext.layout import Layout, ParallelContext


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
