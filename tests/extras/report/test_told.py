"""A report's parts tell of a run by its rows and events, which are made up here."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.extras.report.curves import main_loss
from megatron_ext.extras.report.goodput import Goodput, Interval, account, show_seconds
from megatron_ext.extras.report.page import command_of, marks_of, shares, write_report
from megatron_ext.extras.report.run_folder import (
    PostMortem,
    RunFolder,
    StoredCheckpoint,
    read_run_folder,
)
from megatron_ext.extras.report.summary import reached_iteration, state_of, summary
from megatron_ext.extras.report.summary import tiles as tiles_of
from megatron_ext.extras.report.tables import (
    FaultStory,
    checkpoint_table,
    data_lines,
    environment_table,
    fault_stories,
    newest_whole,
    noticed_table,
    pictures,
    settings_tables,
    show_bytes,
)
from megatron_ext.extras.report.time_charts import BINS, Mark, _columns, share_bar, time_chart
from megatron_ext.extras.report.time_rows import end_launch
from megatron_ext.extras.report.tool import main as tool
from megatron_ext.inspect.pages.table import moment
from megatron_ext.train.launch import Launch
from megatron_ext.train.reporting.files import read_metrics
from tests.extras.report.made_runs import (
    BEGAN,
    STEP,
    Row,
    checkpoint,
    launched_row,
    steps_of,
    time_row,
    write_lines,
)

WORKS = sum(STEP.values()) - STEP["data"]


def fault(at: float, **facts: Any) -> Row:
    return {"kind": "fault", "time": BEGAN + at, "rank": 1, "cause": "SIGKILL", **facts}


@pytest.mark.parametrize(
    ("iteration", "restored", "kept", "lost"),
    [
        (14, 14, 4, 1.0),  # Five seconds passed, the last until the fault was seen.
        (14, 12, 2, 3.0),
        (None, 14, 4, 1.0),
        (None, 12, 2, 3.0),
        (15, 14, 4 * 4 / 5, 1.8),
        (14, 10, 0, 5.0),
    ],
)
def test_steps_that_memory_kept_are_like_those_before(
    iteration: int | None, restored: int, kept: float, lost: float
) -> None:
    rows = [
        time_row(BEGAN, BEGAN + 12, 0, 10, **steps_of(10), save=2.0),
        time_row(BEGAN + 19, BEGAN + 20, restored, restored, generation=1, start=1.0),
        time_row(BEGAN + 20, BEGAN + 30, restored, restored + 10, generation=1, **steps_of(10)),
    ]
    goodput = account(rows, [fault(17.0, seen_after=1.0, iteration=iteration)])
    seconds = goodput.seconds
    assert seconds["lost"] == pytest.approx(lost)
    assert seconds["save"] == pytest.approx(2.0) and seconds["restart"] == pytest.approx(3.0)
    assert goodput.share * goodput.wall == pytest.approx((20 + kept) * WORKS)
    (unreported,) = [x for x in goodput.intervals if (x.start, x.end) == (BEGAN + 12, BEGAN + 16)]
    assert unreported.iteration == (restored if kept else 10)


def test_steps_that_memory_kept_are_like_the_last_ones_that_a_row_tells() -> None:
    """Between them and the fault, a row has no step, only the seconds of a save."""
    rows = [
        time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10)),
        time_row(BEGAN + 10, BEGAN + 12, 10, 10, save=2.0),
        time_row(BEGAN + 17, BEGAN + 18, 14, 14, generation=1, start=1.0),
    ]
    goodput = account(rows, [fault(16.0, seen_after=0.0, iteration=14)])
    assert goodput.seconds["lost"] == pytest.approx(0.0, abs=1e-6)
    assert goodput.seconds["save"] == pytest.approx(2.0)
    assert goodput.share * goodput.wall == pytest.approx(14 * WORKS)


def test_a_fault_that_does_not_tell_when_it_happened_has_happened_when_it_was_seen() -> None:
    rows = [
        time_row(BEGAN, BEGAN + 12, 0, 10, **steps_of(10), save=2.0),
        time_row(BEGAN + 19, BEGAN + 20, 14, 14, generation=1, start=1.0),
    ]
    for facts in ({}, {"seen_after": None}, {"seen_after": 0.0}):
        seconds = account(rows, [fault(17.0, **facts)]).seconds
        assert (seconds["lost"], seconds["restart"]) == pytest.approx((1.0, 3.0))


def test_a_sentence_names_the_three_largest_losses() -> None:
    lost = {"lost": 8.0, "data": 5.0, "save": 4.0, "start": 3.0}
    goodput = Goodput([Interval(0.0, 100.0, {"computing": 80.0, **lost}, 1)], [(0.0, 100.0)])
    assert goodput.sentence() == (
        "goodput 80.0% of 1 min 40 s; the largest losses: lost steps 8.00 s (8.0%), waiting "
        "for data 5.00 s (5.0%), saving 4.00 s (4.0%)"
    )


def test_each_launch_has_its_own_faults() -> None:
    rows = [
        time_row(BEGAN + at + 1, BEGAN + at + 11, 10 * i, 10 * i + 10, launched_at=BEGAN + at,
                 **steps_of(10))
        for i, at in enumerate((0.0, 100.0, 200.0))
    ]  # fmt: skip
    goodput = account(rows, [fault(115.0, seen_after=1.0)])
    assert goodput.launches == [
        (BEGAN, BEGAN + 11), (BEGAN + 100, BEGAN + 115), (BEGAN + 200, BEGAN + 211),
    ]  # fmt: skip
    assert goodput.seconds["lost"] == pytest.approx(4.0)
    # The second before the first row of each launch is its start.
    assert goodput.seconds["start"] == pytest.approx(3.0) and goodput.seconds["other"] < 1e-6
    assert [name for name, _ in goodput.losses()] == ["lost", "start", "data"]


def test_a_phase_of_a_row_that_is_too_long_is_cut() -> None:
    goodput = account([time_row(BEGAN, BEGAN + 4, 0, 1, forward=6.0, save=2.0)])
    assert goodput.seconds["computing"] == pytest.approx(3.0)
    assert goodput.seconds["save"] == pytest.approx(1.0)


def ended(at: float, **facts: Any) -> Row:
    return {"kind": "ended", "iteration": 10, "time": BEGAN + at, "launched_at": BEGAN, **facts}


def test_a_launch_that_fails_after_its_ranks_ended_on_purpose_loses_the_rest() -> None:
    rows = [time_row(BEGAN, BEGAN + 10, 0, 10, **steps_of(10)), ended(9.996, reason="resize")]
    again = time_row(BEGAN + 13, BEGAN + 14, 10, 10, generation=1, start=1.0)
    assert account([*rows, again]).seconds["restart"] == pytest.approx(4.0)
    failed = account([*rows, ended(14.0, exit_code=1)])
    assert failed.seconds["lost"] == pytest.approx(4.0) and failed.seconds["restart"] == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (9.99, "9.99 s"), (10.04, "10.0 s"), (99.94, "99.9 s"), (100, "1 min 40 s"),
        (119.6, "2 min 0 s"), (5999, "99 min 59 s"), (6000, "1 h 40 min"),
    ],
)  # fmt: skip
def test_durations_change_their_unit_at_a_hundred(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


def folder_of(*rows: Row, **parts: Any) -> RunFolder:
    return RunFolder(Path("x"), rows=list(rows), **parts)


def train(iteration: int, **facts: Any) -> Row:
    return {"kind": "train", "iteration": iteration, "lm loss": 3.0, **facts}


def test_the_state_of_a_run_is_that_of_its_last_launch() -> None:
    launched, steps = launched_row(BEGAN, 0, 0), time_row(BEGAN, BEGAN + 10, 0, 10)

    def word(*rows: Row, now: float = 9e9, **parts: Any) -> str:
        return state_of(folder_of(*rows, **parts), now).word

    assert word() == "no data" and word(train(3)) == "unknown"
    assert word(launched, steps, ended(11, reason="finished")) == "finished"
    failed = ended(12, exit_code=1), ended(11, reason="finished")
    assert word(launched, steps, *failed) == word(launched, steps, *failed[::-1]) == "failed"
    assert (
        word(launched, steps, failed[1], launched, steps, ended(99, reason="signal")) == "stopped"
    )
    assert word(ended(11, exit_code=1)) == "failed"
    assert word(launched, steps, now=BEGAN + 129) == "running"
    assert word(launched, steps, now=BEGAN + 131) == "no end"
    assert word(launched, steps, now=BEGAN + 131, events=[fault(50.0)]) == "running"


def told(folder: RunFolder, goodput: Goodput | None = None) -> str:
    now = state_of(folder, 9e9)
    stories = fault_stories(folder)
    return " ".join(summary(folder, goodput or account(folder.rows), stories, now))


def test_sentences_hold_the_layout_the_way_and_the_losses() -> None:
    launched = {**launched_row(BEGAN, 0, 0), "world_size": 8, "num_iterations": 40}
    settings = {
        "parallel": {"tensor_model_parallel_size": 2, "world_size": 4},
        "model": {"num_layers": 3, "hidden_size": 8},
        "training": {"train_iters": 50},
    }
    rows = [
        train(10, **{"lm loss": 5.0, "consumed_samples": 160}),
        train(20, **{"lm loss": 2.0, "consumed_samples": 320}),
        train(30, **{"lm loss": 2.5, "consumed_samples": 480}),
    ]
    valid: list[Row] = [
        {"kind": "evaluation", "iteration": 20, "split": "first", "lm loss": 2.25},
        {"kind": "evaluation", "iteration": 30, "split": "last", "lm loss": 2.75},
        {"kind": "evaluation", "iteration": 40, "split": "none", "lm loss": math.nan},
    ]
    sentences = told(folder_of(launched, *rows, *valid, settings=settings))
    assert sentences.startswith(
        "8 ranks (tensor 2 × pipeline 1 × context 1 × data 4) on node-07 trained a model of 3 "
    )
    assert "It reached iteration 40 of 40; the last metrics are of iteration 30." in sentences
    assert "The lm loss went from 5 to 2.5, last 2.75 at iteration 30." in sentences
    older = told(folder_of(*rows, settings=settings))
    assert older.startswith("4 ranks (tensor 2 × pipeline 1 × context 1 × data 2) trained a model")
    assert "It reached iteration 30 of 50" in older
    alone = {**launched, "world_size": 1}
    assert told(folder_of(alone)).startswith("1 rank on node-07 trained.")
    assert main_loss([{"train/loss": 1.0, "mtp loss": 2.0}]) == "mtp loss"


@pytest.mark.parametrize(
    ("survived", "sentence"),
    [
        ((1,), "1 fault was seen and survived; 1 step was done again (rank 1: SIGKILL at"),
        ((0,), "1 fault was seen, and not survived; 0 steps were done again ("),
        ((1, 1, 1), "3 faults were seen, all of them survived; 3 steps were done again (rank 1"),
        ((0, 0), "2 faults were seen, none of them survived; 0 steps were done again ("),
        (
            (1, 0, 1, 1),
            "4 faults were seen, 3 of them survived; 3 steps were done again (the last ",
        ),
    ],
)
def test_faults_are_counted_in_a_sentence(survived: tuple[int, ...], sentence: str) -> None:
    stories = [
        FaultStory(i, fault(i, iteration=7), {"steps_lost": 1} if lives else None, None)
        for i, lives in enumerate(survived)
    ]
    folder = folder_of(train(1))
    found = summary(folder, Goodput(), stories, state_of(folder, 9e9))
    (said,) = [text for text in found if "again" in text]
    assert said.startswith(sentence)
    assert said.count("SIGKILL at iteration 7") == min(3, len(stories))


def tiles(folder: RunFolder, goodput: Goodput, stories: list[FaultStory]) -> list[tuple[str, str]]:
    return tiles_of(folder, goodput, stories, state_of(folder, 9e9))


def test_a_run_has_reached_the_step_of_its_newest_row() -> None:
    """Metrics are logged every few steps, and a restart may go back."""

    def reached(*rows: Row) -> int | None:
        folder = folder_of(*rows)
        return reached_iteration(folder, state_of(folder, 9e9))

    launched = {**launched_row(BEGAN, 0, 0), "num_iterations": 54}
    steps = train(50), time_row(BEGAN, BEGAN + 9, 40, 50), time_row(BEGAN + 9, BEGAN + 12, 50, 54)
    assert reached() is None and reached(launched) == 0
    assert reached(launched, *steps) == 54
    assert reached(launched, *steps, launched_row(BEGAN + 13, 45, 1)) == 45
    # A launcher knows no step of ranks that have failed.
    assert reached(launched, *steps[:2], ended(12, iteration=99, exit_code=1)) == 50
    assert reached(launched, *steps[:2], ended(12, iteration=53, reason="signal")) == 53
    assert reached(launched, *steps[:2], ended(12, iteration=50, reason="finished")) == 54
    assert reached(launched, {"kind": "odd", "iteration": 10**30}) == 0


def test_figures_at_the_top() -> None:
    speeds = [train(i, tokens_per_second=float(x)) for i, x in enumerate((900, 100, 400))]
    found = dict(tiles(folder_of(*speeds), Goodput(), []))
    assert found["tokens/s, median"] == "400" and found["faults"] == "0"
    assert found["iteration"] == "2" and "newest checkpoint" not in found
    damaged = [StoredCheckpoint(4, 9, None, None), StoredCheckpoint(8, 9, "short", None)]
    folder = folder_of(*speeds, checkpoints=damaged)
    assert newest_whole(folder) == 4
    assert dict(tiles(folder, Goodput(), []))["newest checkpoint"] == "4"
    none = folder_of(*speeds, checkpoints=damaged[1:])
    assert dict(tiles(none, Goodput(), []))["newest checkpoint"] == "none whole"


def test_a_fault_has_the_restart_and_the_post_mortem_that_follow_it() -> None:
    first, second = (PostMortem(i, f"postmortem_{i}", None, "") for i in (1, 2))
    events = [
        fault(10.0), {"kind": "restart", "time": BEGAN + 12, "steps_lost": 1},
        fault(20.0), {"kind": "restart", "time": BEGAN + 22, "steps_lost": 2},
    ]  # fmt: skip
    stories = fault_stories(folder_of(events=events, post_mortems=[first, second]))
    assert [s.restart and s.restart["steps_lost"] for s in stories] == [1, 2]
    assert [s.post_mortem for s in stories] == [first, second]
    at_once = [fault(10.0), {"kind": "restart", "time": BEGAN + 10, "steps_lost": 3}]
    (story,) = fault_stories(folder_of(events=at_once))
    assert story.restart == at_once[1]
    named = [{**events[0], "postmortem": "postmortem_2"}, *events[1:]]
    stories = fault_stories(folder_of(events=named, post_mortems=[first, second]))
    assert [s.post_mortem for s in stories] == [second, second]
    stories = fault_stories(folder_of(events=named, post_mortems=[second]))
    assert [s.post_mortem for s in stories] == [second, None]


def test_a_restart_that_only_rows_tell_has_its_cost() -> None:
    start = {**launched_row(BEGAN + 15, 8, 1), "launched_at": BEGAN}
    rows = [start, time_row(BEGAN + 15, BEGAN + 17, 8, 8, generation=1, start=2.0)]
    for iteration, lost in ((11, 3), (6, 0)):
        folder = folder_of(*rows, events=[fault(12.0, iteration=iteration)])
        (story,) = fault_stories(folder)
        assert story.restart == {"restored_iteration": 8, "steps_lost": lost, "seconds": 5.0}
    assert fault_stories(folder_of(*rows, events=[fault(16.0)]))[0].restart is None
    # Whoever launches the run again does not restart it.
    launched = launched_row(BEGAN + 50, 8, 0)
    assert fault_stories(folder_of(launched, events=[fault(12.0)]))[0].restart is None


def test_the_newest_pictures_are_shown_as_far_as_they_fit() -> None:
    stories = [
        FaultStory(i, fault(i), None, PostMortem(i, f"postmortem_{i}", b"<svg" + b"x" * 6, ""))
        for i in range(1, 6)
    ]
    found = pictures(stories, limit=3, max_bytes=20)
    assert [(x.folder, bool(x.data)) for x in found] == [
        ("postmortem_3", True), ("postmortem_4", True), ("postmortem_5", False),
    ]  # fmt: skip


def test_checkpoints_have_their_state_time_and_size() -> None:
    stored = [
        StoredCheckpoint(2, 999, None, BEGAN),
        StoredCheckpoint(4, 1000, None, None),
        StoredCheckpoint(6, 1020, "half", None),
    ]
    events: list[Row] = [
        {"kind": "saved", "time": BEGAN + 60, "iteration": 1, "asynchronous": False},
        {"kind": "saved", "time": BEGAN + 61, "iteration": 4, "asynchronous": True, "seconds": 2.0},
    ]
    table = checkpoint_table(folder_of(checkpoints=stored, events=events))
    assert [(row[0], row[2], row[5], row[6]) for row in table.rows] == [
        ("1", "–", "synchronous", "removed"),
        ("2", "999 B", "–", "whole"),
        ("4", "1 KB", "asynchronous", "whole, the newest"),
        ("6", "1.02 KB", "–", "damaged: half"),
    ]
    saved, before, newest, unknown = (row[1] for row in table.rows)
    assert (saved, before, newest) == (moment(BEGAN + 60), moment(BEGAN), moment(BEGAN + 61))
    assert unknown == "–" and table.rows[2][3] == "2.00 s"
    assert show_bytes(2_500_000) == "2.5 MB" and show_bytes(3e12) == "3 TB"


def test_other_events_settings_and_lines_of_the_data() -> None:
    events: list[Row] = [{"kind": "spike", "time": BEGAN, "iteration": 8, "loss_limit": 2.5}]
    (row,) = noticed_table(folder_of(events=events)).rows
    assert row[1:] == ("8", "spike", "loss limit: 2.5")
    settings = {
        "logging": {"log_interval": 100, "log_progress": True},
        "optimizer": {"lr": 0.5, "overlap_grad_reduce": False},
        "attention": {"window_size": [1, 2]},
        "parallel": {"cp_comm_type": ["p2p"], "sequence_parallel": True},
    }
    tables = dict(settings_tables(folder_of(settings=settings)))
    assert {name: table.rows for name, table in tables.items()} == {
        "logging": [["--log-progress", "on", "off"]],
        "optimizer": [["--lr", "0.5", "none"]],
        "attention": [["window_size", "1, 2", "not known here"]],
        "parallel": [["--sequence-parallel", "on", "off"]],
    }
    for count, number in ((99, 99), (100, 100), (101, 101), (150, 101)):
        lines = data_lines(folder_of({**launched_row(BEGAN, 0, 0), "data": ["a"] * count}))
        assert len(lines) == number
        assert lines[-1].startswith("…") is (count > 100)
    assert lines[-1].startswith("… and 50 more")


def test_a_folder_is_read_in_order_and_without_what_is_anothers(tmp_path: Path) -> None:
    later = BEGAN + 100
    rows = [
        launched_row(BEGAN + 3, 0, 0),
        {"kind": "launched", "iteration": 5, "launched_at": later, "time": later, "world_size": 2},
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    content = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(f"{content}\n \n")
    times = (105.0, -0.5, 50.0, -2.0)
    write_lines(tmp_path / "faults.jsonl", [fault(at) for at in times])
    for number in (10, 2, 1):
        (tmp_path / f"postmortem_{number}").mkdir()
    (tmp_path / "postmortem_3").symlink_to(tmp_path / "postmortem_1")
    checkpoint(tmp_path, 4)
    found = read_run_folder(tmp_path)
    assert found.problems == []
    assert [event["time"] - BEGAN for event in found.events] == [-0.5, 50.0, 105.0]
    assert [x.name for x in found.post_mortems] == ["postmortem_1", "postmortem_2", "postmortem_10"]
    assert found.start_facts["host"] == "node-07" and found.start_facts["world_size"] == 2
    write_lines(tmp_path / "metrics.jsonl", [rows[0], {**rows[1], "host": "b"}])
    assert "commit" not in read_run_folder(tmp_path).start_facts
    (stored,) = found.checkpoints
    folder = tmp_path / "iter_0000004"
    assert stored.size == sum(x.stat().st_size for x in folder.iterdir()) > 12345
    assert stored.saved == os.stat(folder).st_mtime


def test_only_the_newest_checkpoints_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_ext.extras.report.run_folder.MAX_CHECKPOINTS", 2)
    for iteration in (1, 2, 3):
        checkpoint(tmp_path, iteration)
    assert [x.iteration for x in read_run_folder(tmp_path).checkpoints] == [2, 3]


def test_the_environment_is_what_the_other_parts_of_a_page_do_not_show() -> None:
    launched = {**launched_row(BEGAN, 0, 0), "settings": {"model": []}, "data": ["a line"]}
    launched |= {"num_iterations": 9, "time": BEGAN, "versions": {"torch": "2.0", "my_own": "1"}}
    launched |= {"variables": {"OMP_NUM_THREADS": "1"}}
    table = environment_table(folder_of(launched))
    named = [name for name, _ in table.rows]
    assert {"host", "torch", "my own", "OMP_NUM_THREADS"} <= set(named)
    shown_elsewhere = {"settings", "model", "data", "num iterations", "time", "kind", "iteration"}
    assert not shown_elsewhere & set(named)


def test_faults_lead_to_their_post_mortems_from_wherever_the_page_is(tmp_path: Path) -> None:
    """In the chart of time a fault stands at its time: after 5 of 20 seconds."""
    run = tmp_path / "a run"
    (run / "postmortem_1").mkdir(parents=True)
    rows = [launched_row(BEGAN, 0, 0), train(10), time_row(BEGAN, BEGAN + 20, 0, 10)]
    write_lines(run / "metrics.jsonl", rows)
    write_lines(run / "faults.jsonl", [fault(5.0, iteration=4, postmortem="postmortem_1")])
    (tmp_path / "pages").mkdir()
    for page, address in (
        (run / "report.html", "././postmortem_1/"),
        (tmp_path / "pages" / "x.html", "./../a%20run/postmortem_1/"),
    ):
        write_report(read_run_folder(run), page)
        text = page.read_text()
        assert f'href="{address}"' in text
        assert re.findall(r'class="flag fault" style="left:([\d.]+)%"', text) == ["25.00"]


def test_marks_lie_within_the_run() -> None:
    def texts(*rows: Row, **parts: Any) -> list[str]:
        return [mark.text for mark in marks_of(folder_of(*rows, **parts), [])]

    rows = [train(i) for i in range(3, 11)]
    spikes = [{"kind": "spike", "time": BEGAN, "iteration": i} for i in (-1, 0, 7, 10, 11)]
    resumed: list[Row] = [{"kind": "resumed", "iteration": i} for i in (4, 6)]
    assert texts(*rows, *resumed, events=spikes) == [
        *(f"spike at iteration {i}" for i in (0, 7, 10)),
        *(f"resumed at iteration {i}" for i in (4, 6)),
    ]
    kinds = ("non_finite", "mismatch", "slow_rank")
    others: list[Row] = [{"kind": kind, "time": BEGAN, "iteration": 5} for kind in kinds]
    assert texts(*rows, events=others) == ["non finite at iteration 5", "mismatch at iteration 5"]
    story = FaultStory(1, fault(1.0, iteration=5), {"restored_iteration": 4}, None)
    folder = folder_of(*rows, *resumed)
    assert [(mark.text, mark.target) for mark in marks_of(folder, [story])] == [
        ("1. rank 1: SIGKILL at iteration 5", "fault-1"), ("resumed at iteration 6", "faults"),
    ]  # fmt: skip
    many = [FaultStory(i, fault(1.0, iteration=5), None, None) for i in range(1, 62)]
    numbers = [mark.text.partition(".")[0] for mark in marks_of(folder, many)[:60]]
    assert (numbers[0], numbers[-1]) == ("2", "61")


def test_the_command_line_can_be_pasted() -> None:
    launched = {**launched_row(BEGAN, 0, 0), "command": "python a.py --x 'b c'"}
    assert command_of(folder_of(launched)) == "python a.py --x 'b c'"
    there = {**launched, "folder": "/my runs"}
    assert command_of(folder_of(there)) == "cd '/my runs'\npython a.py --x 'b c'"
    assert command_of(folder_of({**launched, "command": ["a"]})) == ""


def seconds(**given: float) -> dict[str, float]:
    return given


def test_time_is_shared_among_the_columns_it_covers() -> None:
    launches = [(0.0, 80.0), (1000.0, 1080.0)]
    intervals = [
        Interval(0.0, 80.0, seconds(computing=60.0, data=20.0), 1),
        Interval(1000.0, 1003.0, seconds(start=3.0), 1),
        Interval(1003.0, 1080.0, seconds(computing=77.0), 2),
    ]
    goodput = Goodput(intervals, launches)
    columns = _columns(goodput)
    assert len(columns) == BINS == 80  # of two seconds each
    assert columns[0]["computing"] == pytest.approx(1.5)
    assert columns[39]["data"] == pytest.approx(0.5)
    assert [columns[i]["start"] for i in (39, 40, 41, 42)] == pytest.approx([0, 2, 1, 0])
    assert [columns[i]["computing"] for i in (41, 42, 79)] == pytest.approx([1, 2, 2])
    total = sum(value for column in columns for value in column.values())
    assert total == pytest.approx(160)
    chart = str(time_chart(goodput, [Mark(1040.0, "fault", "a fault", "fault-1")]))
    assert "wall time in minutes" in chart and "left:75" in chart.replace(" ", "")
    bar = str(share_bar(goodput.seconds))
    assert "computing 85.6%" in bar and "waiting for data 12.5%" in bar
    assert "width:85.625%" in bar
    (computing, *_) = shares(goodput)
    assert computing == ("computing", "computing", "2 min 17 s", "85.6%", True)
    short = str(time_chart(Goodput(intervals[:1], launches[:1])))
    assert "wall time in seconds" in short
    assert 'd="M0.0 300.0V75.0H12.5V300.0Z' in short  # three quarters of the first column
    assert "M0.0 75.0V0.0H12.5V75.0Z" in short  # data on top of it


def rows_ended(folder: Path) -> list[Row]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "ended"]


def test_the_launcher_adds_its_exit_code_unless_all_is_told(tmp_path: Path) -> None:
    launch = Launch(BEGAN, ends_itself=True)
    rows = [launched_row(BEGAN, 0, 0), train(7), time_row(BEGAN, BEGAN + 9, 0, 8)]
    rows[1]["launched_at"] = BEGAN
    reported = ended(9, reason="finished", reported=True)
    for given, code, added in (
        ([], 0, [(8, 0)]),
        ([reported], 0, []),
        ([reported], 1, [(10, 1)]),
        ([{**reported, "reported": False}], 0, [(10, 0)]),
        ([], None, []),
    ):
        write_lines(tmp_path / "metrics.jsonl", [*rows, *given])
        sentence = end_launch(tmp_path, launch, code)
        assert (sentence is None) is (added == [] and code is not None)
        told = [(x["iteration"], x["exit_code"]) for x in rows_ended(tmp_path) if "exit_code" in x]
        assert told == added, (given, code)


def test_a_folder_of_several_runs_is_answered_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    for more in ([], ["--serve"]):
        assert tool([str(tmp_path), *more], "") == 2
        assert capsys.readouterr().err == (
            f"error: `folder` ({tmp_path}) must be the save folder of a run, but holds those of "
            f"runs; give some of them: {tmp_path}/a, {tmp_path}/b.\n"
        )


def test_the_tool_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "other.html"
    (tmp_path / "metrics.jsonl").touch()
    assert tool([str(tmp_path), "--output", str(output)], "") == 0
    assert output.exists() and not (tmp_path / "report.html").exists()
    assert capsys.readouterr().out == f"wrote {output}\n"
    assert tool([str(tmp_path / "none")], "") == 2
    assert tool([str(tmp_path), "--output", str(tmp_path)], "") == 2
    assert json.dumps(capsys.readouterr().err).count("error: ") == 2
