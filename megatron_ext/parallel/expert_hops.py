"""The process groups through which tokens reach their experts in two hops."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError
from megatron_ext.parallel.collectives import largest_of_all_ranks
from megatron_ext.parallel.context import ParallelContext, own_group


@dataclass(frozen=True)
class ExpertHops:
    """The groups of the two hops of a rank.

    The expert-parallel ranks of a node are numbered by their place in the node.

    Attributes:
        between: the ranks with this rank's place on all nodes; None if one node has all experts.
        inside: the expert-parallel ranks on this rank's node; None if there is only this rank.
    """

    between: ProcessGroup | None
    inside: ProcessGroup | None


def expert_hops(
    context: ParallelContext, ranks_per_node: int, *, timeout_minutes: float = 10
) -> ExpertHops:
    """Create the groups that join the expert-parallel ranks between nodes and inside each node.

    All ranks of the run call this together. ``ranks_per_node`` is the number of ranks on each node.
    No group is created if one hop is enough: the expert-parallel group serves it.

    Raises:
        ConfigError: the ranks disagree about ``ranks_per_node``.
    """
    _check_agreed(ranks_per_node)
    layout = context.layout
    size = layout.experts_in_node(ranks_per_node)
    whole = layout.expert_model_parallel_size
    if size == whole:
        return ExpertHops(None, context.pgs.ep)
    if size == 1:
        return ExpertHops(context.pgs.ep, None)
    timeout = timedelta(minutes=timeout_minutes)
    groups = layout.expert_groups("ep")
    between = [ranks[place::size] for ranks in groups for place in range(size)]
    inside = [ranks[first : first + size] for ranks in groups for first in range(0, whole, size)]
    return ExpertHops(own_group(between, timeout), own_group(inside, timeout))


def _check_agreed(ranks_per_node: int) -> None:
    """Raise a ConfigError if the ranks of the run have different values."""
    most, least_negated = largest_of_all_ranks([ranks_per_node, -ranks_per_node])
    least = -least_negated
    if least != most:
        raise ConfigError.about(
            "--moe-ranks-per-node",
            None,
            f"must be the same on every rank, but nodes have {least} to {most} ranks",
            "give a number that divides those of all nodes",
        )
