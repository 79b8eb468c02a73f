"""The decorator that other tests rely on: it fails when a rank fails, and it cannot hang."""

import time
from pathlib import Path

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_ext.device import select
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from tests.ranks import _spawn, ranks, run_on_ranks


def test_a_failing_rank_fails_the_test_with_its_traceback() -> None:
    def body(context: ParallelContext) -> None:
        assert context.rank == 0, "only rank 1 says this"

    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1 exited with 1.*only rank 1 says"):
        run_on_ranks(body, Layout(2), {})


def test_hanging_ranks_are_killed() -> None:
    def body(context: ParallelContext) -> None:
        if context.rank == 1:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="ran past 1 s"):
        run_on_ranks(body, Layout(2), {}, timeout=1)
    assert time.monotonic() - start < 15


@ranks(dp=2)
def test_each_rank_leaves_a_file(context: ParallelContext, tmp_path: Path) -> None:
    (tmp_path / f"rank{context.rank}").write_text("")


@pytest.mark.slow
def test_ranks_that_are_spawned_find_the_body_of_their_test(tmp_path: Path) -> None:
    """Ranks on GPUs are spawned, since a fork would break what the driver keeps in a process."""
    body = test_each_rank_leaves_a_file.__wrapped_body__  # type: ignore[attr-defined]
    (tmp_path / "store").mkdir()
    failed = _spawn(body, Layout(2), {"tmp_path": tmp_path}, tmp_path / "store", 60)
    assert failed == []
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


def test_a_rank_drops_no_group_of_the_process_that_forks_it(tmp_path: Path) -> None:
    """Angles that megatron-core caches hold groups; a full cache drops the oldest in a rank."""

    def fill(_: ParallelContext | None) -> None:
        for _ in range(40):
            group = torch.distributed.new_group([0])
            RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=group)(4)

    select().activate(0)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        fill(None)
    finally:
        torch.distributed.destroy_process_group()
    run_on_ranks(fill, Layout(1), {}, timeout=20)
