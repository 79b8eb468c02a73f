"""Faults are drawn for a run, which gets the flags that it lacks."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.extras.chaos import plan
from megatron_ext.extras.chaos.inject import Fault
from megatron_ext.extras.chaos.plan import (
    APART,
    FIRST,
    TWELVE,
    Case,
    check_possible,
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


def refused(words: Sequence[str], *faults: Fault, layout: str = "tp2pp2") -> list[str]:
    case = Case(parse_layout(layout), 0, faults, steps=40)
    completed_words, _ = completed(TEXT, words, case, Path("save"))
    try:
        check_possible(TEXT, completed_words, case)
    except ConfigError as error:
        return list(error.messages)
    return []


SAVE, EVALUATION = Fault("full disk", 6, 0, at="save"), Fault("SIGKILL", 6, 0, at="evaluate")
DAMAGE, KILL = Fault("corrupt checkpoint", 8, 0, at="forward"), Fault("SIGKILL", 6, 0)


@pytest.mark.parametrize(
    ("words", "fault", "said"),
    [
        ("--train-iters 5", KILL, "after the last step of the run, 5 (`--train-iters`); give a"),
        ("--train-samples 80 --global-batch-size 16", KILL, "the run, 5 (`--train-samples`)"),
        ("--exit-interval 3", Fault("bit flip", 6, 0), "the run, 3 (`--exit-interval`)"),
        ("--skip-train", KILL, "the run, 0 (`--skip-train`)"),
        ("--save-interval 50", SAVE, "strikes a save, but `--save-interval` (50) brings none"),
        ("--save-interval 8", DAMAGE, "damages a checkpoint, but `--save-interval` (8) brings"),
        ("", Fault("SIGKILL", 6, 4), "strikes rank 4, but layout tp2pp2 has 4 ranks"),
        ("", Fault("SIGKILL", 6, 0, at="lunch"), "waits for `lunch`, which never comes; use step"),
        ("--eval-interval 100", EVALUATION, "an evaluation, but `--eval-interval` (100) brings"),
        ("--max-restarts 0", KILL, "`--max-restarts` (0) is less than the 1 faults"),
    ],
)
def test_what_cannot_happen_is_refused_in_a_sentence(words: str, fault: Fault, said: str) -> None:
    (sentence,) = refused(words.split(), fault)
    assert said in sentence


def test_one_rank_has_no_connection_and_a_machine_without_limit_kills_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (sentence,) = refused([], Fault("lost socket", 6, 0), layout="dp1")
    assert "cuts a connection, but one rank has none" in sentence
    monkeypatch.setattr(plan, "has_small_memory_limit", lambda: False)
    (sentence,) = refused([], Fault("memory kill", 6, 0))
    assert "needs a control group whose limit of memory" in sentence


def test_what_is_drawn_without_flags_of_the_user_can_happen() -> None:
    for seed in range(20):
        assert refused([], *draw(TWELVE, LAYOUT, seed, step_seconds=0.1).faults[:6]) == []
