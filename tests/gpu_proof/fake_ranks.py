"""One rank of a group whose other ranks do not exist: collectives return at once, with shapes only.

The groups are torch's "fake" backend, also where megatron-core asks for gloo. Every group of a
layout can be made that way, so that a step of one of its ranks runs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._meta_registrations import create_fakework
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.config.run import RunConfig
from megatron_ext.device import select
from megatron_ext.parallel.context import (
    ParallelContext,
    embedding_ranks,
    init_groups,
    seed_everything,
)
from megatron_ext.parallel.grid import Layout

_WITHOUT_SHAPES = (
    "allreduce_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)
"""Collectives for which torch knows no result on fake tensors."""
_library = torch.library.Library("c10d", "IMPL")


def _same_from_all(found: list[Any], own: Any, group: Any = None) -> None:
    """Stands in for `all_gather_object`: every rank has sent what this one sends."""
    del group
    found[:] = [own] * len(found)


def _fake_group(*args: Any, _original: Any = dist.new_group, **kwargs: Any) -> Any:
    """Stands in for `new_group`, whatever backend is asked for."""
    return _original(*args, **{**kwargs, "backend": "fake"})


def install() -> None:
    """Replace the collectives of Python objects, and register shapes that torch lacks."""
    for module in (dist, distributed_c10d):
        module.new_group = _fake_group  # type: ignore[assignment]
        module.all_gather_object = _same_from_all  # type: ignore[assignment]
    for name in _WITHOUT_SHAPES:
        _library.impl(name, lambda *args: create_fakework(args, return_first_arg=False), "Meta")


@contextmanager
def one_rank_of(config: RunConfig, rank: int = 0) -> Iterator[ParallelContext]:
    """Yield the context of a rank in the layout of a run; there are no other ranks."""
    layout = Layout.from_config(config.parallel)
    size = layout.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    chooser = embedding_ranks(config.model, config.parallel)
    context = init_groups(layout, select(), get_embedding_ranks=chooser)
    try:
        seed_everything(context, config.training.seed)
        yield context
    finally:
        context.destroy()
