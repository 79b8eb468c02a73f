"""The recorder of a rank and its slot of the board, read by another process while it is written."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.parallel.board import (
    BOARD,
    BOUNDLESS,
    MAX_NAMES,
    PHASES,
    RING,
    Board,
    EventKind,
    Word,
)
from megatron_ext.parallel.recorder import Recorder, open_recorder
from megatron_ext.schedules.plan import Action, Kind


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / BOARD, 2)


def open_slot(board: Board, index: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    for name, value in {"LOCAL_RANK": index, "RANK": index + 4, "WORLD_SIZE": 6}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return open_recorder(folder)


def test_a_reader_sees_phases_actions_messages_and_steps(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert board.read() == []
    monkeypatch.setenv("MEGATRON_EXT_GENERATION", "3")
    recorder = open_slot(board, 1, tmp_path, monkeypatch)
    recorder.place(5, 6, 1)
    with recorder.phase("data"):
        recorder.mark("shard opened")
    recorder.step(7)
    with recorder.action(Action(Kind.RECEIVE_INPUT, 2, 3, peer=0), 4):
        pass
    wait = recorder.waiting(Kind.RECEIVE_INPUT.value, 2, 3, 4)
    with recorder.action(Action(Kind.FORWARD, 2, 3)), wait:
        pass
    [seen] = board.read()
    assert (seen.rank, seen.world_size, seen.pipeline_rank) == (5, 6, 1)
    assert (seen.pid, seen.generation, seen.iteration, seen.steps) == (os.getpid(), 3, 7, 1)
    told = [(e.kind.name, e.name, e.phase, e.iteration) for e in seen.events]
    assert told == [
        ("BEGIN", "data", "data", 0),
        ("MARK", "shard opened", "data", 0),
        ("END", "data", "start", 0),
        ("STEP", "step", "other", 7),
        ("BEGIN", "receive input", "bubble", 7),
        ("END", "receive input", "other", 7),
        ("BEGIN", "F", "forward", 7),
        ("BEGIN", "wait: receive input", "bubble", 7),
        ("END", "wait: receive input", "forward", 7),
        ("END", "F", "other", 7),
    ]
    waits = seen.events[7]
    assert (waits.microbatch, waits.stage, waits.peer) == (2, 3, 4)
    assert not seen.ended
    recorder.close()
    assert board.read()[0].ended


def test_the_messages_of_a_rank_name_peer_0_and_weight_gradients_are_backward(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = open_slot(board, 0, tmp_path, monkeypatch)
    for kind, peer in (
        (Kind.SEND_GRADIENT, 0),
        (Kind.WEIGHT, None),
        (Kind.INPUT, None),
        (Kind.BACKWARD, None),
    ):
        with recorder.action(Action(kind, 1, 1, peer=peer), peer):
            pass
    [seen] = board.read()
    begun = [(e.name, e.phase, e.peer) for e in seen.events if e.kind is EventKind.BEGIN]
    assert begun == [
        ("send gradient", "bubble", 0),
        ("W", "backward", -1),
        ("I", "backward", -1),
        ("B", "backward", -1),
    ]


def test_each_phase_has_its_own_time_and_all_sum_to_the_time_that_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 7_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)

    def work(seconds: int) -> None:
        nonlocal now
        now += seconds * 1_000_000_000

    recorder = Recorder()
    work(1)
    recorder.step(1)
    with recorder.phase("forward"):
        work(2)
        with recorder.phase("bubble"):
            work(4)
        work(8)
    with recorder.phase("evaluate"), recorder.phase("forward"):
        work(16)
    work(32)
    assert recorder.seconds == {
        "start": 1, "forward": 10, "bubble": 4, "evaluate": 16, "other": 32
    }  # fmt: skip


def test_a_save_has_the_time_of_the_phases_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    recorder = Recorder()
    recorder.step(1)
    with recorder.phase("save"), recorder.phase("update"):
        now += 2_000_000_000
    assert recorder.seconds == {"save": 2}


def test_the_mean_step_follows_the_latest_steps(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 16 steps each new one counts for a sixteenth."""
    now = 0
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    recorder = open_slot(board, 0, tmp_path, monkeypatch)
    mean = 0.0
    for number in range(1, 41):
        recorder.step(number)
        seconds = 1 if number < 30 else 5
        with recorder.phase("forward"):
            now += seconds * 1_000_000_000
        mean += (seconds - mean) / min(number, 16)
    recorder.step(41)
    assert board.read()[0].mean_step == pytest.approx(mean, rel=1e-6)


def test_the_mean_step_does_not_count_saves_and_evaluations(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 7_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    recorder = open_slot(board, 0, tmp_path, monkeypatch)
    for iteration in range(1, 4):
        recorder.step(iteration)
        with recorder.phase("forward"):
            now += iteration * 1_000_000_000
        with recorder.phase("save"):
            now += 100_000_000_000
    [seen] = board.read()
    assert (seen.mean_step, seen.steps) == (1.5, 3)


def test_listeners_hear_each_event_with_its_action() -> None:
    heard: list[tuple[str, int, Any]] = []
    heard_second: list[tuple[str, int, Any]] = []
    recorder = Recorder()
    recorder.listeners += [
        lambda *event: heard.append(event),
        lambda *event: heard_second.append(event),
    ]
    action = Action(Kind.BACKWARD, 1, 0)
    recorder.step(2)
    with recorder.action(action):
        pass
    with recorder.phase("save"):
        recorder.mark("renamed")
    assert heard == [
        ("step", 2, None),
        ("B", 2, action),
        ("B", 2, "end"),
        ("save", 2, "begin"),
        ("renamed", 2, None),
        ("save", 2, "end"),
    ]
    assert heard_second == heard


def test_an_error_is_marked_in_the_phase_that_raised_it(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = open_slot(board, 0, tmp_path, monkeypatch)
    with pytest.raises(ZeroDivisionError), recorder.phase("update"):
        raise ZeroDivisionError
    [seen] = board.read()
    [mark] = [event for event in seen.events if event.kind is EventKind.MARK]
    assert (mark.name, mark.phase) == ("ZeroDivisionError", "update")


def _write_forever(path: Path, started: Any) -> None:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    recorder = open_recorder(path.parent)
    started.set()
    for iteration in range(1_000_000_000):
        recorder.step(iteration)
        with recorder.action(Action(Kind.FORWARD, iteration % 1000, iteration % 7)):
            pass


def test_a_phase_ends_whose_beginning_a_listener_refuses(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = open_slot(board, 0, tmp_path, monkeypatch)
    recorder.step(1)

    def refuse(name: str, iteration: int, detail: Any) -> None:
        if detail == "begin":
            raise RuntimeError

    recorder.listeners.append(refuse)
    with pytest.raises(RuntimeError), recorder.phase("update"):
        pass
    [seen] = board.read()
    assert seen.phase == "other"
    assert [event.name for event in seen.events] == ["step", "update", "RuntimeError", "update"]


def test_a_reader_never_sees_a_torn_event(board: Board, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    started = fork.Event()
    writer = fork.Process(target=_write_forever, args=(tmp_path / BOARD, started))
    writer.start()
    try:
        assert started.wait(10)
        full, end = 0, time.monotonic() + 1.0
        while time.monotonic() < end:
            [seen] = board.read()
            full += len(seen.events) > RING // 2
            numbers = [event.number for event in seen.events]
            assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
            for event in seen.events:
                if event.name == "F" and event.kind is EventKind.BEGIN:
                    assert event.microbatch == event.iteration % 1000
                    assert event.stage == event.iteration % 7
            assert [e.time for e in seen.events] == sorted(e.time for e in seen.events)
        assert full > 0
    finally:
        writer.kill()
        writer.join()


def test_a_slot_without_events_is_at_its_start(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = time.monotonic()
    recorder = open_slot(board, 1, tmp_path, monkeypatch)
    after = time.monotonic()
    seen = board.read_slot(1)
    assert seen is not None and board.read_slot(0) is None
    assert before <= seen.started <= after
    assert (seen.phase, seen.last, seen.last_time) == ("start", None, seen.started)
    assert (seen.rank, seen.world_size, seen.looked, seen.seconds) == (5, 6, 0.0, {})
    slot = board.slot(1)
    slot.set(Word.LOOKED, 2_500_000_000)
    for number in range(4):
        recorder.mark(f"mark {number}")
    seen = board.read_slot(1, num_events=2)
    assert seen is not None and seen.last is not None
    assert seen.looked == 2.5
    assert [event.name for event in seen.events] == ["mark 2", "mark 3"]
    assert seen.last_time == seen.last.time > seen.events[0].time
    assert {"start", "other", "save", "evaluate"} == BOUNDLESS


def test_a_long_name_is_cut_and_hides_no_other(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = open_slot(board, 0, tmp_path, monkeypatch)
    recorder.mark("a" * 60)
    recorder.mark("b")
    assert [event.name for event in board.read()[0].events] == ["a" * 47, "b"]


def test_only_the_owner_reads_a_board(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Board(tmp_path / "own", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600


def test_a_new_process_starts_with_an_empty_slot(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_slot(board, 0, tmp_path, monkeypatch)
    first.step(9)
    first.mark("old")
    again = open_slot(board, 0, tmp_path, monkeypatch)
    [seen] = board.read()
    assert (seen.iteration, seen.events, seen.seconds) == (0, (), {})
    again.mark("new")
    assert [event.name for event in board.read()[0].events] == ["new"]


def test_a_board_without_room_leaves_a_recorder_that_only_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    recorder = open_recorder(tmp_path)
    assert capsys.readouterr().out == (
        "note: no heartbeats, for the board cannot be made ([Errno 28] No space left on device)\n"
    )
    recorder.step(1)
    with recorder.phase("forward"):
        pass
    assert recorder.seconds.keys() >= {"forward", "other"}
    monkeypatch.setenv("LOCAL_RANK", "1")
    open_recorder(tmp_path)
    assert capsys.readouterr().out == ""


def test_names_beyond_the_room_share_the_last_one(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = open_slot(board, 0, tmp_path, monkeypatch)
    for number in range(MAX_NAMES):
        recorder.mark(f"mark {number}")
    names = [event.name for event in board.read()[0].events]
    room = MAX_NAMES - len(PHASES) - 1
    assert names == [f"mark {n}" for n in range(room)] + ["..."] * (MAX_NAMES - room)
