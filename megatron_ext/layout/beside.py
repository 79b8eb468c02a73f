"""Groups of a second layout on the ranks of a run, for a network that lies otherwise."""

from __future__ import annotations

from datetime import timedelta

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from megatron_ext.layout.context import ParallelContext, pipeline_channels
from megatron_ext.layout.grid import Layout, groups_of


def groups_beside(layout: Layout, *, timeout_minutes: float = 10) -> ParallelContext:
    """Create the groups of a layout beside those of the run, which stay as they are.

    All ranks of the run call this together. megatron-core's ``parallel_state`` keeps the run's
    groups, so that whatever is built on these must be given them; the collection holds tensor-,
    context-, pipeline- and data-parallel groups, and asking it for another raises AttributeError.

    Args:
        layout: of all ranks of the run, with neither experts nor virtual stages.
        timeout_minutes: how long a collective may take.
    """
    timeout = timedelta(minutes=timeout_minutes)
    groups = {axes: _group(layout.groups(axes), timeout) for axes in ("tp", "cp", "pp", "dp")}
    whole_replicas = groups["dp"]
    if layout.context_parallel_size > 1:
        whole_replicas = _group(layout.groups("dp-cp"), timeout)
    position = layout.position(torch.distributed.get_rank())
    return ParallelContext(
        layout=layout,
        rank=torch.distributed.get_rank(),
        tp_rank=position["tp"],
        pp_rank=position["pp"],
        dp_rank=position["dp"],
        cp_rank=position["cp"],
        pgs=ProcessGroupCollection(**groups, dp_cp=whole_replicas),
        pipeline_channels=pipeline_channels(layout, groups["pp"], timeout),
    )


def peers(step: int, block: int, world_size: int, *, timeout_minutes: float = 10) -> ProcessGroup:
    """The ranks at this rank's place in each of the stretches that a block consists of.

    All ranks of the run call this together.

    Args:
        step: consecutive ranks of a stretch.
        block: consecutive ranks of a block, a multiple of ``step``.
        world_size: all ranks, a multiple of ``block``.
        timeout_minutes: how long a collective may take.
    """
    sizes = {"place": step, "stretch": block // step, "block": world_size // block}
    ranks = groups_of(("place", "stretch", "block"), sizes, {"stretch"})
    return _group(ranks, timedelta(minutes=timeout_minutes))


def _group(groups: list[list[int]], timeout: timedelta) -> ProcessGroup:
    """Create all groups of a kind; this rank's."""
    own: ProcessGroup
    own, _ = torch.distributed.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        groups, timeout=timeout
    )
    return own
