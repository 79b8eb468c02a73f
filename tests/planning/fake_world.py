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
from unittest import mock

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.config.run import RunConfig
from megatron_ext.layers import frozen
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim import builder
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.parallel.context import (
    ParallelContext,
    _checked_context,
    destroy_groups,
    embedding_ranks,
    seed_everything,
)
from megatron_ext.parallel.grid import Layout
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.planning.memory import memory
from megatron_ext.planning.network import Network
from megatron_ext.planning.stages import Ranks
from megatron_ext.planning.state import rank_state
from megatron_ext.planning.weights import ROUTED, Weight
from tests.planning.measure import KINDS, plain, state_bytes


def built(task: Any, config: RunConfig, context: ParallelContext) -> tuple[list[Any], Any]:
    """Return the model chunks of a rank, and the TransformerConfig that they share."""
    transformer_config = build_transformer_config(config)
    # The ranks that have the other parts are not there.
    with mock.patch.object(frozen, "check_found"):
        chunks = build_chunks(task.model_chunk, config, transformer_config, context)
    return chunks, transformer_config


def check_state(task: Any, network: Network) -> None:
    """Check the planned weights and state of the first and the last rank of every stage."""
    config = network.config
    layout = Layout.from_config(config.parallel)
    planned = memory(network)
    for pp_rank in range(network.sizes.pp):
        ranks = [r for r in range(layout.world_size) if layout.position(r)["pp"] == pp_rank]
        for rank in {ranks[0], ranks[-1]}:
            context = enter_fake_world(config, rank)
            chunks, transformer_config = built(task, config, context)
            for chunk, weights in zip(chunks, planned[pp_rank].weights, strict=True):
                found = [_weight(network.sizes, *each) for each in chunk.named_parameters()]
                assert [replace(x, fp8=False, matrix=None) for x in weights] == found
            device = torch.device("cpu")
            wrapped = wrap_chunks(chunks, config, transformer_config, context, device)
            state = _state_after_a_step(config, wrapped, context)
            replicas = {
                "replica": context.pgs.dp_cp.rank(),
                "expert_replica": context.pgs.expt_dp.rank(),
            }
            held = rank_state(config, network.sizes, pp_rank, planned[pp_rank].weights, **replicas)
            assert {kind: getattr(held, kind) for kind in KINDS} == state


def _state_after_a_step(
    config: RunConfig, chunks: list[Any], context: ParallelContext
) -> dict[str, int]:
    """Return the bytes that a rank keeps once its optimizer has made its state."""
    optimizer = builder.build_optimizer(config, chunks, context.pgs)
    ema = ShardedEMA(chunks, optimizer, decay=0.5) if config.ema.ema_decay else None
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    return state_bytes(chunks, optimizer, ema)


def _weight(x: Ranks, name: str, parameter: Any) -> Weight:
    """Return what the plan should say of a parameter, without formats and Muon."""
    expert = not getattr(parameter, "allreduce", True)
    parts = 1
    if parameter.tensor_model_parallel:
        parts = x.etp if ROUTED in name else x.tp
    return Weight(
        plain(name),
        parameter.numel(),
        parts=parts * (x.ep if ROUTED in name else 1),
        expert=expert,
        shared=getattr(parameter, "shared_embedding", False),
        frozen=not parameter.requires_grad,
    )


def enter_fake_world(config: RunConfig, rank: int) -> ParallelContext:
    """Leave all groups, and become ``rank`` in the layout of a run."""
    destroy_groups()
    layout = Layout.from_config(config.parallel)
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
