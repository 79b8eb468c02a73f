"""The decorator that other tests rely on: it fails when a rank fails, and it cannot hang."""

import time
from pathlib import Path

import pytest

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
