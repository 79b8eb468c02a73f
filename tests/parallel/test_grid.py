"""The pure-Python grid against megatron-core's generator, and against real groups."""

import itertools
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from rich.table import Table
from torch.distributed import ProcessGroup, get_process_group_ranks

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.__main__ import grid_table, group_table, main
from megatron_ext.parallel.context import ParallelContext, embedding_ranks, peers, secondary_groups
from megatron_ext.parallel.grid import DENSE_GROUPS, EXPERT_GROUPS, Layout
from tests.parallel.test_context import timeout_of
from tests.ranks import ranks, run_on_ranks
from tests.training_runs import run_python

LAYOUTS = [
    Layout(world, tp, pp, cp, ep, etp, use_tp_pp_dp_mapping=mapping)
    for world, tp, pp, cp, ep, etp in (
        (1, 1, 1, 1, 1, None), (2, 2, 1, 1, 1, None), (2, 1, 2, 1, 1, None), (4, 1, 1, 2, 1, None),
        (4, 2, 2, 1, 1, None), (8, 2, 2, 2, 1, None), (8, 2, 2, 1, 2, None), (8, 2, 1, 1, 4, 1),
        (8, 4, 2, 1, 2, 2), (12, 2, 3, 1, 1, None), (16, 2, 2, 2, 2, None), (16, 4, 2, 1, 8, 1),
        (16, 1, 4, 2, 2, 2), (24, 2, 3, 2, 2, None), (32, 4, 2, 2, 4, None), (32, 8, 1, 2, 4, 2),
        (32, 2, 4, 1, 8, 1), (48, 4, 3, 2, 2, None), (64, 4, 4, 2, 4, None), (64, 8, 2, 1, 8, 2),
        (64, 2, 8, 2, 4, 2), (64, 1, 1, 1, 64, 1),
    )
    for mapping in (False, True)
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_grid_equals_megatron_cores(layout: Layout) -> None:
    for sizes, groups, every in (
        (layout.sizes(), layout.groups, DENSE_GROUPS),
        (layout.expert_sizes(), layout.expert_groups, EXPERT_GROUPS),
    ):
        given = {axis: sizes[axis] for axis in ("tp", "ep", "dp", "pp", "cp")}
        core = RankGenerator(**given, order=layout.order)
        for axes in every:
            assert groups(axes) == core.get_ranks(axes), axes
    for rank, axis in itertools.product(range(layout.world_size), ("tp", "cp", "dp", "pp")):
        group = next(g for g in layout.groups(axis) if rank in g)
        assert group.index(rank) == layout.position(rank)[axis]
        assert layout.group_of(rank, axis) == group
    for rank, axes in itertools.product((0, layout.world_size - 1), ("dp-cp", "tp-dp-cp")):
        assert layout.group_of(rank, axes) == next(g for g in layout.groups(axes) if rank in g)


@pytest.mark.parametrize("mapping", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
        {"pipeline_model_parallel_size": 4},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ],
)
def test_real_groups_on_eight_ranks(sizes: dict[str, int], mapping: bool) -> None:
    layout = Layout(world_size=8, use_tp_pp_dp_mapping=mapping, **sizes)
    run_on_ranks(_check_real_groups, layout, {})


def _check_real_groups(context: ParallelContext) -> None:
    layout, pgs = context.layout, context.pgs
    dense = {
        "tp": pgs.tp, "pp": pgs.pp, "cp": pgs.cp, "dp": pgs.dp,
        "dp-cp": pgs.dp_cp, "tp-pp": pgs.mp, "tp-cp": pgs.tp_cp, "tp-dp-cp": pgs.tp_dp_cp,
    }  # fmt: skip
    experts = {"ep": pgs.ep, "dp": pgs.expt_dp, "tp-ep": pgs.tp_ep, "tp-ep-pp": pgs.tp_ep_pp}
    for groups_of, groups in ((layout.groups, dense), (layout.expert_groups, experts)):
        for axes, group in groups.items():
            mine = next(g for g in groups_of(axes) if context.rank in g)
            assert sorted(torch.distributed.get_process_group_ranks(group)) == mine, axes
    position = layout.position(context.rank)
    assert (context.tp_rank, context.pp_rank, context.dp_rank, context.cp_rank) == tuple(
        position[axis] for axis in ("tp", "pp", "dp", "cp")
    )


@ranks(pp=4, tp=2)
def test_embedding_group_is_first_and_last_stage(context: ParallelContext) -> None:
    pipeline = next(g for g in context.layout.groups("pp") if context.rank in g)
    if context.is_first_stage or context.is_last_stage:
        group = torch.distributed.get_process_group_ranks(parallel_state.get_embedding_group())
        assert group == [pipeline[0], pipeline[-1]]


def _first_and_second(context: ParallelContext) -> None:
    if context.rank < 2:
        group = torch.distributed.get_process_group_ranks(parallel_state.get_embedding_group())
        assert group == [0, 1]


def test_the_embedding_group_has_the_ranks_that_are_asked_for() -> None:
    """A stage in the middle reads embeddings too, such as for multi-token prediction."""
    layout = Layout(3, pipeline_model_parallel_size=3)
    run_on_ranks(_first_and_second, layout, {}, get_embedding_ranks=lambda pipeline: pipeline[:2])


@pytest.mark.parametrize(
    ("tied", "depths", "stages", "expected"),
    [
        (True, None, None, [0, 12]),
        (False, 1, None, [0, 12]),
        (True, 1, None, [0, 12]),
        (False, 1, "Et|t|tm|L", [0, 8]),
        (True, 1, "Et|t|tm|L", [0, 8, 12]),
        (False, None, None, [0]),
    ],
)
def test_embedding_ranks_by_kind_of_model(
    tied: bool, depths: int | None, stages: str | None, expected: list[int]
) -> None:
    model = ModelConfig(untie_embeddings_and_output_weights=not tied, mtp_num_layers=depths)
    parallel = ParallelConfig(
        world_size=16, pipeline_model_parallel_size=4, pipeline_model_parallel_layout=stages
    )
    assert embedding_ranks(model, parallel)([0, 4, 8, 12]) == expected


def test_one_rank_holds_all_copies_of_the_embedding() -> None:
    model = ModelConfig(untie_embeddings_and_output_weights=False, mtp_num_layers=1)
    assert embedding_ranks(model, ParallelConfig(world_size=1))([3]) == [3]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((6, 4), r"number of ranks \(6\) must be divisible by `--tensor-.*` \(4\); start 8 ranks"),
        ((8, 0), r"`--tensor-model-parallel-size` \(0\) must be at least 1"),
        (
            (8, 2, 2, 1, 3),
            r"by `--expert-t.*` × `--expert-m.*` × `--pipe.*` \(2 × 3 × 2 = 12\)",
        ),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple[int, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Layout(*sizes)


def test_the_command_prints_the_grid_without_torch() -> None:
    code = (
        "import sys; from megatron_ext.parallel.__main__ import main; "
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --world-size 16"
    done = run_python("-c", code, *flags.split(), seconds=60)
    assert "[0,8] [1,9]" in done.stdout  # pipelines
    assert "[0,2,4,6] [1,3,5,7]" in done.stdout  # replicas


def rows_of(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*([str(cell) for cell in column.cells] for column in table.columns)))  # noqa: B905


def test_the_tables_hold_each_rank_and_each_kind_of_group() -> None:
    layout = Layout(8, 2, 2, expert_model_parallel_size=2)
    positions = rows_of(grid_table(layout))
    assert len(positions) == 8
    assert positions[6] == ("6", "0", "0", "1", "1")
    groups = {name: (size, ranks) for name, size, ranks in rows_of(group_table(layout))}
    assert groups["tp"] == ("2", "[0,1] [2,3] [4,5] [6,7]")
    assert groups["tp-dp-cp"] == ("4", "[0-3] [4-7]")
    assert groups["dp"] == ("2", "[0,2] [1,3] [4,6] [5,7]")
    assert groups["expert ep"] == ("2", "[0,2] [1,3] [4,6] [5,7]")
    assert groups["expert tp-ep-pp"] == ("8", "[0-7]")
    # Groups of one rank are left out.
    assert "cp" not in groups and "expert dp" not in groups


def test_groups_of_experts_are_shown_when_they_differ_from_the_dense_ones() -> None:
    def kinds(layout: Layout) -> list[str]:
        return [row[0] for row in rows_of(group_table(layout)) if row[0].startswith("expert")]

    assert kinds(Layout(4, 2)) == []
    assert kinds(Layout(4, 2, expert_tensor_parallel_size=1)) == ["expert dp"]
    assert kinds(Layout(4, 1, expert_model_parallel_size=2)) == [
        "expert ep", "expert tp-ep", "expert tp-ep-pp", "expert dp",
    ]  # fmt: skip


def test_the_command_takes_switches_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--world-size 8 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
    assert main(words.split()) == 0
    assert "[0,1] [2,3] [4,5] [6,7]" in capsys.readouterr().out  # pipelines


def test_a_layout_follows_the_flags_of_a_run() -> None:
    flags = ParallelConfig(
        world_size=8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        pipeline_schedule="zb-v",
        use_tp_pp_dp_mapping=True,
    )
    layout = Layout.from_config(flags)
    assert layout == Layout(8, 2, 4, 1, 1, None, 2, use_tp_pp_dp_mapping=True, v_shape=True)
    assert [layout.placement.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    interleaved = Layout.from_config(replace(flags, pipeline_schedule="interleaved"))
    assert [interleaved.placement.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3] * 2
    assert Layout(24, 2, 3, 2).model_parallel_size == 12


def test_experts_are_spread_over_neighbours_whatever_comes_next() -> None:
    for pipeline_first, stages in ((False, [0, 4]), (True, [0, 2])):
        layout = Layout(8, 1, 2, expert_model_parallel_size=2, use_tp_pp_dp_mapping=pipeline_first)
        assert layout.expert_groups("ep")[0] == [0, 1]
        assert layout.expert_groups("pp")[0] == stages
        assert layout.groups("pp")[0] == ([0, 1] if pipeline_first else [0, 4])


def test_the_command_refuses_in_one_sentence() -> None:
    command = [sys.executable, "-m", "megatron_ext.parallel", "--world-size", "6"]
    done = subprocess.run(
        [*command, "--tensor-model-parallel-size", "4"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "must be divisible" in done.stderr


def members(group: ProcessGroup) -> list[int]:
    return sorted(get_process_group_ranks(group))


def sums(group: ProcessGroup) -> float:
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
    assert {timeout_of(group) for group in other.pipeline_channels} == {timedelta(minutes=10)}
    assert (other.rank, other.tp_rank, other.pp_rank) == (rank, 0, rank % 2)
    assert (other.dp_rank, other.cp_rank) == (rank // 2, 0)
    # Those of the run are what they were.
    assert {axes: members(getattr(context.pgs, axes)) for axes in run} == run
    assert members(parallel_state.get_tensor_model_parallel_group()) == run["tp"]
    assert members(parallel_state.get_data_parallel_group()) == run["dp"]
    assert sums(context.pgs.tp) == sum(run["tp"]) and sums(context.pgs.dp) == sum(run["dp"])


@ranks(cp=2, dp=2)
def test_replicas_of_a_second_layout_with_context_parallelism(context: ParallelContext) -> None:
    other = secondary_groups(Layout(4, context_parallel_size=2), timeout_minutes=3)
    assert members(other.pgs.dp_cp) == [0, 1, 2, 3]
    assert members(other.pgs.dp) == members(context.pgs.dp)
    for axes in ("tp", "cp", "pp", "dp", "dp_cp"):
        assert timeout_of(getattr(other.pgs, axes)) == timedelta(minutes=3), axes


@ranks(dp=4)
def test_peers_stand_at_the_same_place_of_their_stretches(context: ParallelContext) -> None:
    rank = context.rank
    assert members(peers(2, 4, 4)) == [rank % 2, rank % 2 + 2]
    assert members(peers(1, 2, 4)) == [rank // 2 * 2, rank // 2 * 2 + 1]
    alone = peers(4, 4, 4, timeout_minutes=3)
    assert members(alone) == [rank] and timeout_of(alone) == timedelta(minutes=3)


@pytest.mark.parametrize(
    ("ep", "etp", "ranks_per_node", "count"),
    [(8, 1, 4, 4), (8, 1, 8, 8), (8, 1, 16, 8), (8, 1, 12, 4), (4, 2, 4, 2), (4, 2, 3, 1)],
)
def test_consecutive_ranks_of_experts_share_a_node(
    ep: int, etp: int, ranks_per_node: int, count: int
) -> None:
    """Count the ranks of every group that are surely on one node, wherever the group begins."""
    layout = Layout(48, 1, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    assert layout.experts_in_node(ranks_per_node) == count
    for group in layout.expert_groups("ep"):
        for first in range(0, ep, count):
            assert len({rank // ranks_per_node for rank in group[first : first + count]}) == 1
