"""One rank of a world of any size, in which messages arrive at once and empty.

A stage is built and run as on this rank of the real world: its parameters and what autograd keeps
have the sizes of the real ones, and only values are wrong that other ranks would have sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.config.run import RunConfig
from megatron_ext.parallel.context import (
    ParallelContext,
    _checked_context,
    destroy_groups,
    embedding_ranks,
    seed_everything,
)
from megatron_ext.parallel.grid import Layout
from megatron_ext.parallel.recorder import Recorder


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
