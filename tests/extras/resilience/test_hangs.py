"""Runs that hang in several ways: the right rank is named, and none is in a run that goes well."""

import time
from functools import partial
from typing import Any

import pytest

from megatron_ext.extras.resilience.slow import SlowRank
from megatron_ext.extras.resilience.watch import Fault, Limits
from megatron_ext.train.run import Run
from tests.extras.resilience.hanging import (
    LAYOUTS,
    LIMITS,
    STEP,
    crash,
    first_verdict,
    hang,
    lose_a_message,
    skip_a_collective,
    sleep_in_forward,
    stop,
    watched,
)

KINDS = {kind.__name__: kind for kind in (stop, sleep_in_forward, skip_a_collective)}
FAST = [
    ("tp2pp2", stop, 2),
    ("tp2", sleep_in_forward, 0),
    ("dp2", skip_a_collective, 1),
    ("pp2", lose_a_message, 1),
]
GRID = [
    *((layout, kind, rank) for layout, (size, _) in LAYOUTS.items() for kind in KINDS.values()
      for rank in range(size) if (layout, kind) != ("pp2", skip_a_collective)),
    *(("pp2", lose_a_message, rank) for rank in range(2)),
]  # fmt: skip


def check_named(layout: str, kind: Any, rank: int) -> None:
    verdict, case = hang(layout, kind, rank)
    assert verdict.fault is Fault.HANG
    assert case.blame.ranks == (rank,), case.sentence
    assert LIMITS.floor < verdict.silent
    assert f"in step {STEP}" in case.sentence or kind is skip_a_collective
    waiting = {wait.rank for wait in case.blame.waits}
    assert waiting >= set(range(LAYOUTS[layout][0])) - {rank}


@pytest.mark.parametrize(("layout", "kind", "rank"), FAST)
def test_the_rank_that_hangs_is_named(layout: str, kind: Any, rank: int) -> None:
    check_named(layout, kind, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind", "rank"), GRID)
def test_the_rank_that_hangs_is_named_wherever_it_is(layout: str, kind: Any, rank: int) -> None:
    check_named(layout, kind, rank)


def test_a_crash_leaves_its_stack() -> None:
    with watched("tp2", partial(crash, rank=1)) as watcher:
        verdict = first_verdict(watcher)
        assert verdict is not None and verdict.fault is Fault.DEAD
        case = watcher.investigate(verdict, cause="SIGSEGV")
    told = case.evidence[1].crash
    assert told.startswith("Fatal Python error: Segmentation fault")
    assert "hanging.py" in told and "runtime.py" in told
    assert "hanging.py" in case.where(1) and f"in step {STEP}, phase forward, F of" in case.where(1)


def take_long(run: Run) -> None:
    """Let each evaluation take three times as long as the floor of a hang."""

    def listen(name: str, iteration: int, detail: Any) -> None:
        if (name, detail) == ("evaluate", "begin"):
            time.sleep(3 * LIMITS.floor)

    run.context.recorder.listeners.append(listen)


def test_a_long_evaluation_is_no_hang() -> None:
    words = "--train-iters 1000 --eval-interval 3 --eval-iters 1"
    with watched("dp2", take_long, words) as watcher:
        assert first_verdict(watcher, 12.0) is None
        assert max(record.iteration for record in watcher.board.read(1)) > 3


def slow_down(run: Run, rank: int) -> None:
    """Let a rank sleep a little in each forward pass."""

    def listen(name: str, iteration: int, detail: Any) -> None:
        if name == "F" and detail != "end":
            time.sleep(0.06)

    if run.context.rank == rank:
        run.context.recorder.listeners.append(listen)


def test_a_slow_rank_is_named_and_not_the_one_that_waits_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[SlowRank] = []
    limits = Limits(floor=30.0)
    with watched("dp2", partial(slow_down, rank=1), limits=limits) as watcher:
        end = time.monotonic() + 40.0
        while not found and time.monotonic() < end:
            time.sleep(0.2)
            found += watcher.tell_slow_ranks(None, seconds=1.5)
    assert [slow.rank for slow in found] == [1]
    assert found[0].seconds > 0.1
    assert capsys.readouterr().err.startswith("rank 1 is slow: it computes ")
