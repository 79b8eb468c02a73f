"""Groups and seeds of ranks, and errors of their connections."""

import random
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError
from megatron_ext.parallel import context as module
from megatron_ext.parallel.context import (
    NoAnswer,
    ParallelContext,
    _checked_context,
    contact_fault,
    seed_everything,
)
from megatron_ext.parallel.grid import Layout
from tests.ranks import ranks, run_on_ranks

OPENS_TOO_MANY = """
import resource, tempfile
import torch.distributed as dist
from megatron_ext import limits
from megatron_ext.parallel.context import contact_fault

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
store = dist.FileStore(tempfile.mktemp(), 1)
try:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for _ in range(40):
        dist.new_group([0])
except RuntimeError as error:
    print(contact_fault(error), limits.sentence(error))
"""


def test_a_rank_that_may_open_no_more_connections_has_lost_none() -> None:
    words = [sys.executable, "-c", OPENS_TOO_MANY]
    said = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
    assert said == (
        "None This process may have 40 open files (RLIMIT_NOFILE), which are all in use; raise "
        "the limit with `ulimit -n 65536`.\n"
    )


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547]"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError(f"{GLOO} Connection closed by peer"), NoAnswer.LOST),
        (RuntimeError(f"{GLOO} Timed out waiting 1000ms for recv operation"), NoAnswer.TIMEOUT),
        (RuntimeError(f"{GLOO} connect timeout after 1000 ms"), NoAnswer.TIMEOUT),
        (RuntimeError(f"{GLOO} bind: Cannot allocate memory"), None),
        (RuntimeError("Connection closed by peer"), None),
        (OSError(f"{GLOO} Connection closed by peer"), None),
        (torch.distributed.DistStoreError("wait timeout after 1000ms, keys: /0"), NoAnswer.TIMEOUT),
        (torch.distributed.DistStoreError("the store has no key /0"), None),
    ],
)
def test_why_contact_with_a_rank_failed(error: Exception, fault: NoAnswer | None) -> None:
    assert contact_fault(error) is fault


@ranks(pp=2, dp=2)
def test_groups_are_checked_against_the_grid(context: ParallelContext) -> None:
    minutes = timedelta(minutes=3)
    places: list[tuple[int, int, int]] = []
    recorder: Any = SimpleNamespace(place=lambda *numbers: places.append(numbers))
    again = _checked_context(context.layout, minutes, recorder)
    assert places == [(context.rank, 4, context.rank // 2)]
    assert (again.pp_rank, again.dp_rank) == (context.rank // 2, context.rank % 2)
    up, down = again.pipeline_channels
    assert up is not down
    for group in (up, down):
        assert timeout_of(group) == minutes
        assert torch.distributed.get_process_group_ranks(group) == again.pipeline_ranks
    # The groups of the run itself have the default of `init_groups`.
    whole: Any = torch.distributed.group.WORLD
    for group in (whole, context.pgs.pp, context.pgs.dp_cp, context.pgs.mp):
        assert timeout_of(group) == timedelta(minutes=10)
    other = Layout(4, pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True)
    with pytest.raises(ConfigError, match=r"The pp group of rank \d is .* in megatron-core, but "):
        _checked_context(other, minutes, recorder)


def timeout_of(group: ProcessGroup) -> timedelta:
    options: Any = group._get_backend(torch.device("cpu")).options
    found: timedelta = options._timeout
    return found


@pytest.mark.parametrize(
    ("layout", "first", "last", "reporting"),
    [
        (Layout(8, 2, 2), [0, 1, 2, 3], [4, 5, 6, 7], 7),
        (Layout(8, 2, 2, use_tp_pp_dp_mapping=True), [0, 1, 4, 5], [2, 3, 6, 7], 7),
        # In a V shape, the first pipeline rank also holds the last stage.
        (
            Layout(4, 1, 2, virtual_pipeline_model_parallel_size=2, v_shape=True),
            [0, 1],
            [0, 1],
            1,
        ),
        (Layout(4, 1, 2, virtual_pipeline_model_parallel_size=2), [0, 1], [2, 3], 3),
    ],
    ids=str,
)
def test_the_ranks_of_the_first_and_the_last_stage(
    layout: Layout, first: list[int], last: list[int], reporting: int
) -> None:
    group: Any = None
    contexts = [
        ParallelContext(
            layout,
            rank,
            **{f"{axis}_rank": layout.position(rank)[axis] for axis in ("tp", "pp", "dp", "cp")},
            pgs=group,
            pipeline_channels=(group, group),
        )
        for rank in range(layout.world_size)
    ]
    assert [each.rank for each in contexts if each.is_first_stage] == first
    assert [each.rank for each in contexts if each.is_last_stage] == last
    assert [each.rank for each in contexts if each.is_reporting_rank] == [reporting]


def test_groups_that_megatron_core_forgets_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    ]
    for name in names:
        monkeypatch.setattr(parallel_state, name, object())
    done: list[str] = []
    for owner, name in (
        (parallel_state, "destroy_model_parallel"),
        (torch.distributed, "destroy_process_group"),
    ):
        monkeypatch.setattr(owner, name, lambda name=name: done.append(name))
    for started in (False, True):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda started=started: started)
        module.destroy_groups()
    assert [getattr(parallel_state, name) for name in names] == [None, None]
    assert done == [*["destroy_model_parallel"] * 2, "destroy_process_group"]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_only_nccl_is_aborted(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[bool] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(
        torch.distributed.distributed_c10d, "_abort_process_group", lambda: aborted.append(True)
    )
    ParallelContext.abort(SimpleNamespace())  # type: ignore[arg-type]
    assert aborted == [True] * (backend == "nccl")


def test_an_address_that_is_given_comes_before_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_INIT_METHOD", "file:///nowhere/store")
    run_on_ranks(lambda context: None, Layout(2), {})


@pytest.mark.parametrize(("apart", "seed"), [(False, 1534), (True, 1554)])
def test_stages_and_replicas_get_the_seeds_of_megatron_lm(
    apart: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers: list[int] = []
    monkeypatch.setattr(module, "model_parallel_cuda_manual_seed", trackers.append)
    rank: Any = SimpleNamespace(pp_rank=3, dp_rank=2)
    seed_everything(rank, 1234, data_parallel_random_init=apart)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    wanted = random.Random(seed).random(), np.random.RandomState(seed).rand()
    generator = torch.Generator().manual_seed(seed)
    assert drawn == (*wanted, torch.rand(1, generator=generator).item())
    assert trackers == [seed]
