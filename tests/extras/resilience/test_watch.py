"""Verdicts on constructed boards, causes of death, and the words of a post-mortem."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.extras.resilience.flight import Collective
from megatron_ext.extras.resilience.picture import draw
from megatron_ext.extras.resilience.postmortem import Case, report, write_postmortem
from megatron_ext.extras.resilience.process import GONE, MemoryKills, ProcessState
from megatron_ext.extras.resilience.slow import SlowRanks, own_times
from megatron_ext.extras.resilience.waits import blame
from megatron_ext.extras.resilience.watch import Fault, Limits, Verdict, verdicts
from megatron_ext.extras.resilience.watchdog import Evidence
from megatron_ext.extras.resilience.watcher import open_watcher
from megatron_ext.parallel.board import Event, EventKind, RankRecord

LIMITS = Limits(floor=5.0, steps=2.0, busy=5.0, boundless=600.0)
ALIVE, STOPPED = ProcessState(), ProcessState(stopped=True)


def event(at: float, name: str, phase: str, kind: str = "BEGIN", **about: int) -> Event:
    given = {"number": 1, "iteration": 7, **about}
    return Event(time=at, kind=EventKind[kind], name=name, phase=phase, **given)


def record(rank: int, at: float, phase: str = "forward", **facts: Any) -> RankRecord:
    events = facts.pop("events", (event(at, phase, phase),))
    given = {"iteration": 7, "mean_step": 1.0, "steps": 7, **facts}
    return RankRecord(rank=rank, pid=100 + rank, events=events, **given)


def states(*of: ProcessState) -> dict[int, ProcessState]:
    return {100 + rank: state for rank, state in enumerate(of)}


@pytest.mark.parametrize(
    ("silent", "facts", "of", "seen"),
    [
        (4.9, {}, (ALIVE, ALIVE), False),
        (5.1, {}, (ALIVE, ALIVE), True),
        (15.0, {"mean_step": 10.0}, (ALIVE, ALIVE), False),
        (20.1, {"mean_step": 10.0}, (ALIVE, ALIVE), True),
        (599.0, {"phase": "save"}, (ALIVE, ALIVE), False),
        (601.0, {"phase": "evaluate"}, (ALIVE, ALIVE), True),
        (599.0, {"phase": "other"}, (ALIVE, ALIVE), False),
        (599.0, {"steps": 1}, (ALIVE, ALIVE), False),
        (5.1, {"ended": True}, (ALIVE, ALIVE), False),
    ],
)
def test_a_hang_is_silence_longer_than_two_steps_and_a_floor(
    silent: float, facts: dict[str, Any], of: tuple[ProcessState, ...], seen: bool
) -> None:
    board = [record(0, 40.0, **facts), record(1, 100.0, **facts)]
    found = verdicts(board, 100.0 + silent, states(*of), LIMITS)
    assert found == ([Verdict(Fault.HANG, (), pytest.approx(silent))] if seen else [])


def test_one_rank_that_saves_may_keep_the_others_waiting() -> None:
    board = [record(0, 100.0, "save"), record(1, 100.0, "reduce")]
    assert verdicts(board, 400.0, states(ALIVE, ALIVE), LIMITS) == []


def test_a_rank_that_computes_has_more_time() -> None:
    board = [record(0, 100.0), record(1, 100.0)]
    assert verdicts(board, 124.0, states(ALIVE, ALIVE), LIMITS, busy=True) == []
    assert verdicts(board, 126.0, states(ALIVE, ALIVE), LIMITS, busy=True) != []


def test_a_rank_that_waits_for_storage_has_more_time() -> None:
    board = [record(0, 100.0, "data"), record(1, 100.0, "reduce")]
    assert verdicts(board, 124.0, states(ALIVE, ALIVE), LIMITS) == []
    assert verdicts(board, 126.0, states(ALIVE, ALIVE), LIMITS) != []
    assert verdicts(board, 106.0, states(STOPPED, ALIVE), LIMITS) != []


def test_stopped_and_dead_ranks_are_named() -> None:
    board = [record(0, 100.0), record(1, 99.0)]
    [hangs] = verdicts(board, 106.0, states(ALIVE, STOPPED), LIMITS)
    assert (hangs.fault, hangs.ranks) == (Fault.HANG, (1,))
    between_steps = [record(0, 100.0, "other"), record(1, 99.0, "other")]
    [hangs] = verdicts(between_steps, 106.0, states(ALIVE, STOPPED), LIMITS)
    assert (hangs.fault, hangs.ranks) == (Fault.HANG, (1,))
    assert verdicts(between_steps, 106.0, states(ALIVE, ALIVE), LIMITS) == []
    [dead] = verdicts(board, 100.5, states(ALIVE, GONE), LIMITS)
    assert (dead.fault, dead.ranks, dead.silent) == (Fault.DEAD, (1,), 1.5)


@pytest.mark.parametrize("counter", ["proc/vmstat", "sys/fs/cgroup/memory.events", "v1", "own"])
def test_a_kill_for_memory_is_told_by_the_counters(tmp_path: Path, counter: str) -> None:
    groups = tmp_path / "sys/fs/cgroup"
    own = groups / "jobs/7/memory.events"
    v1 = groups / "memory/jobs/7/memory.oom_control"
    files = {"own": own, "v1": v1}
    path = files.get(counter, tmp_path / counter)
    for each in (tmp_path / "proc/self/cgroup", own, v1, path):
        each.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/7\n5:cpu,memory:/jobs/7\n")
    path.write_text("oom 3\noom_kill 3\n")
    kills = MemoryKills(tmp_path)
    assert not kills.happened()
    path.write_text("oom 4\noom_kill 4\n")
    assert kills.happened()
    assert not kills.happened()


def test_a_run_without_memory_for_a_board_goes_without_a_watcher(tmp_path: Path) -> None:
    assert open_watcher(None, 1, 10.0) is None
    assert open_watcher(tmp_path / "missing", 1, 10.0) is None
    watcher = open_watcher(tmp_path, 2, 10.0)
    assert watcher is not None and watcher.limits.boundless == 600.0


def test_a_kill_for_memory_elsewhere_on_the_machine_is_none_of_this_control_group(
    tmp_path: Path,
) -> None:
    own, machine = tmp_path / "sys/fs/cgroup/memory.events", tmp_path / "proc/vmstat"
    for path in (own, machine):
        path.parent.mkdir(parents=True)
        path.write_text("oom_kill 0\n")
    kills = MemoryKills(tmp_path)
    machine.write_text("oom_kill 1\n")
    assert not kills.happened()
    own.write_text("oom_kill 1\n")
    assert kills.happened()


STACK = """\
Thread 0x0000700000 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x0000700001 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/model.py", line 12 in forward
  File "/home/me/train.py", line 3 in <module>
"""  # noqa: E501


def collective(number: int, *, over: bool, created: float = 100.0) -> Collective:
    return Collective("3", "TENSOR_GROUP", (0, 1), number, "all_reduce", [[4]], created, over)


def test_the_report_says_who_stopped_where_and_who_waits() -> None:
    place = {"microbatch": 2, "stage": 1}
    board = [
        record(0, 0.0, events=(event(99.0, "F", "forward", **place),)),
        record(1, 0.0, events=(event(98.5, "F", "forward", **place),)),
        record(2, 0.0, events=(event(99.5, "wait: receive input", "bubble", peer=1, **place),)),
    ]
    evidence = {
        0: Evidence((collective(8, over=True), collective(9, over=False)), STACK),
        2: Evidence((), ""),
    }
    of = states(ALIVE, STOPPED, ALIVE)
    case = Case("hang", blame(board, evidence, of), board, 104.0, evidence, of, {1: 3 * 2**29})
    assert report(case) == (
        "Rank 1 stopped first: it is stopped by a signal, in step 7, phase forward, F of "
        "micro-batch 2, stage 1, 5.5 s after its last event.\n"
        "\n"
        "Who waits for whom:\n"
        "  rank 0 waits for rank 1: all_reduce number 9 of TENSOR_GROUP (ranks 0, 1)\n"
        "  rank 2 waits for rank 1: receive input of micro-batch 2, stage 1\n"
        "\n"
        "Ranks:\n"
        "  rank 0 (pid 100, alive): in step 7, phase forward, F of micro-batch 2, stage 1, in "
        "all_reduce number 9 of TENSOR_GROUP (ranks 0, 1), at /home/me/model.py:12 in forward, "
        "5.0 s after its last event\n"
        "  rank 1 (pid 101, stopped, 1.50 GiB): in step 7, phase forward, F of micro-batch 2, "
        "stage 1, 5.5 s after its last event\n"
        "  rank 2 (pid 102, alive): in step 7, phase bubble, wait: receive input of micro-batch 2, "
        "stage 1, 4.5 s after its last event\n"
        "\n"
        f"Stacks of rank 0:\n{STACK}"
        "\n"
        "Stacks of rank 1:\nnone: a stopped process cannot answer\n"
        "\n"
        "Stacks of rank 2:\nnone: it did not answer\n"
    )


def test_a_kill_for_memory_is_told_with_the_last_size() -> None:
    board = [record(0, 100.0)]
    found = blame(board, {}, states(GONE))
    case = Case("memory", found, board, 100.2, {}, states(GONE), {0: 5 * 2**30})
    assert case.sentence == (
        "Rank 0 stopped first: it was killed by the kernel for want of memory; it last held "
        "5.00 GiB, in step 7, phase forward, 0.2 s after its last event."
    )


def test_a_rank_on_another_machine_may_be_the_first() -> None:
    waits = event(100.0, "wait: receive input", "bubble", microbatch=0, stage=1, peer=5)
    board = [record(0, 0.0, events=(waits,))]
    found = blame(board, {}, states(ALIVE))
    assert found.ranks == (5,)
    case = Case("hang", found, board, 110.0)
    assert case.sentence == (
        "Rank 5 stopped first: it is on another machine, and is waited for, of which this "
        "machine knows no more."
    )


def test_post_mortems_are_numbered_and_have_a_picture(tmp_path: Path) -> None:
    events = (
        event(90.0, "step", "other", "STEP"),
        event(90.1, "F", "forward"),
        event(95.0, "F", "other", "END"),
        event(96.0, "reduce", "reduce"),
    )
    board = [record(0, 0.0, events=events), record(1, 0.0, events=events[:2])]
    case = Case("hang", blame(board, {}, states(ALIVE, STOPPED)), board, 100.0)
    for number in (1, 2):
        folder = write_postmortem(case, tmp_path)
        assert folder == tmp_path / f"postmortem_{number}"
    told = json.loads((folder / "timeline.json").read_text())
    assert [rank["first"] for rank in told["ranks"]] == [False, True]
    draw(folder)
    picture = (folder / "picture.svg").read_text()
    assert "<svg" in picture
    # Only the rank that stopped first has a cross.
    crosses = re.findall(r'<use [^>]*style="fill: #e15759', picture)
    assert len(crosses) == 1


def test_without_a_save_folder_the_report_is_printed_without_stacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board = [record(0, 100.0)]
    evidence = {0: Evidence((), STACK)}
    case = Case("hang", blame(board, evidence, states(ALIVE)), board, 106.0, evidence)
    assert write_postmortem(case, None) is None
    printed = capsys.readouterr().err
    assert printed.startswith("Rank 0 stopped first: it waits for no other rank, in step 7")
    assert "model.py:12 in forward" in printed and "Stacks" not in printed


def steps_of(rank: int, works: float, *, num_steps: int = 6) -> tuple[RankRecord, tuple[Any, ...]]:
    """Return record and collectives of a rank that works, then waits at 1.0 s of each step."""
    events, flight = [], []
    for step in range(num_steps):
        begin = 100.0 + step
        events += [
            event(begin, "step", "other", "STEP", iteration=step),
            event(begin, "forward", "forward", iteration=step),
            event(begin + 0.99, "forward", "other", "END", iteration=step),
        ]
        arrives = begin + works
        flight.append(collective(step, over=True, created=arrives))
    return record(rank, 0.0, events=tuple(events)), tuple(flight)


def test_own_time_is_what_is_left_of_a_step_without_waiting() -> None:
    slow, fast = steps_of(0, 0.8), steps_of(1, 0.3)
    own = own_times([slow[0], fast[0]], {0: slow[1], 1: fast[1]})
    # Both go on when the slow rank has come, for the last 0.19 s of the phase.
    assert own == {0: pytest.approx(0.99, abs=1e-6), 1: pytest.approx(0.49, abs=1e-6)}


def test_records_without_a_common_time_tell_no_own_times() -> None:
    early, flight = steps_of(0, 0.8)
    late = record(1, 0.0, events=(event(300.0, "F", "forward"), event(301.0, "F", "x", "END")))
    flights = {0: flight, 1: (collective(9, over=True, created=300.5),)}
    assert own_times([early, late], flights) is None
    assert own_times([early, late], {0: flight}) is None
    assert own_times([], {}) is None


def test_a_slow_rank_is_named_once_by_its_twins() -> None:
    ranks = SlowRanks(twin_factor=1.3, times=2)
    places = {0: 0, 1: 0, 2: 0}
    assert ranks.judge({0: 1.0, 1: 1.1, 2: 1.6}, places) == []
    [slow] = ranks.judge({0: 1.0, 1: 1.1, 2: 1.6}, places)
    assert (slow.rank, slow.seconds, slow.usual) == (2, 1.6, pytest.approx(1.05))
    assert ranks.judge({0: 1.0, 1: 1.1, 2: 1.6}, places) == []


def test_a_stage_with_more_work_is_not_slow_but_one_that_becomes_slow_is() -> None:
    ranks = SlowRanks(self_factor=1.5, times=2)
    places = {0: 0, 1: 1}
    for _ in range(3):
        assert ranks.judge({0: 1.0, 1: 4.0}, places) == []
    for _ in range(3):  # the whole machine is slower
        assert ranks.judge({0: 3.0, 1: 12.0}, places) == []
    for _ in range(2):  # within its own factor, which is larger than that of twins
        assert ranks.judge({0: 1.0, 1: 5.6}, places) == []
    assert ranks.judge({0: 1.0, 1: 8.0}, places) == []
    assert [slow.rank for slow in ranks.judge({0: 1.0, 1: 8.0}, places)] == [1]
