"""Groups of a second layout beside those of a run."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup, get_process_group_ranks

from megatron_ext.parallel.context import ParallelContext, peers, secondary_groups
from megatron_ext.parallel.grid import Layout
from tests.ranks import ranks


def members(group: ProcessGroup) -> list[int]:
    return sorted(get_process_group_ranks(group))


def sums(group: ProcessGroup) -> float:
    """Return the sums over the ranks of a group, by a collective."""
    total = torch.tensor(float(torch.distributed.get_rank()))
    torch.distributed.all_reduce(total, group=group)
    return float(total)


@ranks(tp=2, dp=2)
def test_a_second_layout_has_its_own_groups_of_consecutive_ranks(context: ParallelContext) -> None:
    run = {axes: members(getattr(context.pgs, axes)) for axes in ("tp", "cp", "pp", "dp", "dp_cp")}
    rank = context.rank
    other = secondary_groups(Layout(4, 1, 2, use_tp_pp_dp_mapping=True))
    wanted = {
        "tp": [rank],
        "cp": [rank],
        "pp": [rank // 2 * 2, rank // 2 * 2 + 1],
        "dp": [rank % 2, rank % 2 + 2],
        "dp_cp": [rank % 2, rank % 2 + 2],
    }
    for axes, group in wanted.items():
        assert members(getattr(other.pgs, axes)) == group, axes
        assert sums(getattr(other.pgs, axes)) == sum(group), axes
    assert [members(group) for group in other.pipeline_channels] == [wanted["pp"]] * 2
    assert (other.rank, other.tp_rank, other.pp_rank) == (rank, 0, rank % 2)
    assert (other.dp_rank, other.cp_rank) == (rank // 2, 0)
    # Those of the run are what they were.
    assert {axes: members(getattr(context.pgs, axes)) for axes in run} == run
    assert members(parallel_state.get_tensor_model_parallel_group()) == run["tp"]
    assert members(parallel_state.get_data_parallel_group()) == run["dp"]
    assert sums(context.pgs.tp) == sum(run["tp"]) and sums(context.pgs.dp) == sum(run["dp"])


@ranks(cp=2, dp=2)
def test_replicas_of_a_second_layout_with_context_parallelism(context: ParallelContext) -> None:
    other = secondary_groups(Layout(4, context_parallel_size=2))
    assert members(other.pgs.dp_cp) == [0, 1, 2, 3]
    assert members(other.pgs.dp) == members(context.pgs.dp)


@ranks(dp=4)
def test_peers_stand_at_the_same_place_of_their_stretches(context: ParallelContext) -> None:
    rank = context.rank
    assert members(peers(2, 4, 4)) == [rank % 2, rank % 2 + 2]
    assert members(peers(1, 2, 4)) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(peers(4, 4, 4)) == [rank]
