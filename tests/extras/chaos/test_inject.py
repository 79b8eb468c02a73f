"""Faults happen where they are armed, once in all restarts, and on the chosen rank only."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.extras.chaos import inject
from megatron_ext.extras.chaos.inject import (
    SLOW,
    VARIABLE,
    Fault,
    Injector,
    arm,
    as_variable,
    record_file,
)
from megatron_ext.extras.chaos.strikes import InjectedFault
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.schedules.plan import Action, Kind

Event = tuple[str, int, Any]
STEP = [
    ("step", 0, None),
    ("data", 0, "begin"),
    ("data", 0, "end"),
    ("F", 0, Action(Kind.FORWARD, 0, 0)),
    ("F", 0, "end"),
    ("F", 0, Action(Kind.FORWARD, 1, 0)),
    ("F", 0, "end"),
    ("I", 0, Action(Kind.INPUT, 1, 0)),
    ("I", 0, "end"),
    ("FB", 0, Action(Kind.PAIR, 2, 0, backward=Action(Kind.BACKWARD, 0, 0))),
    ("FB", 0, "end"),
    ("update", 0, "begin"),
    ("update", 0, "end"),
]
"""The events of a step, whose number is filled in."""


@pytest.fixture(autouse=True)
def own_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``os.fsync`` back after a test that has armed faults."""
    monkeypatch.setattr(os, "fsync", os.fsync)


def armed() -> Injector:
    recorder = Recorder()
    injector = arm(recorder, None)
    assert injector is not None and recorder.listeners == [injector]
    return injector


def struck_at(
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int = 0,
    generation: int = 0,
    folder: Path | None = None,
) -> Event | None:
    """Return the event of five steps at which an exception was injected, if any."""
    for name, value in as_variable([fault], folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MEGATRON_EXT_GENERATION", str(generation))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    injector = armed()
    for iteration in range(1, 6):
        for name, _, detail in STEP:
            try:
                injector(name, iteration, detail)
            except InjectedFault:
                return name, iteration, detail
    return None


@pytest.mark.parametrize(
    ("at", "event"),
    [
        ("step", STEP[0]),
        ("data", STEP[1]),
        ("end of data", STEP[2]),
        ("forward", STEP[3]),
        ("forward of micro-batch 1", STEP[5]),
        ("forward of micro-batch 2", STEP[9]),
        ("backward of micro-batch 1", STEP[7]),
        ("backward", STEP[7]),
        ("end of forward", STEP[4]),
        ("update", STEP[11]),
        ("backward of micro-batch 7", None),
    ],
)
def test_a_fault_happens_at_the_named_event(
    at: str, event: Event | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("exception", iteration=3, rank=0, at=at)
    found = struck_at(fault, monkeypatch)
    assert found == (None if event is None else (event[0], 3, event[2]))


def test_without_the_variable_no_event_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    recorder = Recorder()
    assert arm(recorder, None) is None
    assert recorder.listeners == []


def test_a_fault_knows_the_folders_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, as_variable([Fault("corrupt checkpoint", 3)])[VARIABLE])
    monkeypatch.setattr(inject, "host_folder", lambda: tmp_path / "host")
    for save in (None, str(tmp_path / "save")):
        injector = arm(Recorder(), save)
        assert injector is not None
        assert (injector._save, injector._host) == (save and Path(save), tmp_path / "host")


def test_a_restart_can_be_struck_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault("exception", iteration=0, rank=0, at="start", generation=1)
    monkeypatch.setenv(VARIABLE, as_variable([fault])[VARIABLE])
    armed()
    monkeypatch.setenv("MEGATRON_EXT_GENERATION", "1")
    with pytest.raises(InjectedFault):
        armed()


def test_other_ranks_and_restarted_runs_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault("exception", iteration=2, rank=1)
    assert struck_at(fault, monkeypatch, rank=0) is None
    assert struck_at(fault, monkeypatch, rank=1, generation=1) is None
    assert struck_at(fault, monkeypatch, rank=1) == ("step", 2, None)
    anywhere = Fault("exception", iteration=2, seed=5)
    assert [struck_at(anywhere, monkeypatch, rank=r) is not None for r in range(4)].count(True) == 1


def test_a_recorded_fault_happens_once_in_all_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("exception", iteration=2, rank=0, at="forward", generation=None)
    assert struck_at(fault, monkeypatch, folder=tmp_path) is not None
    told = json.loads(record_file(tmp_path, 0).read_text())
    assert (told["kind"], told["rank"], told["iteration"]) == ("exception", 0, 2)
    assert told["event"] == "forward of micro-batch 0"
    assert abs(told["time"] - time.time()) < 60
    assert struck_at(fault, monkeypatch, folder=tmp_path, generation=1) is None
    begun = [json.loads(x) for x in (tmp_path / "steps_000.txt").read_text().splitlines()]
    assert [(row["generation"], row["iteration"]) for row in begun] == [
        (0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5),
    ]  # fmt: skip


def test_a_fault_can_wait_for_a_moment_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault("exception", iteration=1, rank=0, seconds=0.05)
    for name, value in as_variable([fault]).items():
        monkeypatch.setenv(name, value)
    injector, started = armed(), time.monotonic()
    with pytest.raises(InjectedFault):
        while time.monotonic() < started + 10:
            injector("step", 1, None)
            time.sleep(0.005)
    assert 0.05 <= time.monotonic() - started < 5


def test_a_slow_rank_is_slow_in_its_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(SLOW, iteration=2, rank=0, amount=0.02, steps=2)
    monkeypatch.setenv(VARIABLE, as_variable([fault])[VARIABLE])
    injector, took = armed(), list[float]()
    for iteration in range(1, 5):
        started = time.monotonic()
        for name, _, detail in STEP:
            injector(name, iteration, detail)
        took.append(time.monotonic() - started)
    assert [seconds >= 0.04 for seconds in took] == [False, True, True, False]
