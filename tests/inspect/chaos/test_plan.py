"""Faults are drawn for a run, which gets the flags that it lacks."""

import itertools
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.inspect.chaos.plan import (
    APART,
    FIRST,
    TWELVE,
    completed,
    draw,
    draw_by_time,
    own_layout,
    parse_kinds,
)
from megatron_ext.inspect.layouts import parse_layout
from megatron_ext.text.task import TEXT

LAYOUT = parse_layout("tp2pp2")


def test_the_same_seed_draws_the_same_faults_and_another_one_others() -> None:
    first, again, other = (draw(TWELVE, LAYOUT, s, step_seconds=0.1) for s in (1, 1, 2))
    assert first == again
    assert first.faults != other.faults


def test_faults_come_one_after_another_on_any_rank() -> None:
    case = draw(["SIGKILL"] * 40, LAYOUT, 3, step_seconds=0.1)
    iterations = [fault.iteration for fault in case.faults]
    assert iterations == list(range(FIRST, FIRST + 40 * APART, APART))
    assert case.steps == iterations[-1] + APART
    assert {fault.rank for fault in case.faults} == {0, 1, 2, 3}
    timed = [fault for fault in case.faults if fault.seconds]
    assert 0 < len(timed) < 40
    assert all(0 < fault.seconds < 0.1 and fault.at == "step" for fault in timed)


def test_faults_by_time_have_the_wanted_rate() -> None:
    case = draw_by_time(["SIGKILL"], LAYOUT, 0, 100.0, 4.0, step_seconds=0.1)
    assert case.steps == 60_000
    # The number of a Poisson process: 400 with a standard deviation of 20.
    assert 300 < len(case.faults) < 500
    moments = [fault.iteration for fault in case.faults]
    assert all(later - earlier >= APART for earlier, later in itertools.pairwise(moments))


def test_kinds_are_parsed_and_an_unknown_one_is_refused() -> None:
    assert parse_kinds("sigkill,Bit flip") == ["SIGKILL", "bit flip"]
    assert parse_kinds("all") == list(TWELVE)
    with pytest.raises(ConfigError, match="`--faults` has `flood`, which is no fault; name some"):
        parse_kinds("SIGKILL,flood")


def test_only_flags_that_the_user_has_not_given_are_added(tmp_path: Path) -> None:
    case = draw(["SIGKILL"], LAYOUT, 0)
    mine = ["--save-interval", "2", "--nproc-per-node", "8"]
    words, added = completed(TEXT, mine, case, tmp_path)
    assert "--save-interval" not in added
    assert added[added.index("--peer-checkpoint-interval") + 1] == "1"
    assert words[words.index("--save") + 1] == str(tmp_path)
    assert words[-4:-2] == ["--nproc-per-node", "4"]
    bare = completed(TEXT, mine, case, tmp_path, bare=True)[1]
    assert "--max-restarts" not in bare and "--peer-checkpoint-interval" not in bare
    assert own_layout(mine, TEXT).ranks == 8
