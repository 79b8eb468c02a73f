"""Verdicts about runs with faults, from evidence that is written by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_ext.disk.events import EVENTS_FILE
from megatron_ext.extras.chaos.inject import Fault, record_file, steps_file
from megatron_ext.extras.chaos.outcome import Result, Truth, judge
from megatron_ext.extras.chaos.plan import Case
from megatron_ext.extras.chaos.run import Ended
from megatron_ext.extras.chaos.table import as_rows, outcomes, problems, summary
from megatron_ext.inspect.layouts import parse_layout

FAULT = Fault("SIGKILL", iteration=3, rank=1)
STRUCK = {"kind": "SIGKILL", "time": 103.5, "rank": 1, "event": "data", "iteration": 3}
STRUCK |= {"generation": 0, "what": ""}
TOLD = {"time": 103.6, "kind": "fault", "cause": "SIGKILL", "rank": 1}
RESTARTED = {"time": 105.0, "kind": "restart", "restored_from": "memory"}
ENDED = Ended(1, 10.0, 110.0)


def step(time: float, generation: int, iteration: int) -> dict[str, Any]:
    return {"time": time, "generation": generation, "iteration": iteration}


BEFORE = [step(101.0, 0, 1), step(102.0, 0, 2), step(103.0, 0, 3)]
AFTER = [step(105.0, 1, 3), step(106.0, 1, 4), step(107.0, 1, 5)]


def judged(
    folder: Path,
    *,
    struck: dict[str, Any] | None = STRUCK,
    events: tuple[dict[str, Any], ...] = (TOLD, RESTARTED),
    steps: list[dict[str, Any]] = [*BEFORE, *AFTER],  # noqa: B006
    fault: Fault = FAULT,
    ended: Ended = ENDED,
    most_lost: int = 1,
) -> Result:
    save = folder / "save"
    save.mkdir(parents=True)
    if struck is not None:
        record_file(folder, 0).write_text(json.dumps(struck))
    (save / EVENTS_FILE).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    steps_file(folder, 0).write_text("".join(f"{json.dumps(row)}\n" for row in steps))
    case = Case(parse_layout("tp2"), 0, (fault,), 5)
    truth = Truth({}, {}, 1.0, 5.0)
    return judge(case, ended, save, folder, truth, most_lost=most_lost)


def wrong(result: Result) -> tuple[str, ...]:
    return result.outcomes[0].problems


def test_a_fault_that_was_seen_named_and_survived(tmp_path: Path) -> None:
    result = judged(tmp_path)
    outcome = result.outcomes[0]
    assert outcome.problems == ()
    assert outcome.where == "rank 1, step 3, data"
    assert outcome.told == "SIGKILL of rank 1"
    assert outcome.seen_after == pytest.approx(0.1)
    # Step 3 is new, as it was not done before the fault; it is done when step 4 begins.
    assert outcome.resumed_after == pytest.approx(2.5)
    assert (outcome.steps_lost, outcome.restored_from) == (0, "memory")
    # The exit code stays a fault of the run.
    assert result.problems == ("the run ended with exit code 1",)
    assert not result.survived


def test_steps_done_again_are_lost(tmp_path: Path) -> None:
    again = [step(105.0, 1, 1), *(replace_time(row) for row in AFTER)]
    result = judged(tmp_path, steps=[*BEFORE, *again])
    assert result.outcomes[0].steps_lost == 2
    assert wrong(result) == ("2 steps were lost",)
    # Copies in memory every few steps may cost some.
    result = judged(tmp_path / "few", steps=[*BEFORE, *again], most_lost=2)
    assert wrong(result) == ()


def replace_time(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "time": row["time"] + 1.0}


def test_what_was_not_told_or_told_wrong_is_a_failure(tmp_path: Path) -> None:
    for index, (events, problem) in enumerate(
        [
            ((RESTARTED,), "it was not told"),
            (({**TOLD, "rank": 0}, RESTARTED), "it was told as SIGKILL of rank 0"),
            (({**TOLD, "cause": "hang"}, RESTARTED), "it was told as hang of rank 1"),
            ((TOLD,), "no restart was told"),
        ]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        assert problem in wrong(judged(folder, events=events))


def test_a_rank_must_be_told_as_slow_if_it_stays_slow(tmp_path: Path) -> None:
    slow, struck = Fault("slow rank", 3, 1, steps=100), {**STRUCK, "kind": "slow rank"}
    for name, seconds, told in (("short", 20.0, ()), ("long", 100.0, ("it was not told",))):
        (tmp_path / name).mkdir()
        steps = [*BEFORE, step(104.0 + seconds, 0, 50)]
        result = judged(tmp_path / name, fault=slow, struck=struck, events=(), steps=steps)
        assert wrong(result) == told


def test_a_run_lasts_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    assert judged(tmp_path).seconds == 110.0 - 101.0


def test_a_fault_that_did_not_happen_is_a_failure(tmp_path: Path) -> None:
    assert wrong(judged(tmp_path, struck=None)) == ("it did not happen",)


def test_a_hang_and_processes_left_behind_are_failures_of_the_run(tmp_path: Path) -> None:
    ended = replace(ENDED, code=None, processes=("process 7: asleep",), left=("process 8",))
    result = judged(tmp_path, ended=ended)
    assert result.problems[0] == "the run hung and was ended after 10 s"
    assert result.problems[1] == "1 processes were left behind"
    lines = problems([result])
    assert "tp2, seed 0: process 7: asleep" in lines
    console = Console(width=200, record=True)
    console.print(outcomes([result]))
    assert "rank 1, step 3, data" in console.export_text()
    assert as_rows([result])[0]["told"] == "SIGKILL of rank 1"
    found = dict(zip(*summary([result]), strict=True))
    assert (found["cases"], found["survived"], found["told rightly"]) == ("1", "0", "1")
    assert found["new step after (s)"] == "2.50 / 2.50"
