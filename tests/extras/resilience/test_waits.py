"""Who waits for whom, read from boards, collectives and stacks that are written by hand."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.extras.resilience.flight import Collective, read_flight
from megatron_ext.extras.resilience.postmortem import Case, report, write_postmortem
from megatron_ext.extras.resilience.process import GONE, ProcessState
from megatron_ext.extras.resilience.slow import SlowRanks, _overlap
from megatron_ext.extras.resilience.waits import Wait, blame, main_stack
from megatron_ext.extras.resilience.watch import Fault, Limits, Verdict, verdicts
from megatron_ext.extras.resilience.watchdog import Evidence
from megatron_ext.parallel.board import Event, RankRecord
from tests.extras.resilience.test_watch import ALIVE, STACK, STOPPED, event, record, states


def acts(*events: Event) -> dict[str, Any]:
    return {"events": events}


def message(at: float, kind: str, stage: int, microbatch: int = 2, **about: int) -> Event:
    return event(at, kind, "bubble", microbatch=microbatch, stage=stage, **about)


@pytest.mark.parametrize(
    ("awaited", "sent", "stages"),
    [("receive input", "send output", (1, 0)), ("receive gradient", "send gradient", (0, 1))],
)
def test_a_rank_that_sent_what_another_waits_for_has_gone_on(
    awaited: str, sent: str, stages: tuple[int, int]
) -> None:
    waits = record(1, 0.0, **acts(message(100.0, f"wait: {awaited}", stages[0], peer=0)))
    went = message(101.0, sent, stages[1])
    later = event(102.0, "F", "forward", microbatch=3, stage=stages[1])
    others = [
        (acts(went, later), True),
        (acts(went), False),  # It may be sending still.
        (acts(message(101.0, sent, stages[0]), later), False),
        (acts(message(101.0, sent, stages[1], microbatch=1), later), False),
        (acts(message(101.0, sent, stages[1], iteration=6), later), False),
        ({**acts(went, event(103.0, "step", "other", iteration=8)), "iteration": 8}, True),
    ]
    for facts, passed in others:
        board = [record(0, 0.0, **facts), waits]
        found = blame(board, {}, states(ALIVE, ALIVE))
        what = f"{awaited} of micro-batch 2, stage {stages[0]}"
        assert found.waits == (Wait(1, (0,), what, passed),)
        reasons = {True: "has gone on past what others wait for", False: "waits for no other rank"}
        assert (found.ranks, found.reason) == ((0,), reasons[passed])


def collective(number: int, *, over: bool = False, group: str = "3") -> Collective:
    return Collective(group, "TENSOR_GROUP", (0, 1), number, "all_reduce", [[4]], 100.0, over)


def test_a_rank_waits_in_its_last_collective_for_those_that_have_not_come() -> None:
    pending = (collective(8), collective(9))
    for other, iteration, waited, passed in (
        ((collective(8, over=True),), 7, (1,), False),
        ((collective(9, over=True),), 7, (), False),
        ((collective(8, over=True), collective(20, over=True, group="5")), 7, (1,), False),
        ((collective(8, over=True),), 8, (1,), True),
        ((), 7, (1,), False),
    ):
        board = [record(0, 100.0), record(1, 101.0, iteration=iteration)]
        evidence = {0: Evidence(pending, STACK), 1: Evidence(other, "")}
        (wait,) = blame(board, evidence, states(ALIVE, ALIVE)).waits
        assert (wait.rank, wait.on, wait.passed) == (0, waited, passed)
        assert wait.what.startswith("all_reduce number 9 of TENSOR_GROUP")


def test_a_rank_waits_where_its_innermost_line_says_so(tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text("work.wait(3)\ncompute()\n")
    for line, number in ((1, 1), (2, 0)):
        stack = (
            f'Current thread 0x1 (most recent call first):\n  File "{source}", line {line} in f\n'
        )
        evidence = {0: Evidence((collective(9),), f'{stack}  File "x", line 3 in <module>\n')}
        found = blame([record(0, 100.0)], evidence, states(ALIVE))
        assert len(found.waits) == number
    assert blame([record(0, 100.0)], evidence, states(STOPPED)).waits == ()


def test_the_stack_of_the_main_thread_is_the_last_whole_one() -> None:
    deep = STACK.replace("line 320 in wait\n", "line 320 in wait\n  ...\n")
    for stack in (STACK, deep):
        assert [frame.name for frame in main_stack(stack)] == ["all_reduce", "forward", "<module>"]
    half = STACK.rpartition("  File")[0]
    assert main_stack(half) == [] and main_stack("") == []


def test_of_idle_ranks_the_one_that_is_awaited_stopped_first() -> None:
    waits = record(0, 0.0, **acts(message(100.0, "wait: receive input", 1, peer=1)))
    board = [waits, record(1, 99.0), record(2, 90.0), record(3, 98.0)]
    assert blame(board, {}, states(ALIVE, ALIVE, ALIVE, ALIVE)).ranks == (1,)
    # Nobody is awaited: the earliest last event decides.
    assert blame(board[1:], {}, {}).ranks == (2,)
    dead = blame(board, {}, states(ALIVE, GONE, ALIVE, GONE))
    assert (dead.ranks, dead.reason) == ((3,), "has ended")


def test_actions_that_are_a_prefix_of_the_step_before_are_no_deviation() -> None:
    def rank(number: int, now: str) -> RankRecord:
        peer = 1 - number
        about = {"microbatch": 0, "stage": 0, "peer": peer}
        events = [event(90.0, "step", "other", "STEP", iteration=6)]
        events += [event(90.0, "data", "data", iteration=6)]
        events += [event(91.0, "F", "forward", iteration=6)]
        events += [event(92.0, "wait: receive input", "bubble", iteration=6, **about)]
        events += [event(93.0, "B", "backward", iteration=6)]
        events += [event(95.0, "step", "other", "STEP")]
        events += [event(96.0 + i / 8, name, "x") for i, name in enumerate(now.split())]
        return record(
            number, 0.0, **acts(*events, event(98.0, "wait: receive input", "bubble", **about))
        )

    board = [rank(0, "data F"), rank(1, "F")]
    found = blame(board, {}, states(ALIVE, ALIVE))
    assert (found.ranks, found.reason) == ((1,), "has left out what it did in the step before")
    all_alike = blame([rank(0, "F"), rank(1, "F")], {}, states(ALIVE, ALIVE))
    assert all_alike.reason.startswith("wrote its last event before the others")
    first = RankRecord(**{**vars(board[1]), "events": board[1].events[5:]})
    assert blame([board[0], first], {}, states(ALIVE, ALIVE)).reason.startswith("wrote its last")


def test_silence_is_counted_from_the_last_event_of_any_rank() -> None:
    limits = Limits(floor=5.0, steps=2.0, busy=5.0, boundless=600.0)
    board = [record(0, 90.0, mean_step=1.0), record(1, 100.0, mean_step=4.0)]
    both = states(ALIVE, ALIVE)
    assert verdicts(board, 107.9, both, limits) == []
    assert verdicts(board, 108.1, both, limits) == [Verdict(Fault.HANG, (), pytest.approx(8.1))]
    assert verdicts(board, 108.0, both, limits) == []
    dead = verdicts(board, 200.0, states(ALIVE, GONE), limits)
    assert dead == [Verdict(Fault.DEAD, (1,), 100.0)]
    slow = [record(0, 100.0, "save", mean_step=400.0)]
    assert verdicts(slow, 899.0, both, limits) == [] != verdicts(slow, 901.0, both, limits)
    for steps, seconds in ((1, 599.0), (2, 7.9)):
        started = [record(0, 100.0, mean_step=4.0, steps=steps)]
        assert verdicts(started, 100.0 + seconds, both, limits) == []
        assert verdicts(started, 100.2 + seconds + 2, both, limits) != []
    mixed = [record(0, 100.0, "data"), record(1, 100.0)]
    assert verdicts(mixed, 124.0, both, limits) == []


def test_a_report_tells_what_each_rank_did_last(tmp_path: Path) -> None:
    place = {"microbatch": 2, "stage": 1}
    ended = (event(97.0, "F", "forward", **place), event(99.0, "F", "other", "END"))
    other = (event(98.0, "F", "forward", iteration=6, **place), event(99.0, "data", "data"))
    board = [
        record(0, 0.0, iteration=0, events=(event(50.0, "start", "start"),)),
        record(1, 0.0, events=ended),
        record(2, 0.0, events=other),
    ]
    of = states(GONE, ALIVE, ALIVE)
    flights = {1: Evidence((collective(4),), ""), 2: Evidence((collective(5),), "")}
    evidence = {0: Evidence(crash=STACK), **flights}
    found = blame(board, evidence, of)
    case = Case("SIGKILL", found, board, 104.0, evidence, of)
    assert case.where(0).startswith("before the first step, phase start, at /home/me/model.py:12")
    assert "phase other, after F of micro-batch 2, stage 1, in all_reduce" in case.where(1)
    assert "phase data, in all_reduce number 5" in case.where(2)
    text = report(case)
    assert text.startswith("Rank 0 stopped first: it was ended by SIGKILL, before the first step")
    assert "rank 0 (pid 100, ended): " in text
    assert f"Stacks of rank 0:\n{STACK}" in text
    folders = [write_postmortem(case, tmp_path) for _ in range(2)]
    assert folders == [tmp_path / "postmortem_1", tmp_path / "postmortem_2"]
    for rank, number in ((1, 4), (2, 5)):
        (entry,) = json.loads((tmp_path / f"postmortem_2/collectives_{rank}.json").read_text())
        assert entry["number"] == number
    ranks = json.loads((tmp_path / "postmortem_1/timeline.json").read_text())["ranks"]
    assert ranks[1]["events"][0] == [-7.0, "BEGIN", "F", "forward", 7]


def test_several_ranks_and_waits_in_vain_are_told() -> None:
    passed = blame(
        [
            record(0, 0.0, **acts(message(100.0, "wait: receive input", 1, peer=1))),
            record(1, 0.0, **acts(message(99.0, "send output", 0), event(101.0, "B", "backward"))),
        ],
        {},
        states(ALIVE, ALIVE),
    )
    assert "rank 0 waits for rank 1: receive input of micro-batch 2, stage 1, in vain: it has" in (
        report(Case("hang", passed, [], 104.0))
    )
    two = blame([record(0, 100.0), record(1, 100.0), record(2, 100.0)], {}, states(*[STOPPED] * 3))
    case = Case("hang", two, [record(0, 100.0)], 106.0)
    assert case.sentence.startswith("Rank 0 (and rank 1, 2) stopped first: it is stopped by a sig")


def entry(number: int, at: float, **facts: Any) -> dict[str, Any]:
    given = {
        "process_group": ("7", "undefined"), "collective_seq_id": number, "retired": False,
        "profiling_name": "gloo:all_reduce", "time_created_ns": int(at * 1e9), "state": "started",
    }  # fmt: skip
    return {**given, **facts}


def test_collectives_are_read_in_the_order_of_their_calls(tmp_path: Path) -> None:
    entries = [
        entry(3, 1003.0, retired=True),
        entry(1, 1001.0, state="completed"),
        entry(2, 1002.0, is_p2p=True),
        entry(4, 1002.5, process_group=("9", "DATA_GROUP"), input_sizes=[[2, 3]]),
    ]
    about = {"behind": 1000.0, "groups": {"7": [0, 2]}}
    path = tmp_path / "flight_0"
    path.write_bytes(json.dumps(about).encode() + b"\n" + pickle.dumps({"entries": entries}))
    flight = read_flight(path)
    assert flight is not None
    assert [(x.number, x.created, x.over) for x in flight] == [
        (1, 1.0, True), (4, 2.5, False), (3, 3.0, True),
    ]  # fmt: skip
    assert str(flight[0]) == "all_reduce number 1 of group 7 (ranks 0, 2)"
    assert str(flight[1]) == "all_reduce number 4 of DATA_GROUP" and flight[1].shape == [[2, 3]]
    path.write_bytes(b"{")
    assert read_flight(path) is None and read_flight(tmp_path / "none") is None


def test_waits_that_overlap_are_counted_once() -> None:
    assert _overlap([(0.0, 10.0)], [(1.0, 4.0), (2.0, 5.0), (8.0, 12.0)]) == 4 + 2
    assert _overlap([(0.0, 2.0), (3.0, 4.0)], [(1.0, 3.5)]) == 1 + 0.5
    assert _overlap([(5.0, 6.0)], [(1.0, 2.0)]) == 0


def test_a_rank_is_slow_if_it_stays_slow() -> None:
    twins = SlowRanks(twin_factor=1.3, times=2)
    places = {0: 0, 1: 0}
    slow, fast = {0: 1.0, 1: 2.0}, {0: 1.0, 1: 1.2}
    assert [len(twins.judge(x, places)) for x in (slow, fast, slow, slow)] == [0, 0, 0, 1]
    alone = SlowRanks(self_factor=1.5, times=2)
    series = [{0: seconds} for seconds in (1.0, 1.2, 1.4, 1.55, 1.55)]
    named = [alone.judge(own, {0: 0}) for own in series]
    assert [len(x) for x in named] == [0, 0, 0, 0, 1] and named[-1][0].usual == 1.0
    faster = SlowRanks(self_factor=1.5, times=1)
    for own in ({0: 1.0, 1: 4.0}, {0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}):
        assert faster.judge(own, {0: 0, 1: 1}) == []


def test_a_process_that_is_not_known_is_alive() -> None:
    assert blame([record(0, 100.0)], {}, {}).reason == "waits for no other rank"
    assert ProcessState().alive and not GONE.alive
