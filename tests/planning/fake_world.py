"""One rank of a world of any size, in which messages arrive at once and empty.

A stage is built and run as on this rank of the real world: its parameters and what autograd keeps
have the sizes of the real ones, and only values are wrong that other ranks would have sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.config.run import RunConfig
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import (
    ParallelContext,
    _checked_context,
    destroy_groups,
    embedding_ranks,
    seed_everything,
)
from megatron_ext.parallel.grid import Layout
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.planning.network import Network
from megatron_ext.planning.stages import Ranks
from megatron_ext.planning.state import ROUTED, Weight


def built(task: Any, config: RunConfig, pp_rank: int) -> list[Any]:
    """Return the model chunks of the first rank of a pipeline stage, as they are on that rank."""
    context = enter_fake_world(config, pp_rank)
    transformer_config = build_transformer_config(config)
    chunks = build_chunks(task.model_chunk, config, transformer_config, context)
    dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
    return [chunk.to(dtype) for chunk in chunks]


def check_weights(task: Any, network: Network) -> None:
    """Check that the planned weights of every stage are the parameters of its module."""
    for pp_rank in range(network.sizes.pp):
        chunks = built(task, network.config, pp_rank)
        for chunk, stage in zip(chunks, network.stages_of(pp_rank), strict=True):
            found = [_weight(network.sizes, *each) for each in chunk.named_parameters()]
            planned = [replace(x, fp8=False, matrix=None) for x in network.weights(stage)]
            assert planned == found


def _weight(x: Ranks, name: str, parameter: Any) -> Weight:
    """Return what the plan should say of a parameter, without formats and Muon."""
    expert = not getattr(parameter, "allreduce", True)
    parts = 1
    if parameter.tensor_model_parallel:
        parts = x.etp if ROUTED in name else x.tp
    return Weight(
        name,
        parameter.numel(),
        parts=parts * (x.ep if ROUTED in name else 1),
        expert=expert,
        shared=getattr(parameter, "shared_embedding", False),
        frozen=not parameter.requires_grad,
    )


def enter_fake_world(config: RunConfig, pp_rank: int) -> ParallelContext:
    """Leave all groups, and return the first rank of a pipeline stage in the layout of a run."""
    destroy_groups()
    layout = Layout.from_config(config.parallel)
    ranks = range(layout.world_size)
    rank = next(rank for rank in ranks if layout.position(rank)["pp"] == pp_rank)
    torch.distributed.init_process_group(
        "fake",
        store=FakeStore(),  # type: ignore[no-untyped-call]
        rank=rank,
        world_size=layout.world_size,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        order=layout.order,
        get_embedding_ranks=embedding_ranks(config.model, config.parallel),
        create_gloo_process_groups=False,
    )
    context = _checked_context(layout, timedelta(seconds=60), Recorder())
    seed_everything(context, config.training.seed)
    return context


@contextmanager
def kept(parameters: Sequence[Tensor]) -> Iterator[dict[int, Any]]:
    """Collect the storages that autograd keeps of operations within, without the parameters'."""
    own = {parameter.untyped_storage()._cdata for parameter in parameters}
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages
