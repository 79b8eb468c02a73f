"""The record of steps: what counts, what was lost, and what other files and folders say."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.extras.ledger.step_record import (
    LOST,
    NO_UPDATE,
    REWOUND,
    History,
    RecordWriter,
    StepRecord,
    Steps,
)

ORDER = {"seed": 1, "tokens": {"a": 8}}


def _run(
    folder: Path,
    *batches: int,
    at: int = 0,
    sample: int = 0,
    generation: int = 0,
    loaded: Path | None = None,
    past: Any = None,
    order: Any = ORDER,
) -> RecordWriter:
    """Record a run with a step of each batch size."""
    writer = RecordWriter(folder)
    writer.start(at, sample, loaded, past, time=0.0, generation=generation)
    writer.order(order)
    before = 0
    for batch in batches:
        if batch != before:
            writer.steps(Steps(at, sample, batch, at, at))
        before = batch
        writer.count(at, at + 1)
        at, sample = at + 1, sample + batch
        writer.count(at, at)
    return writer


def _shown(history: History) -> list[tuple[int, int, int, int, str | None]]:
    """Return first and last step, first and last sample, and the reason, of each row."""
    found = [*history.steps, *history.lost]
    return [(x.iteration + 1, x.done, x.sample, x.stop - 1, x.reason) for x in found]


def test_an_unbroken_run_has_a_line_for_each_batch_size(tmp_path: Path) -> None:
    _run(tmp_path, *[4] * 1000, *[8] * 10)
    record = StepRecord(tmp_path)
    assert [row["kind"] for row in record.rows] == ["start", "order", "steps", "steps"]
    history = record.history()
    assert _shown(history) == [(1, 1000, 0, 3999, None), (1001, 1010, 4000, 4079, None)]
    assert (history.iteration, history.samples) == (1010, 4080)
    assert {row["kind"]: row for row in record.rows}["order"]["seed"] == 1
    for line in record.path.read_text().splitlines():
        json.loads(line)


def test_steps_after_a_restart_replace_those_before(tmp_path: Path) -> None:
    """The second death comes within a step, which has begun and read its samples."""
    _run(tmp_path, 4, 4, 4, 4, 4)
    writer = _run(tmp_path, 4, 4, 4, at=3, sample=12, generation=1)
    writer.count(6, 7)
    _run(tmp_path, 6, 6, 6, at=6, sample=24, generation=2)
    assert _shown(StepRecord(tmp_path).history()) == [
        (1, 3, 0, 11, None), (4, 6, 12, 23, None), (7, 9, 24, 41, None),
        (4, 5, 12, 19, LOST), (7, 7, 24, 27, LOST),
    ]  # fmt: skip
    # As the checkpoint of step 5 was first written, and then again.
    assert _shown(StepRecord(tmp_path).history(5)) == [
        (1, 3, 0, 11, None), (4, 5, 12, 19, None), (4, 5, 12, 19, LOST)
    ]  # fmt: skip


def test_a_run_that_begins_anew_has_nothing_to_do_with_the_one_before(tmp_path: Path) -> None:
    _run(tmp_path, *[4] * 9)
    _run(tmp_path, 4, 4)
    assert _shown(StepRecord(tmp_path).history()) == [(1, 2, 0, 7, None)]
    # The checkpoint of step 9 is still there, and is of the first.
    assert StepRecord(tmp_path).history(9).samples == 36


def test_a_restart_without_a_checkpoint_loses_all_steps(tmp_path: Path) -> None:
    _run(tmp_path, 4, 4)
    _run(tmp_path, 4, generation=1)
    assert _shown(StepRecord(tmp_path).history()) == [(1, 1, 0, 3, None), (1, 2, 0, 7, LOST)]


def test_steps_that_do_not_count_are_cut_out(tmp_path: Path) -> None:
    writer = _run(tmp_path, *[2] * 10)
    writer.write("left_out", first=3, last=3, why=NO_UPDATE)
    writer.write("left_out", first=7, last=7, why=NO_UPDATE)
    writer.write("left_out", first=6, last=7, why=REWOUND)
    assert _shown(StepRecord(tmp_path).history()) == [
        (1, 2, 0, 3, None), (3, 3, 4, 5, NO_UPDATE), (4, 5, 6, 9, None),
        (6, 7, 10, 13, REWOUND), (8, 10, 14, 19, None),
    ]  # fmt: skip
    assert [x.reason for x in StepRecord(tmp_path).history(7).steps] == [
        None, NO_UPDATE, None, REWOUND
    ]  # fmt: skip
    # A checkpoint of step 6, which was written before the return, has been trained on step 6.
    assert [x.reason for x in StepRecord(tmp_path).history(6).steps] == [None, NO_UPDATE, None]


def test_a_run_that_is_loaded_from_another_folder_takes_its_record_over(tmp_path: Path) -> None:
    """A restart there goes on in its own folder, and does not take it over again."""
    first, second = tmp_path / "first", tmp_path / "second"
    _run(first, *[4] * 8).write("left_out", first=2, last=2, why=NO_UPDATE)
    _run(second, *[9] * 3)
    for generation in (0, 1):
        kind: Any = {"generation": generation, "loaded": first}
        _run(second, 6, 6, at=5, sample=20, **kind)
    record = StepRecord(second)
    assert [(*x[:2], x[4]) for x in _shown(record.history())] == [
        (1, 1, None), (2, 2, NO_UPDATE), (3, 5, None), (6, 7, None), (6, 7, LOST)
    ]  # fmt: skip
    assert (record.own_start, record.history().samples) == (5, 32)
    assert all(each.order is not None for each in record.history().steps)
    assert StepRecord(first).own_start == 0


def test_steps_without_a_record_are_as_far_known_as_their_counts_say(tmp_path: Path) -> None:
    """Whole batches are taken for equal; other steps are known only together."""
    _run(tmp_path / "a", 4, at=10, sample=40, past=ORDER)
    (before, own) = StepRecord(tmp_path / "a").history().steps
    assert (before.batch, before.done, before.stop) == (4, 10, 40) and before.order is not None
    assert (own.iteration, own.sample) == (10, 40)
    assert StepRecord(tmp_path / "a").own_start == 10

    _run(tmp_path / "b", 4, at=10, sample=43)
    record = StepRecord(tmp_path / "b")
    before = record.history().steps[0]
    assert (before.batch, before.stop, before.order) == (None, 43, None)
    with pytest.raises(ConfigError, match="does not record step 5 by itself; the last one that it"):
        record.history(5)
    assert record.history(11).samples == 47

    # A machine that went down had not written the newest counts.
    _run(tmp_path / "c", 4, 4)
    _run(tmp_path / "c", 4, at=5, sample=20, generation=1)
    assert _shown(StepRecord(tmp_path / "c").history()) == [
        (1, 2, 0, 7, None), (3, 5, 8, 19, None), (6, 6, 20, 23, None)
    ]  # fmt: skip


def test_steps_between_two_runs_in_the_direct_order_are_not_taken_for_theirs(
    tmp_path: Path,
) -> None:
    """Whether the run in between has recorded its steps, or only left a gap."""
    for name, records in (("recorded", True), ("gap", False)):
        _run(tmp_path / name, 4, 4, 4)
        if records:
            _run(tmp_path / name, 4, 4, at=2, sample=8, order=None)
        _run(tmp_path / name, 4, at=4 if records else 5, sample=16 if records else 20)
        other = tmp_path / f"from {name}"
        _run(other, 4, at=5, sample=20, loaded=tmp_path / name)
        for folder in (tmp_path / name, other):
            steps = StepRecord(folder).history(5 if records else 6).steps
            known = [(x.iteration + 1, x.done) for x in steps if x.order is not None]
            unknown = [(x.iteration + 1, x.done) for x in steps if x.order is None]
            wanted = ([(1, 2), (5, 5)], [(3, 4)]) if records else ([(1, 3), (6, 6)], [(4, 5)])
            assert (known, unknown) == wanted, folder


def test_a_line_that_a_full_disk_has_cut_is_left_out(tmp_path: Path) -> None:
    _run(tmp_path, 4, 4)
    path = StepRecord(tmp_path).path
    with path.open("a") as file:
        file.write('{"kind": "sta')
    _run(tmp_path, 4, at=2, sample=8, generation=1)
    assert _shown(StepRecord(tmp_path).history()) == [(1, 2, 0, 7, None), (3, 3, 8, 11, None)]
