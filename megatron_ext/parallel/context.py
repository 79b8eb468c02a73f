"""The process groups and seeds of a layout; no other file reads core's ``parallel_state``."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import cached_property

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.rules.parallel import mtp_stage
from megatron_ext.device import Device
from megatron_ext.device.streams import destroy_graphs
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.grid import Layout, Placement, groups_of
from megatron_ext.parallel.recorder import Recorder


@dataclass(frozen=True)
class ParallelContext:
    """This rank's position in the grid, and the process groups that it belongs to.

    Attributes:
        pipeline_channels: two groups, for messages to higher and to lower pipeline ranks.
        recorder: records what this rank does; the default one does not write to the `Board`.
    """

    layout: Layout
    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    cp_rank: int
    pgs: ProcessGroupCollection
    pipeline_channels: tuple[ProcessGroup, ProcessGroup]
    recorder: Recorder = field(default_factory=Recorder, compare=False)

    @cached_property
    def pipeline_ranks(self) -> list[int]:
        """Return the ranks of this rank's pipeline, in the order of their stages."""
        return torch.distributed.get_process_group_ranks(self.pgs.pp)

    @cached_property
    def placement(self) -> Placement:
        """Return the mapping of stages to pipeline ranks and chunks."""
        return self.layout.placement

    @cached_property
    def last_stage_pp_rank(self) -> int:
        """Return the pipeline rank that holds the last stage, where the loss is computed."""
        return self.placement.rank_of(self.placement.num_stages - 1)

    @cached_property
    def is_first_stage(self) -> bool:
        """Return whether this rank holds the first stage, with the embedding."""
        return self.pp_rank == self.placement.rank_of(0)

    @cached_property
    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last stage, with the loss."""
        return self.pp_rank == self.last_stage_pp_rank

    @cached_property
    def reporting_rank(self) -> int:
        """Return the rank that prints and logs: the highest rank with the last stage."""
        sizes = self.layout.sizes()
        highest = {axis: size - 1 for axis, size in sizes.items()}
        return self.layout.rank_at({**highest, "pp": self.last_stage_pp_rank})

    @cached_property
    def is_reporting_rank(self) -> bool:
        """Return whether this rank prints and logs for the run."""
        return self.rank == self.reporting_rank

    def abort(self) -> None:
        """Abort NCCL's communication at once, when this rank ends because of an error.

        Otherwise NCCL would wait for other ranks, which may have ended. Gloo does not wait, so for
        it nothing is done.
        """
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
            torch.distributed.distributed_c10d._abort_process_group()

    def destroy(self) -> None:
        """Destroy the CUDA graphs and all process groups; afterwards new groups may be created."""
        destroy_graphs()
        destroy_groups()


INIT_METHOD = "MEGATRON_EXT_INIT_METHOD"
"""Environment variable with the rendezvous address of ranks that the launcher has forked."""


def forked_by_launcher() -> bool:
    """Return whether this process is a forked rank, which ends with its run."""
    return INIT_METHOD in os.environ


def destroy_groups() -> None:
    """Destroy the process groups of `init_groups`, even if it failed after creating only some."""
    parallel_state.destroy_model_parallel()
    # megatron-core does not destroy these two. A rank that is forked later would wait for their
    # threads.
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class NoAnswer(Enum):
    """How contact with another rank failed: timeout or lost connection; the values are messages."""

    TIMEOUT = (
        "waited in vain for another rank until `--distributed-timeout-minutes` were over; look at "
        "what the ranks that say nothing do"
    )
    LOST = "lost its connection to another rank, which has ended"


def contact_fault(error: BaseException) -> NoAnswer | None:
    """Return how contact with another rank failed; None if the error has another cause.

    Gloo raises a plain RuntimeError, so its text decides. Texts that name too many open files or
    a lack of memory in this process count as another cause.
    """
    text = str(error)
    if "Too many open files" in text or "Cannot allocate memory" in text:
        return None
    if isinstance(error, torch.distributed.DistStoreError) and "timeout" in text:
        return NoAnswer.TIMEOUT
    if not isinstance(error, RuntimeError) or "gloo/transport" not in text:
        return None
    return NoAnswer.TIMEOUT if "imed out" in text or "timeout" in text else NoAnswer.LOST


def mtp_rank(model: ModelConfig, parallel: ParallelConfig) -> int | None:
    """Return the pipeline rank that holds multi-token prediction; None if the model has none."""
    if not model.mtp_num_layers:
        return None
    return Layout.from_config(parallel).placement.rank_of(mtp_stage(parallel))


def embedding_ranks(
    model: ModelConfig, parallel: ParallelConfig
) -> Callable[[list[int]], list[int]]:
    """Return a function that selects the ranks with the word embedding from a pipeline's ranks.

    These are the first rank, the last one if the output layer is tied, and the rank with
    multi-token prediction.
    """
    last = None if model.untie_embeddings_and_output_weights else -1
    places = [x for x in (0, last, mtp_rank(model, parallel)) if x is not None]
    return lambda pp_ranks: sorted({pp_ranks[place] for place in places})


def init_groups(
    layout: Layout,
    device: Device,
    *,
    timeout_minutes: float = 10,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    init_method: str | None = None,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    recorder: Recorder | None = None,
) -> ParallelContext:
    """Create the process groups of a layout and check them against the grid.

    All ranks call this together. Unless `torch.distributed` is initialized already, this is done
    first, with RANK and WORLD_SIZE from the environment. If an error is raised, all groups are
    destroyed first.

    Args:
        get_embedding_ranks: selects, from a pipeline's ranks, those with the word embedding; None
            selects the first and the last.
        init_method: rendezvous address such as ``file:///path``; None takes it from
            MEGATRON_EXT_INIT_METHOD, else MASTER_ADDR and MASTER_PORT. A single rank needs none.
        hierarchical_context_parallel_sizes: sizes of the inner (a2a) and outer (p2p) groups of
            ``--cp-comm-type a2a+p2p``, else None.
        recorder: records what this rank does; None creates one that does not write to a `Board`.

    Raises:
        ConfigError: the number of started ranks differs from the layout's, or a group of
            megatron-core differs from the grid's.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if not torch.distributed.is_initialized():
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        address = init_method or os.environ.get(INIT_METHOD, "env://")
        # A single rank needs no rendezvous: a store in its own memory is enough.
        alone = world_size == 1 and init_method is None
        torch.distributed.init_process_group(
            device.backend,
            init_method=None if alone else address,
            store=torch.distributed.HashStore() if alone else None,  # type: ignore[attr-defined]
            rank=int(os.environ.get("RANK", "0")),
            world_size=world_size,
            timeout=timeout,
        )
    try:
        started = torch.distributed.get_world_size()
        if started != layout.world_size:
            raise ConfigError(
                f"The layout needs {layout.world_size} ranks, but {started} were started; start "
                f"{layout.world_size}."
            )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
            distributed_timeout_minutes=timeout_minutes,
            order=layout.order,
            get_embedding_ranks=get_embedding_ranks,
            # Those are copies of other groups over host memory, which nothing uses.
            create_gloo_process_groups=False,
        )
        context = _checked_context(layout, timeout, recorder or Recorder())
        if device.backend == "gloo":
            # Gloo's connections are complete on this rank, perhaps not yet on others, to whom this
            # rank would be lost if it ended now.
            torch.distributed.barrier()
        return context
    except BaseException:
        destroy_groups()
        raise


def pipeline_channels(
    layout: Layout, pipeline: ProcessGroup, timeout: timedelta
) -> tuple[ProcessGroup, ProcessGroup]:
    """Create this rank's groups for messages to higher and to lower ranks of its pipeline.

    All ranks call this together. A pipeline of size 1 sends no messages; both groups are then
    ``pipeline``.
    """
    if layout.pipeline_model_parallel_size == 1:
        return pipeline, pipeline
    mine = []
    rank = torch.distributed.get_rank()
    for ranks in layout.groups("pp"):
        # Every rank must create all groups, in the same order, even those that it is not in.
        pair = [torch.distributed.new_group(ranks, timeout=timeout) for _ in range(2)]
        if rank in ranks:
            mine = pair
    return mine[0], mine[1]


def _checked_context(layout: Layout, timeout: timedelta, recorder: Recorder) -> ParallelContext:
    """Return the context with megatron-core's groups, after checking the ranks of each.

    Raises:
        ConfigError: a group's ranks are not those of the grid, which would change the training.
    """
    pgs = ProcessGroupCollection.use_mpu_process_groups()
    context = ParallelContext(
        layout=layout,
        rank=torch.distributed.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pgs=pgs,
        pipeline_channels=pipeline_channels(layout, pgs.pp, timeout),
        recorder=recorder,
    )
    recorder.place(context.rank, layout.world_size, context.pp_rank)
    checks = {"tp": pgs.tp, "pp": pgs.pp, "cp": pgs.cp, "dp": pgs.dp, "dp-cp": pgs.dp_cp}
    for axes, group in checks.items():
        mine = layout.group_of(context.rank, axes)
        theirs = torch.distributed.get_process_group_ranks(group)
        if sorted(theirs) != mine:
            raise ConfigError(
                f"The {axes} group of rank {context.rank} is {theirs} in megatron-core, but "
                f"{mine} in the grid; this version of megatron-core is not supported."
            )
    return context


def seed_everything(
    context: ParallelContext, seed: int, *, data_parallel_random_init: bool = False
) -> None:
    """Seed all random generators as Megatron-LM does.

    Pipeline stages get different seeds. Data-parallel replicas get the same seed, unless
    ``data_parallel_random_init`` is true.
    """
    seed += 100 * context.pp_rank
    if data_parallel_random_init:
        seed += 10 * context.dp_rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def secondary_groups(
    layout: Layout, *, timeout_minutes: float = 10, recorder: Recorder | None = None
) -> ParallelContext:
    """Create the groups of a second layout, for a network with other parallel sizes.

    All ranks of the run call this together. megatron-core's ``parallel_state`` keeps the groups of
    the first layout, so the modules of the network must be given the new groups. No expert groups
    are created. For ``recorder`` see `init_groups`.
    """
    timeout = timedelta(minutes=timeout_minutes)
    groups = {axes: own_group(layout.groups(axes), timeout) for axes in ("tp", "cp", "pp", "dp")}
    whole_replicas = groups["dp"]
    if layout.context_parallel_size > 1:
        whole_replicas = own_group(layout.groups("dp-cp"), timeout)
    rank = torch.distributed.get_rank()
    position = layout.position(rank)
    return ParallelContext(
        layout=layout,
        rank=rank,
        **{f"{axis}_rank": position[axis] for axis in groups},
        pgs=ProcessGroupCollection(**groups, dp_cp=whole_replicas),
        pipeline_channels=pipeline_channels(layout, groups["pp"], timeout),
        recorder=recorder or Recorder(),
    )


def peers(step: int, block: int, world_size: int, *, timeout_minutes: float = 10) -> ProcessGroup:
    """Create groups of every ``step``-th rank within each block, and return this rank's group.

    A block is ``block`` consecutive ranks. For example, with ``step`` 2 and ``block`` 8, rank 1 is
    in the group 1, 3, 5, 7. ``block`` must be a multiple of ``step`` and divide ``world_size``. All
    ranks of the run call this together.
    """
    sizes = {"place": step, "stretch": block // step, "block": world_size // block}
    ranks = groups_of(("place", "stretch", "block"), sizes, {"stretch"})
    return own_group(ranks, timedelta(minutes=timeout_minutes))


def own_group(
    groups: list[list[int]], timeout: timedelta, backend: str | None = None
) -> ProcessGroup:
    """Create all groups of ``groups``, and return the one that contains this rank."""
    own: ProcessGroup
    own, _ = torch.distributed.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        groups, timeout=timeout, backend=backend
    )
    return own
