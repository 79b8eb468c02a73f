"""The decorator that other tests rely on: it fails when a rank fails, and it cannot hang."""

from __future__ import annotations

import time

import pytest

from megatron_ext.layout import Layout, ParallelContext
from tests.ranks import run_on_ranks


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
    with pytest.raises(pytest.fail.Exception, match="ran past 2 s"):
        run_on_ranks(body, Layout(2), {}, timeout=2)
    assert time.monotonic() - start < 15
