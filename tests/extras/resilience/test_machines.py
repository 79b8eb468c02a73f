"""A machine's watchers, launchers and snapshots do their work without training."""

import dataclasses
import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.snapshot import SnapshotFile, content_of
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.disk.events import read_events
from megatron_ext.disk.host_folder import RESIZE, TAKEN_OVER
from megatron_ext.errors import CheckpointError
from megatron_ext.extras.resilience import hang_guard as hang_guard_module
from megatron_ext.extras.resilience import memory as memory_module
from megatron_ext.extras.resilience import peers as peers_module
from megatron_ext.extras.resilience import recovery as recovery_module
from megatron_ext.extras.resilience import restarts, snapshots
from megatron_ext.extras.resilience import watchdog as watchdog_module
from megatron_ext.extras.resilience import watcher as watcher_module
from megatron_ext.extras.resilience.elastic import REQUESTED_NODES, requested_nodes
from megatron_ext.extras.resilience.fault_supervisor import (
    Fault,
    RestartSupervisor,
    TellingSupervisor,
)
from megatron_ext.extras.resilience.generation import (
    FAULT_STEP_VARIABLE,
    FAULT_TIME_VARIABLE,
    RestartReport,
    follow_earlier_process,
)
from megatron_ext.extras.resilience.memory import Machines, MemoryCheckpoints
from megatron_ext.extras.resilience.peers import CopyOverGroup, CopyThread, copy_files, distance
from megatron_ext.extras.resilience.picture import first_time, spans
from megatron_ext.extras.resilience.postmortem import Case
from megatron_ext.extras.resilience.process import GONE, MemoryKills, ProcessState, process_states
from megatron_ext.extras.resilience.recovery import (
    HeldSnapshot,
    Recovery,
    choose,
    readers_of,
    same_weights,
)
from megatron_ext.extras.resilience.slow import SlowRank
from megatron_ext.extras.resilience.waits import Blame
from megatron_ext.extras.resilience.watch import Fault as Kind
from megatron_ext.extras.resilience.watch import Limits, Verdict
from megatron_ext.extras.resilience.watchdog import ask_flights, collect, watchdog
from megatron_ext.extras.resilience.watcher import Watcher
from megatron_ext.parallel.board import Board, RankRecord, Word
from megatron_ext.train.exit_codes import EXIT_CODE_COMES_BACK, EXIT_CODE_NO_ANSWER
from megatron_ext.train.supervisor import SignalForwarder
from tests.extras.resilience.test_watch import record
from tests.ranks import layout_of, ranks


class Clock:
    """Stands in for the module `time`; time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclasses.dataclass
class Machine:
    """A watcher of two ranks whose board, processes and clock a test sets."""

    watcher: Watcher
    clock: Clock
    board: list[RankRecord] = dataclasses.field(default_factory=list)
    states: dict[int, ProcessState] = dataclasses.field(default_factory=dict)

    def look(self, at: float, **how: Any) -> list[Verdict]:
        self.clock.now = at
        return self.watcher.look(**how)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    clock = Clock()
    monkeypatch.setattr(watcher_module, "time", clock)
    made = Machine(Watcher(tmp_path, 2, Limits(floor=5.0)), clock)
    monkeypatch.setattr(made.watcher.board, "read", lambda _=0: made.board)
    monkeypatch.setattr(
        watcher_module,
        "process_states",
        lambda pids: {pid: made.states.get(pid, ProcessState()) for pid in pids},
    )
    return made


def test_silence_does_not_count_while_the_machine_was_stopped(machine: Machine) -> None:
    machine.board = [record(0, 90.0), record(1, 91.0)]
    assert machine.look(100.0) == []  # The first look knows no silence.
    for at in (101.0, 102.5, 104.0):
        assert machine.look(at) == []
    assert machine.look(104.9) == []
    assert [v.fault for v in machine.look(105.1)] == [Kind.HANG]
    assert machine.look(140.0) == []  # Nobody has looked for half a minute.
    assert machine.look(141.5) == machine.look(143.0) == machine.look(144.5) == []
    assert machine.look(145.1) != []
    machine.board = [record(0, 144.0), record(1, 91.0)]
    assert machine.look(146.0) == []


@pytest.mark.parametrize(("share", "hangs"), [(0.6, False), (0.4, True)])
def test_a_rank_that_computes_most_of_the_time_is_busy(
    share: float, hangs: bool, machine: Machine
) -> None:
    machine.board = [record(0, 100.0)]
    found = []
    for at in range(100, 112):
        machine.states = {100: ProcessState(cpu_seconds=7.0 + share * (at - 100))}
        found += machine.look(float(at))
    assert bool(found) is hangs


def test_only_the_processes_of_this_start_are_looked_at(machine: Machine) -> None:
    machine.board = [record(0, 100.0), record(1, 100.0)]
    machine.states = {100: ProcessState(resident=5), 101: GONE}
    assert machine.look(100.0)[0].ranks == (1,)
    assert machine.look(101.5, pids={0: 100, 1: 7}) == []
    assert machine.look(103.0, pids={1: 101})[0].ranks == (1,)
    assert machine.watcher.resident == {0: 5}
    machine.states = {100: ProcessState(resident=0)}
    machine.look(104.0)
    assert machine.watcher.resident == {0: 5}


def test_slow_ranks_are_measured_now_and_then(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    slow = SlowRank(1, 0.5, 0.25)
    monkeypatch.setattr(
        watcher_module, "ask_flights", lambda folder, chosen: asked.append(list(chosen)) or {}
    )
    monkeypatch.setattr(watcher_module, "own_times", lambda board, flights: {0: 0.25, 1: 0.5})
    monkeypatch.setattr(machine.watcher._slow, "judge", lambda own, places: [slow])

    def tell(at: float) -> list[SlowRank]:
        machine.clock.now = at
        machine.board = [record(0, at - 0.1, iteration=4), record(1, at - 0.1, iteration=5)]
        return machine.watcher.tell_slow_ranks(str(tmp_path / "save"), seconds=15.0)

    assert tell(114.9) == [] == asked
    assert tell(115.1) == [slow] and asked == [[0, 1]]
    assert tell(130.0) == [] and tell(130.2) == [slow]
    (told, _) = read_events(tmp_path / "save")
    assert (told["rank"], told["iteration"], told["usual"]) == (1, 5, 0.25)
    machine.clock.now = 200.0
    machine.board = [record(0, 199.9), record(1, 199.9, ended=True)]
    assert machine.watcher.tell_slow_ranks(None) == []
    machine.board = [record(0, 199.9), record(1, 198.0)]
    assert machine.watcher.tell_slow_ranks(None) == [] and len(asked) == 2


def test_a_dead_rank_is_blamed_and_only_running_ones_are_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[int, int]] = []
    monkeypatch.setattr(watcher_module, "collect", lambda folder, pids, s: asked.append(pids) or {})
    (machine.watcher.folder / "crash_1.txt").write_text("a crash")
    machine.board = [record(0, 99.0), record(1, 100.0), record(2, 100.0)]
    machine.states = {101: GONE, 102: ProcessState(stopped=True)}
    case = machine.watcher.investigate(Verdict(Kind.DEAD, (1,), 0.0), cause="SIGKILL")
    assert asked == [{0: 100}]
    assert (case.blame.ranks, case.cause) == ((1,), "SIGKILL")
    # Those that do not run cannot answer, but may have written their stacks in a crash.
    assert {rank: found.crash for rank, found in case.evidence.items()} == {1: "a crash", 2: ""}
    machine.states = {}
    case = machine.watcher.investigate(Verdict(Kind.DEAD, (2,), 0.0))
    assert (case.blame.ranks, case.blame.reason, case.cause) == ((2,), "has ended", "ended")
    assert machine.watcher.investigate(Verdict(Kind.HANG, (), 9.0)).blame.ranks == (0,)


def test_a_process_answers_each_request_anew(tmp_path: Path) -> None:
    stale = tmp_path / "flight_0"
    stale.write_bytes(b'{"behind": 0, "groups": {}}\n')
    enabled = faulthandler.is_enabled()
    open_before = len(os.listdir("/proc/self/fd"))
    with watchdog(tmp_path, 0):
        assert not stale.exists()
        for _ in range(2):
            stale.write_bytes(b"of an earlier request")
            assert ask_flights(tmp_path, [0]) == {0: ()}
            found = collect(tmp_path, {0: os.getpid()})
            assert found[0].flight == ()
            assert found[0].stack.count("most recent call first") == 1
            assert "test_machines.py" in found[0].stack
        assert not [t for t in threading.enumerate() if t.name == "none"]
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert faulthandler.is_enabled() is enabled
    assert ask_flights(tmp_path, [0, 1], seconds=0.05) == {}
    assert collect(tmp_path, {0: os.getpid()}, seconds=0.05)[0].flight is None


def test_the_flights_of_all_ranks_are_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "_request", lambda folder, rank: True)
    flights = tmp_path / "flight_0", tmp_path / "flight_1"
    content = b'{"behind": 0, "groups": {}}\n'
    flights[0].write_bytes(content)
    aside = tmp_path / "aside"
    aside.write_bytes(content)
    timer = threading.Timer(0.1, lambda: aside.replace(flights[1]))
    timer.start()
    assert ask_flights(tmp_path, [0, 1], seconds=5.0) == {0: (), 1: ()}
    timer.join()


def test_states_of_processes_are_the_systems() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + 5
        while not process_states([process.pid])[process.pid].stopped:
            assert time.monotonic() < end
        process.kill()
        while process_states([process.pid])[process.pid] != GONE:  # nobody has reaped it
            assert time.monotonic() < end
    assert process_states([process.pid]) == {process.pid: GONE}
    own = process_states([os.getpid()])[os.getpid()]
    assert own.alive and not own.stopped and own.resident > 1 << 20
    times = os.times()
    assert own.cpu_seconds == pytest.approx(times.user + times.system, abs=0.1)


def test_a_counter_that_appears_counts_from_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sys/fs/cgroup/memory.events"
    path.parent.mkdir(parents=True)
    kills = MemoryKills(tmp_path)
    assert not kills.happened()
    path.write_text("oom_kill 1\n")
    assert kills.happened() and not kills.happened()


def test_neighbours_lie_on_different_machines() -> None:
    assert distance(["a", "a", "b"]) == distance(["b", "a", "a"]) == 2
    assert distance(["a"] * 3) == 1 and distance(["a", "b"]) == 1
    machines = Machines(["a", "a", "b", "b"], 2)
    assert machines.own == "b" and machines.several and machines.is_first
    assert machines.ranks_on("b") == [2, 3]
    assert not dataclasses.replace(machines, rank=3).is_first
    assert not Machines(["a", "a"], 0).several


def test_only_snapshots_of_this_layout_up_to_the_present_step_are_kept() -> None:
    store = MemoryCheckpoints.__new__(MemoryCheckpoints)
    store._layout = dataclasses.asdict(layout_of(dp=2))
    other = dataclasses.asdict(layout_of(tp=2))
    for iteration, layout, kept in (
        (4, store._layout, True), (3, store._layout, True), (5, store._layout, False),
        (4, other, False), (3, None, False),
    ):  # fmt: skip
        snapshot: Any = SimpleNamespace(iteration=iteration, facts={"layout": layout})
        assert store._is_of(snapshot, 4) is kept


def test_the_copies_of_both_snapshots_are_awaited() -> None:
    store = MemoryCheckpoints.__new__(MemoryCheckpoints)
    awaited: list[str] = []
    store._own = SimpleNamespace(files=["older", "newer"])  # type: ignore[assignment]
    store._thread = None
    store.wait()
    store._thread = SimpleNamespace(wait=awaited.append)  # type: ignore[assignment]
    store.wait()
    assert awaited == ["older", "newer"]


def test_a_copy_that_fails_holds_nobody_up(tmp_path: Path) -> None:
    copied: list[int] = []

    def copy(snapshot: Any) -> None:
        time.sleep(0.02)
        if snapshot.iteration == 1:
            raise OSError("no neighbour")
        copied.append(snapshot.iteration)

    thread = CopyThread(copy)
    files = [SnapshotFile(tmp_path / str(number)) for number in range(2)]
    for iteration, file in enumerate(files, start=1):
        thread.start(file.write(iteration, content_of({"x": torch.ones(2)})))
    thread.wait(files[1])
    assert copied == [2]
    waiting = threading.Thread(target=thread.wait, args=(files[0],), daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()
    for iteration in (3, 4):
        thread.start(files[iteration % 2].write(iteration, content_of({})))
    thread.close()
    assert copied == [2, 3, 4]


@ranks(dp=3)
def test_each_rank_holds_the_snapshot_of_its_left_neighbour(context: Any, tmp_path: Path) -> None:
    """Snapshots of unequal sizes, none of which is a whole number of pieces."""
    peers_module.PIECE = 1000
    rank = context.rank
    state = {"x": torch.arange(100 + 1500 * rank, dtype=torch.float32) + rank}
    file = SnapshotFile(tmp_path / f"own_{rank}")
    snapshot = file.write(7, content_of(state), {"rank": rank})
    CopyOverGroup(tmp_path, 1)(snapshot)
    torch.distributed.barrier()
    left = (rank - 1) % 3
    held = [x.read() for x in copy_files(tmp_path, left).files]
    (found,) = [x for x in held if x is not None]
    assert found.is_intact() and found.facts == {"rank": left} and found.iteration == 7
    expected = torch.arange(100 + 1500 * left, dtype=torch.float32) + left
    assert torch.equal(found.state()["x"], expected)


@ranks(timeout=60)
def test_room_and_rests_of_snapshots(context: Any, tmp_path: Path) -> None:
    machines = Machines.of(tmp_path, context)
    assert machines.names[0].startswith(os.uname().nodename)
    how: dict[str, Any] = {"machines": machines, "context": context}
    state = {"value": torch.ones(3000)}
    store = MemoryCheckpoints(tmp_path, 1, **how, neighbours=True)
    assert store.num_copies == 2  # A single rank has no neighbour.
    needed = store.prepare(state, {}, {})
    room = os.statvfs(tmp_path)
    real = os.statvfs

    def free(blocks: int) -> None:
        memory_module.os.statvfs = lambda path: SimpleNamespace(  # type: ignore[assignment]
            f_bavail=blocks, f_frsize=1
        )

    try:
        # The files of this rank are there already, and are written over.
        free(0)
        assert MemoryCheckpoints(tmp_path, 1, **how).prepare(state, {}, {}) == needed
        larger = {"value": torch.ones(60_000)}
        with pytest.raises(CheckpointError, match="snapshots of each of 1 ranks need"):
            MemoryCheckpoints(tmp_path, 1, **how).prepare(larger, {}, {})
        free(10**7)
        assert MemoryCheckpoints(tmp_path, 1, **how).prepare(larger, {}, {}) > needed
    finally:
        memory_module.os.statvfs = real
    assert room.f_frsize
    for iteration in (1, 2):
        store.take(iteration, state, {}, {})
    store.is_behind = True
    store.discard_others(2)
    assert not store.is_behind and len(store.listed()) == 2
    newest = max(store.listed(), key=lambda pair: pair[1].iteration)[0]
    content = bytearray(newest.read_bytes())
    content[5000] ^= 1
    newest.write_bytes(content)
    chosen = Recovery(store, context).newest(0)
    assert chosen is not None and [held.iteration for held in chosen] == [1]
    assert not newest.exists()
    assert Recovery(store, context).newest(1) is None
    MemoryCheckpoints(tmp_path, 1, **how, stays=True).remove()
    assert len(store.listed()) == 1
    store.remove()
    assert store.listed() == []


@ranks(dp=2)
def test_a_machine_that_has_lost_its_snapshots_gets_its_neighbours_copy(
    context: Any, tmp_path: Path
) -> None:
    """Each rank has a folder of its own, as on machines of one rank."""
    peers_module.PIECE = recovery_module.PIECE = 1000
    folder = tmp_path / str(context.rank)
    machines = Machines.of(folder, context)
    store = MemoryCheckpoints(folder, 1, machines, context, neighbours=True)
    state = {"value": torch.arange(700 + 900 * context.rank, dtype=torch.float32)}
    store.prepare(state, {}, {})
    for iteration in (1, 2):
        store.take(iteration, state, {"iteration": iteration}, {"rank": context.rank})
    store.close()
    if context.rank == 1:
        for path in folder.iterdir():
            path.unlink()
    torch.distributed.barrier()
    recovery = Recovery(store, context)
    chosen = recovery.newest(0)
    assert chosen is not None
    assert [(x.rank, x.is_copy, x.iteration) for x in chosen] == [(0, False, 2), (1, True, 2)]
    assert recovery.source(chosen) == "peer" and machines.several
    values, progress, config, where = recovery.state_of(chosen)
    assert (progress, config, where) == ({"iteration": 2}, {"rank": context.rank}, folder)
    assert torch.equal(values["value"], state["value"])


def test_a_damaged_snapshot_is_passed_over_for_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    own, copy, older = (
        held(0, "m0", dp=1),
        held(0, "m0", copy=True, dp=1),
        held(0, "m0", iteration=2, dp=1),
    )
    monkeypatch.setattr(recovery_module, "from_all_ranks", lambda value, fault: [value])
    recovery = Recovery.__new__(Recovery)
    recovery._machines = SimpleNamespace(names=["m0"])  # type: ignore[assignment]
    recovery._layout = layout_of(dp=1)
    monkeypatch.setattr(recovery, "_listed", lambda with_earlier: [older, own, copy])
    for damaged, chosen in ((set(), own), ({own}, copy), ({own, copy}, older)):
        monkeypatch.setattr(recovery, "_damaged", lambda given, bad=damaged: {*given} & bad)
        assert recovery.newest(0) == [chosen]


def held(rank: int, machine: str, *, copy: bool = False, iteration: int = 4, **sizes: int) -> Any:
    layout = layout_of(**sizes)
    return HeldSnapshot(machine, f"{machine}.{rank}.{copy}", rank, iteration, layout, copy)


def test_what_lies_on_the_own_machine_is_preferred_to_what_must_be_sent() -> None:
    far, near = held(0, "m9", dp=1), held(0, "m0", copy=True, dp=1)
    layout, machines = layout_of(dp=1), ["m0"]
    assert choose([far, near], layout, machines, 0) == [near]
    own = held(0, "m0", dp=1)
    assert choose([near, far, own], layout, machines, 0) == [own]
    assert choose([far], layout, machines, 0) == [far]
    assert choose([own], layout, machines, 4) is None
    two = layout_of(dp=2)
    both = [held(1, "m1", dp=2), held(1, "m0", copy=True, dp=2)]
    assert readers_of(both, two, ["m0", "m1"]) == [1, 0]
    # Of two ranks whose snapshots are on this machine, only one is left.
    assert readers_of([held(rank, "m0", dp=2) for rank in (0, 1)], layout, machines) == [0, 0]
    assert same_weights(layout_of(cp=2), layout_of(dp=2))
    assert not same_weights(layout_of(tp=2), layout_of(dp=2))
    assert Recovery.source([own, near]) == "peer" and Recovery.source([own, far]) == "memory"


def test_a_process_in_the_place_of_an_earlier_one_is_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_HOST_FOLDER", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name in ("MEGATRON_EXT_GENERATION", FAULT_TIME_VARIABLE, FAULT_STEP_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    follow_earlier_process()
    assert "MEGATRON_EXT_GENERATION" not in os.environ
    slot = Board.of_machine(tmp_path).slot(1)
    words = {Word.PID: os.getpid(), Word.RANK: 5, Word.GENERATION: 3, Word.ITERATION: 7}
    for word, value in {**words, Word.STARTED: 12_500_000_000}.items():
        slot.set(word, value)
    follow_earlier_process()
    assert "MEGATRON_EXT_GENERATION" not in os.environ
    slot.set(Word.PID, 4242)
    follow_earlier_process()
    assert os.environ["MEGATRON_EXT_GENERATION"] == "4"
    assert os.environ[FAULT_TIME_VARIABLE] == "12.5" and os.environ[FAULT_STEP_VARIABLE] == "7"
    monkeypatch.delenv("MEGATRON_EXT_GENERATION")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "9")
    follow_earlier_process()
    assert os.environ["MEGATRON_EXT_GENERATION"] == "9"


def test_a_restart_is_told_once_by_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = SimpleNamespace(
        context=SimpleNamespace(rank=0, layout=layout_of(dp=2)),
        config=SimpleNamespace(checkpoint=SimpleNamespace(save=str(tmp_path))),
        progress=SimpleNamespace(iteration=4),
        restored_from="peer",
    )
    monkeypatch.setenv("MEGATRON_EXT_GENERATION", "2")
    assert not RestartReport.is_due(run)
    monkeypatch.setenv(FAULT_TIME_VARIABLE, repr(time.monotonic() - 3.0))
    monkeypatch.setenv(FAULT_STEP_VARIABLE, "3")
    assert RestartReport.is_due(run)
    run.context.rank = 1
    assert not RestartReport.is_due(run)
    report = RestartReport(run)
    report.before_step()
    report.before_step()
    (told,) = read_events(tmp_path)
    assert (told["iteration"], told["restored_iteration"], told["restored_from"]) == (5, 4, "peer")
    assert (told["steps_lost"], told["generation"], told["world_size"]) == (0, 2, 2)
    assert 3.0 <= told["seconds"] < 4.0
    monkeypatch.setenv(FAULT_STEP_VARIABLE, "6")
    RestartReport(run).before_step()
    assert read_events(tmp_path)[1]["steps_lost"] == 2


def policy_of(save: Path, max_restarts: int = 1) -> restarts.RestartPolicy:
    return restarts.RestartPolicy(max_restarts, str(save), (8, 4, 2), 2, lambda size: lambda: None)


def test_a_request_is_the_largest_size_that_fits(tmp_path: Path) -> None:
    policy = policy_of(tmp_path)
    assert policy.requested_size() is None and policy.is_elastic
    for nodes, size in ((9, 8), (4, 8), (3, 4), (2, 4), (1, 2), (0, 2)):
        (tmp_path / REQUESTED_NODES).write_text(f"{nodes}\n")
        assert (policy.requested_size() or ())[0] == size
    assert [policy.smaller_size(size) for size in (8, 4, 2)] == [4, 2, None]
    before = requested_nodes(str(tmp_path))
    os.utime(tmp_path / REQUESTED_NODES, ns=(1, 1))
    assert requested_nodes(str(tmp_path)) == (0, 1) != before
    (tmp_path / REQUESTED_NODES).write_text("many")
    assert policy.requested_size() is None


@pytest.fixture
def launcher(tmp_path: Path) -> Any:
    for name in ("save", "host"):
        (tmp_path / name).mkdir()
    (tmp_path / "save" / REQUESTED_NODES).write_text("1")
    made = restarts._Launcher(
        lambda *_: None,  # type: ignore[arg-type, return-value]
        policy_of(tmp_path / "save", 2),
        SignalForwarder(),
        tmp_path / "host",
        1.0,
    )
    made._drawings = SimpleNamespace(start=lambda folder: None)  # type: ignore[assignment]
    return made


def test_a_launcher_asks_for_another_size_once_for_each_request(
    launcher: Any, tmp_path: Path
) -> None:
    path, asked = tmp_path / "save" / REQUESTED_NODES, tmp_path / "host" / RESIZE
    launcher._check_request()
    assert not asked.exists()  # It was made to an earlier run.
    path.write_text("4")
    os.utime(path, ns=(2, 2))
    launcher._check_request()
    assert not asked.exists()  # The size is that already.
    path.write_text("2")
    os.utime(path, ns=(3, 3))
    launcher._environment[FAULT_STEP_VARIABLE] = "5"
    launcher._check_request()
    assert asked.exists() and launcher._environment[FAULT_STEP_VARIABLE] == "0"
    asked.unlink()
    launcher._check_request()
    assert not asked.exists()
    asked.write_text("")
    launcher._resize()
    assert not asked.exists() and launcher._size == 4


def test_a_launcher_follows_faults_as_long_as_it_may(
    launcher: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = Fault(3, "SIGKILL", 12.5, iteration=7)
    assert launcher._follow(fault, 137, None) < 0
    environment = launcher._environment
    assert environment[FAULT_TIME_VARIABLE] == "12.5" and environment[FAULT_STEP_VARIABLE] == "7"
    assert launcher._follow(dataclasses.replace(fault, iteration=None), 137, None) < 0
    assert environment[FAULT_STEP_VARIABLE] == "0"
    assert launcher._follow(fault, 137, None) == 137
    assert capsys.readouterr().out.splitlines() == [
        "> rank 3 has failed at iteration 7 (SIGKILL); restart 1 of 2",
        "> rank 3 has failed (SIGKILL); restart 2 of 2",
        "> rank 3 has failed at iteration 7 (SIGKILL); the run ends, for it has been started again "
        "as often as `--max-restarts` (2) allows",
    ]
    launcher._forwarder.stop_signal = signal.SIGINT
    assert launcher._follow(fault, 1, None) == 130


def test_fewer_ranks_go_on_where_a_fault_comes_back(launcher: Any) -> None:
    launcher._history = restarts.History(9)
    fault = Fault(3, "SIGKILL", 12.5, iteration=7)
    sizes = []
    for _ in range(6):
        assert launcher._follow(fault, 137, None) < 0
        sizes.append(launcher._size)
    assert sizes == [8, 8, 4, 4, 2, 2]
    assert launcher._follow(fault, 137, None) == EXIT_CODE_COMES_BACK


@pytest.fixture
def forwarder() -> Iterator[SignalForwarder]:
    with SignalForwarder() as made:
        yield made
        for pid in made.children:
            os.kill(pid, signal.SIGKILL)


def supervised(
    forwarder: SignalForwarder, scripts: dict[int, str], **how: Any
) -> tuple[RestartSupervisor, int]:
    """Supervise shells as ranks; return the supervisor and its exit code."""
    for rank, script in scripts.items():
        process = subprocess.Popen(["bash", "-c", script])
        process.returncode = 0  # The supervisor reaps it.
        forwarder.children[process.pid] = rank
    given = {"watcher": None, "save": None, "generation": 0, "check_request": lambda: None}
    supervisor = RestartSupervisor(forwarder, 1.0, **{**given, **how})  # type: ignore[arg-type]
    return supervisor, supervisor.wait()


@pytest.mark.parametrize("code", [0, 2, 121, 125, 130, 143])
def test_ranks_that_end_on_purpose_are_no_fault(code: int, forwarder: SignalForwarder) -> None:
    supervisor, found = supervised(forwarder, {0: f"exit {code}"})
    assert (found, supervisor.fault) == (code, None)


def test_faults_are_logged_with_rank_and_cause(
    forwarder: SignalForwarder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwarder.received.add(signal.SIGUSR1)
    supervisor, code = supervised(forwarder, {0: "kill -USR1 $$"})
    assert (code, supervisor.fault) == (128 + signal.SIGUSR1, None)
    # Rank 4 ends after the supervisor has reaped rank 5.
    first = f"echo $$ > {tmp_path}/pid; exit 123"
    pid = f'pid=$(cat {tmp_path}/pid 2>/dev/null) && [ "$pid" ]'
    second = f"until {pid} && ! kill -0 $pid 2>/dev/null; do sleep 0.01; done; exit 123"
    supervisor, code = supervised(
        forwarder, {4: second, 5: first}, save=str(tmp_path), generation=2
    )
    assert code == 123 and supervisor.fault is not None
    assert (supervisor.fault.rank, supervisor.fault.cause) == (5, "lost contact")
    polls = list[float]()
    reap = RestartSupervisor._reap

    def poll(supervisor: RestartSupervisor) -> bool:
        if supervisor.fault is None:
            polls.append(time.monotonic())
        return reap(supervisor)

    monkeypatch.setattr(RestartSupervisor, "_reap", poll)
    supervisor, code = supervised(forwarder, {0: "sleep 0.2; exit 1"}, save=str(tmp_path))
    since_last_poll = time.monotonic() - polls[-2]
    assert code == 1
    contact, exception = read_events(tmp_path)
    assert (contact["rank"], contact["cause"], contact["generation"]) == (5, "lost contact", 2)
    assert (exception["rank"], exception["cause"]) == (0, "exception")
    assert 0 <= exception["seen_after"] <= since_last_poll
    forwarder.stop_signal = signal.SIGTERM
    supervisor, _ = supervised(forwarder, {0: "exit 1"})
    assert supervisor.fault is None


def test_after_a_fault_nobody_is_asked_politely(forwarder: SignalForwarder, tmp_path: Path) -> None:
    """Otherwise ranks have time to clean up."""
    deaf = "trap '' TERM; sleep 60 & wait; sleep 60"
    begun = time.monotonic()
    supervised(forwarder, {0: "sleep 0.2; exit 1", 1: deaf})
    assert time.monotonic() - begun < 2.5
    cleans = f"trap 'sleep 0.3; touch {tmp_path}/clean; exit 0' TERM; sleep 60 & wait"
    _, code = supervised(forwarder, {0: "sleep 0.2; exit 2", 1: cleans})
    assert code == 2 and (tmp_path / "clean").exists()


class Told:
    """Stands in for a watcher; ``board`` is what it reads."""

    def __init__(self) -> None:
        self.records = [record(2, 100.0, iteration=4), record(1, 99.0, iteration=5)]
        self.board = SimpleNamespace(read=lambda _: self.records)
        self.blamed: tuple[int, ...] = (1, 2)
        self.killed = False

    def killed_for_memory(self) -> bool:
        return self.killed

    def investigate(self, verdict: Verdict, **how: Any) -> Case:
        return Case(how["cause"], Blame(self.blamed, "hangs", ()), self.records, 106.0)


def _told_of_a_hang(forwarder: SignalForwarder, watcher: Any, save: Path) -> TellingSupervisor:
    supervisor = TellingSupervisor(forwarder, 1.0, watcher=watcher, save=str(save))
    supervisor._drawings = SimpleNamespace(start=lambda folder: None)  # type: ignore[assignment]
    supervisor._hangs(Verdict(Kind.HANG, (), 6.0))
    return supervisor


def test_a_hang_that_ends_by_itself_makes_the_watcher_patient(
    forwarder: SignalForwarder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher: Any = Told()
    supervisor = _told_of_a_hang(forwarder, watcher, tmp_path)
    assert supervisor.fault is not None
    fault = supervisor.fault
    assert (fault.rank, fault.cause, fault.iteration, fault.seen_after) == (1, "hang", 5, 6.0)
    (told,) = read_events(tmp_path)
    assert told["postmortem"] == "postmortem_1" and told["where"].startswith("in step 5")
    case = supervisor._hung
    assert case is not None
    supervisor._see_whether_it_goes_on(case)
    assert supervisor.fault is fault  # Nobody has gone on yet.
    watcher.records = [record(2, 100.0), record(1, 111.0)]
    supervisor._see_whether_it_goes_on(case)
    assert supervisor.fault is None and supervisor._hung is None
    assert capsys.readouterr().err.endswith("[rank 1] goes on, after 12.0 s\n")
    supervisor._hangs(Verdict(Kind.HANG, (), 23.0))
    assert supervisor.fault is None
    supervisor._hangs(Verdict(Kind.HANG, (), 25.0))
    assert supervisor.fault is not None
    unknown = dataclasses.replace(case, blame=Blame((), "", ()))
    supervisor._see_whether_it_goes_on(unknown)
    assert supervisor.fault is None


def test_a_hang_is_told_without_a_folder_and_an_end_that_was_asked_for_is_none(
    forwarder: SignalForwarder, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher: Any = Told()
    telling = TellingSupervisor(forwarder, 1.0, watcher=watcher, save=None)
    telling._hangs(Verdict(Kind.HANG, (), 6.0))
    assert capsys.readouterr().err.startswith("Rank 1 (and rank 2) stopped first: it hangs, in st")
    telling._note(Verdict(Kind.DEAD, (1,), 0.0), "exception")
    assert capsys.readouterr().err == ""
    for stop_signal, is_hang in ((signal.SIGTERM, False), (None, True)):
        forwarder.stop_signal = stop_signal
        ending = RestartSupervisor(
            forwarder, 2.0, watcher=None, save=None, generation=0, check_request=lambda: None
        )
        ending._code = EXIT_CODE_NO_ANSWER
        ending._end_all()
        assert (ending.fault is not None) is is_hang
        assert ending.fault is None or ending.fault.seen_after == 120.0


@pytest.mark.parametrize(
    ("cause", "killed", "told"),
    [("SIGKILL", True, "memory"), ("SIGKILL", False, "SIGKILL"), ("exception", True, "exception")],
)
def test_only_a_kill_may_be_one_for_memory(
    cause: str, killed: bool, told: str, forwarder: SignalForwarder
) -> None:
    watcher: Any = Told()
    watcher.killed = killed
    supervisor = TellingSupervisor(forwarder, 1.0, watcher=watcher, save=None)
    supervisor._polled -= 3.0
    supervisor._note(Verdict(Kind.DEAD, (1,), 0.0), cause)
    assert supervisor.fault is not None and supervisor.fault.cause == told
    assert supervisor.postmortem is None
    assert 3.0 <= (supervisor.fault.seen_after or 0.0) < 4.0


def test_a_hang_is_told_once_as_long_as_it_lasts(
    forwarder: SignalForwarder, tmp_path: Path
) -> None:
    watcher: Any = Told()
    asked: list[dict[int, int]] = []
    hang = [Verdict(Kind.DEAD, (2,), 1.0), Verdict(Kind.HANG, (), 6.0)]
    watcher.look = lambda pids: asked.append(pids) or hang
    watcher.tell_slow_ranks = lambda *_: None
    telling = TellingSupervisor(forwarder, 1.0, watcher=watcher, save=str(tmp_path))
    telling._drawings = SimpleNamespace(start=lambda folder: None)  # type: ignore[assignment]
    for seconds in (0.05, 1.0, 1.05, 2.0, 3.0):
        telling._look(telling._polled + seconds)
    assert len(asked) == 3  # not within a tenth of a second
    assert [event["cause"] for event in read_events(tmp_path)] == ["hang"]


def test_a_death_after_a_hang_takes_its_place(
    forwarder: SignalForwarder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank that ends prints why it does, unless the kernel has killed it for its memory."""
    telling = _told_of_a_hang(forwarder, Told(), tmp_path)
    assert telling._hung is not None and telling.postmortem == tmp_path / "postmortem_1"
    telling._failed(1, 2)
    assert telling._hung is None and telling.postmortem is None
    capsys.readouterr()
    telling._tell_end(Fault(3, "memory", 0.0), 1)
    telling._tell_end(Fault(3, "SIGKILL", 0.0), 137)
    assert capsys.readouterr().err == ""
    telling._tell_end(Fault(3, "memory", 0.0), 137)
    assert capsys.readouterr().err == "the kernel has killed rank 3 for want of memory\n"


def guard_of(machine: Machine, monkeypatch: pytest.MonkeyPatch, place: int) -> Any:
    """Return the guard of a local rank, whose board is real and whose verdicts are made up."""
    monkeypatch.setenv("LOCAL_RANK", str(place))
    watcher: Any = SimpleNamespace(
        board=Board(machine.watcher.folder / "own_board", 3), look=list, asked=[]
    )
    watcher.tell_slow_ranks = watcher.asked.append
    for index in range(3):
        watcher.board.slot(index).set(Word.PID, 4000 + index)
    return hang_guard_module._Guard(watcher, None, threading.Event()), watcher


def test_the_lowest_rank_that_looks_is_the_one_that_tells(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, watcher = guard_of(machine, monkeypatch, 1)
    now = time.monotonic_ns()
    for looked, mine in ((0, True), (now, False), (now - 5 * 10**9, True)):
        watcher.board.slot(0).set(Word.LOOKED, looked)
        watcher.board.slot(1).set(Word.LOOKED, now)
        watcher.board.slot(2).set(Word.LOOKED, now)
        assert guard._is_my_turn() is mine
    # It says itself that it looks, in whatever it finds.
    watcher.board.slot(1).set(Word.LOOKED, 0)
    hang, told = Verdict(Kind.HANG, (), 9.0), []
    rounds = iter([[], [Verdict(Kind.DEAD, (0,), 1.0)], [hang], [hang], [hang]])
    watcher.look = lambda: next(rounds)
    monkeypatch.setattr(guard, "_tell", lambda verdict: told.append(verdict) or len(told) == 2)
    over = iter([False] * 5 + [True])
    guard._over = SimpleNamespace(wait=lambda seconds: next(over))
    guard.run()
    assert watcher.board.read_slot(1).looked > 0
    assert told == [hang, hang] and watcher.asked == [None, None]


@pytest.mark.parametrize("restarts", ["0", "2"])
def test_a_hang_is_ended_only_if_torchrun_starts_the_ranks_again(
    restarts: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(hang_guard_module.os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(hang_guard_module, "start_drawing", lambda folder: None)
    guard, watcher = guard_of(machine, monkeypatch, 0)
    guard._save = str(tmp_path / "save")
    board = [record(0, 99.0, iteration=4), record(1, 98.0, iteration=5), record(2, 97.0)]
    case = Case("hang", Blame((1,), "hangs", ()), board, 106.0)
    watcher.investigate = lambda hang: case
    assert guard._tell(Verdict(Kind.HANG, (), 8.25))
    assert killed == ([(101, signal.SIGKILL)] if restarts == "2" else [])
    (told,) = read_events(tmp_path / "save")
    assert (told["rank"], told["cause"], told["iteration"], told["seen_after"]) == (
        1,
        "hang",
        7,
        8.25,
    )
    watcher.investigate = lambda hang: dataclasses.replace(case, blame=Blame((7,), "", ()))
    assert not guard._tell(Verdict(Kind.HANG, (), 8.25))
    assert len(read_events(tmp_path / "save")) == 1


def test_a_guard_ends_with_its_rank(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    config: Any = SimpleNamespace(
        parallel=SimpleNamespace(distributed_timeout_minutes=1.0),
        checkpoint=SimpleNamespace(save=None),
    )
    with hang_guard_module.hang_guard(config, 0):
        assert not [t for t in threading.enumerate() if t.name == "hang guard"]
    monkeypatch.setenv("MEGATRON_EXT_HOST_FOLDER", str(machine.watcher.folder))
    with hang_guard_module.hang_guard(config, 0):
        assert [t for t in threading.enumerate() if t.name == "hang guard"]
    assert not [t for t in threading.enumerate() if t.name == "hang guard"]


def stores_of(host: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> list[Any]:
    machines: Any = SimpleNamespace(names=["m", "m"], several=False, is_first=True)
    monkeypatch.setattr(snapshots.Machines, "of", lambda folder, context: machines)
    context: Any = SimpleNamespace(layout=layout_of(dp=2), rank=0)
    return snapshots.snapshot_stores(CheckpointConfig(**flags), context, host)


def test_snapshots_lie_where_their_flags_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    host = tmp_path / "host"
    host.mkdir()
    peer = {"peer_checkpoint_interval": 3, "save": "save"}
    (store,) = stores_of(host, monkeypatch, **peer)
    assert (store.folder, store.interval, store.num_copies) == (host / "snapshots", 3, 4)
    assert not store.left and not store.stays
    (host / TAKEN_OVER).write_text("")
    for load, left in ((None, True), ("save", True), (str(tmp_path / "save"), True), ("x", False)):
        (store,) = stores_of(host, monkeypatch, **peer, load=load)
        assert store.left is left, load
    memory = {"non_persistent_save_interval": 2, "non_persistent_ckpt_type": "in_memory"}
    (store,) = stores_of(host, monkeypatch, save="save", **memory)
    assert (store.folder.name, store.num_copies, store.left) == ("non_persistent", 2, True)
    local = {
        "non_persistent_save_interval": 2,
        "non_persistent_ckpt_type": "local",
        "non_persistent_local_ckpt_dir": "local",
    }
    (store,) = stores_of(host, monkeypatch, save="save", **local)
    assert store.stays and store.folder.parent == Path("local") and store._earlier == set()
    (same,) = stores_of(host, monkeypatch, save=str(tmp_path / "save"), **local)
    (other,) = stores_of(host, monkeypatch, save="other/save", load="save", **local)
    assert same.folder == store.folder != other.folder
    assert other._earlier == {store.folder}
    with pytest.raises(CheckpointError, match="needs a folder in memory"):
        stores_of(None, monkeypatch, **peer)  # type: ignore[arg-type]


class Store:
    """Notes what is asked of a store of snapshots."""

    def __init__(self, asked: list[Any], interval: int, *, is_behind: bool = False) -> None:
        self.interval, self.is_behind, self._asked = interval, is_behind, asked
        self.num_copies, self.folder = 2, Path("x")

    def __getattr__(self, name: str) -> Any:
        def note(*given: Any) -> int:
            self._asked.append((name, self.interval, *given[:1]))
            return 0

        return note


def test_snapshots_are_taken_when_they_are_due(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    run: Any = SimpleNamespace(
        stores=[Store(asked, 2), Store(asked, 3, is_behind=True)],
        progress=SimpleNamespace(iteration=4),
        context=SimpleNamespace(rank=1, recorder=SimpleNamespace(phase=lambda _: nullcontext())),
    )
    callback = snapshots.Snapshots(run, lambda: asked.append("settled"))
    monkeypatch.setattr(callback, "state", lambda: ("state", {}, {}))
    callback.on_train_start()
    assert asked == [
        ("prepare", 2, "state"), ("discard_others", 2, 4),
        ("prepare", 3, "state"), ("take", 3, 4), ("wait", 3), ("discard_others", 3, 4),
    ]  # fmt: skip
    assert capsys.readouterr().out == ""
    run.context.rank = 0
    callback.on_train_start()
    assert capsys.readouterr().out == "".join(
        f"> snapshots after every {steps} steps: 2 for each rank, 0.0 MiB on this machine, in x\n"
        for steps in (2, 3)
    )
    taken = []
    for iteration in (5, 6, 8):
        asked.clear()
        run.progress.iteration = iteration
        callback.after_save()
        taken.append([*asked])
    assert taken == [[], ["settled", ("take", 2, 6), ("take", 3, 6)], ["settled", ("take", 2, 8)]]


def test_a_picture_shows_the_last_steps_of_each_rank() -> None:
    def rank(*events: tuple[float, str]) -> dict[str, Any]:
        return {"events": [[at, kind, kind, "forward", 1] for at, kind in events]}

    three = [(-float(at), "STEP") for at in range(9, 0, -1)]
    assert first_time([rank(*three)]) == -3.0
    assert first_time([rank(*three), rank(*((at + 0.5, kind) for at, kind in three))]) == -3.0
    assert first_time([rank((-30.0, "STEP"))]) == -20.0
    assert first_time([rank((-4.0, "BEGIN"), (-2.0, "BEGIN"))]) == -4.0
    assert first_time([rank()]) == -1.0
    events = [[-3.0, "BEGIN", "x", "data"], [-2.0, "BEGIN", "x", "forward"]]
    assert list(spans(events)) == [(-3.0, -2.0, "data"), (-2.0, 0.0, "forward")]
