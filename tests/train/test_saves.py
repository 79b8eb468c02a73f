"""A run goes on while its checkpoints are written, and after a save that fails."""

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint.files import published
from megatron_ext.disk.events import read_events
from megatron_ext.errors import CheckpointError
from megatron_ext.train.run import Run
from megatron_ext.train.saves import Saves
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import SMALL, train_on_ranks, train_steps, training_rows, without

BACKGROUND = [
    *without(SMALL, "--train-iters"),
    *"--use-distributed-optimizer --async-save --lr-decay-iters 8 --train-iters 4".split(),
]
SAME = ("lm loss", "grad_norm", "learning_rate")


def values(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [[repr(row[name]) for name in SAME] for row in rows]


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param(
            "--pipeline-model-parallel-size 2 --ema-decay 0.9 --bf16", 4, marks=pytest.mark.slow
        ),
        pytest.param(
            "--no-use-distributed-optimizer --lora-rank 4 --no-ckpt-fully-parallel-save",
            2,
            marks=pytest.mark.slow,
        ),
        ("--num-experts 2 --expert-model-parallel-size 2 --keep-best 1 --fp16", 2),
    ],
)
def test_checkpoints_of_the_background_are_those_of_a_run_that_waits(
    flags: str, ranks: int, tmp_path: Path
) -> None:
    words = [*BACKGROUND, *flags.split(), "--save-interval", "1", "--keep-last", "2"]
    waiting = [word for word in words if word != "--async-save"]
    mine = train_steps(words, tmp_path / "mine", ranks)
    theirs = train_steps(waiting, tmp_path / "theirs", ranks)
    assert values(mine) == values(theirs)
    assert published(tmp_path / "mine") == published(tmp_path / "theirs")
    tensors, whole = (
        whole_tensors(tmp_path / name / "iter_0000004", tmp_path / f"{name}.pt")
        for name in ("mine", "theirs")
    )
    assert tensors.keys() == whole.keys() and len(whole) > 10
    assert [name for name in whole if not tensors[name].equal(whole[name])] == []
    events = read_events(tmp_path / "mine")
    assert {event["iteration"] for event in events} == {1, 2, 3, 4}
    assert all(event["kind"] == "saved" and event["asynchronous"] for event in events)
    resumed = train_steps(
        [*words, "--load", str(tmp_path / "mine"), "--ckpt-step", "3"], tmp_path / "again", ranks
    )
    assert values(resumed) == values(mine[3:])


def failing_fsync(folder: Path, times: int) -> Any:
    """Return an ``os.fsync`` that fails so many times for a file of a checkpoint, in any process.

    Files in ``folder`` count the times.
    """
    sync = os.fsync
    for number in range(times):
        (folder / f"{number}.fails").touch()

    def fail(descriptor: int) -> None:
        in_checkpoint = "/iter_" in os.readlink(f"/proc/self/fd/{descriptor}")
        for flag in folder.glob("*.fails" * in_checkpoint or "none"):
            with contextlib.suppress(FileNotFoundError):
                flag.unlink()
                raise OSError(5, "Input/output error")
        sync(descriptor)

    return fail


def test_a_failed_save_is_told_and_counted_and_the_last_one_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    monkeypatch.setattr(os, "fsync", failing_fsync(tmp_path, 1))
    code, rows = train_on_ranks([*BACKGROUND, "--save-interval", "1"], save=save)
    assert code == 0 and published(save) == [2, 3, 4]
    found = [(event["kind"], event["iteration"]) for event in read_events(save)]
    assert found == [("save_failed", 1), ("saved", 2), ("saved", 3), ("saved", 4)]
    assert training_rows(rows)[-1].get("failed_saves") == 1
    told = capfd.readouterr().out
    assert (
        "note: The checkpoint of iteration 1 could not be saved: [Errno 5] Input/output error. "
        "Training goes on (1 failed so far)." in told
    )
    monkeypatch.setattr(os, "fsync", failing_fsync(tmp_path, 1))
    code, _ = train_on_ranks(BACKGROUND, save=tmp_path / "last")
    failed, saved = read_events(tmp_path / "last")
    assert code == 0 and published(tmp_path / "last") == [4]
    assert (failed["kind"], saved["kind"], saved["asynchronous"]) == ("save_failed", "saved", False)
    monkeypatch.setattr(os, "fsync", failing_fsync(tmp_path, 1000))
    code, _ = train_on_ranks(BACKGROUND, save=tmp_path / "never")
    assert code == 2 and published(tmp_path / "never") == []
    assert "The checkpoint of iteration 4 could not be saved: " in capfd.readouterr().err


def test_a_failed_save_is_due_again_until_one_works(tmp_path: Path) -> None:
    faults = [CheckpointError("full"), CheckpointError("full"), None, None]

    def write(*, waits: bool) -> None:
        assert not waits
        if (fault := faults.pop(0)) is not None:
            raise fault

    saves = Saves(str(tmp_path), 0, tolerant=True)
    assert not saves.must_repeat() and not saves.newest_has_failed()
    assert not saves.save(write, 1, is_last=False)
    assert saves.newest_has_failed() and saves.must_repeat()
    assert not saves.save(write, 2, is_last=False)
    # A second failure is tried again a step later.
    assert [saves.must_repeat() for _ in range(2)] == [False, True]
    assert saves.save(write, 4, is_last=False)
    assert not saves.newest_has_failed() and saves.num_failed == 2
    assert not any(saves.must_repeat() for _ in range(40))
    assert saves.save(write, 50, is_last=False) and not any(saves.must_repeat() for _ in range(40))
    found = [(event["kind"], event["iteration"]) for event in read_events(tmp_path)]
    assert found == [("save_failed", 1), ("save_failed", 2), ("saved", 4), ("saved", 50)]


class Background:
    """Stands in for saves in the background; the test says when and how they end."""

    def __init__(self) -> None:
        self.num_failed = 0
        self.last_has_failed = False
        self.newest = (True, False)
        self.outcomes: list[Any] = []
        self.waits = 0

    def ended(self) -> list[Any]:
        ended, self.outcomes = self.outcomes, []
        return ended

    def look_at_newest(self) -> tuple[bool, bool]:
        return self.newest

    def wait(self) -> None:
        self.waits += 1


def works(*, waits: bool) -> None:
    """Save at once."""


def in_background(folder: Path, rank: int = 0) -> tuple[Saves, Background]:
    background: Any = Background()
    return Saves(str(folder), rank, background=background, tolerant=True), background


def test_a_save_in_the_background_is_looked_at_in_steps_that_double(tmp_path: Path) -> None:
    saves, background = in_background(tmp_path)

    def due(steps: int) -> list[int]:
        return [number for number in range(1, steps + 1) if saves.must_repeat()]

    looks: list[int] = []
    done: list[bool] = []

    def look_at_newest() -> tuple[bool, bool]:
        looks.append(len(done) + 1)
        return background.newest

    background.look_at_newest = look_at_newest  # type: ignore[method-assign]
    saves.save(works, 10, is_last=False)
    for _ in range(15):
        done.append(saves.must_repeat())
    assert not any(done)
    assert looks == [1, 3, 7, 15]
    background.newest = (False, True)
    background.num_failed = 1
    assert due(16) == [16]
    # A save that follows a late failure keeps the long pause, counted from then.
    assert due(1) == []
    saves.save(works, 41, is_last=False)
    background.num_failed = 2
    assert due(40) == [32]
    saves.save(works, 90, is_last=False)
    background.newest = (False, False)
    assert due(70) == []
    # A save without a failure before it ends the long pauses.
    saves.save(works, 170, is_last=False)
    background.newest = (False, True)
    assert due(2) == [1]


def test_pauses_begin_anew_after_a_save_that_has_worked(tmp_path: Path) -> None:
    faults = [True, True, False, True]

    def write(*, waits: bool) -> None:
        if faults.pop(0):
            raise CheckpointError("full")

    saves = Saves(str(tmp_path), 0, tolerant=True)
    saves.save(write, 1, is_last=False)
    assert saves.must_repeat()
    saves.save(write, 2, is_last=False)
    assert [saves.must_repeat() for _ in range(2)] == [False, True]
    saves.save(write, 4, is_last=False)
    assert not saves.must_repeat()
    saves.save(write, 8, is_last=False)
    assert [saves.must_repeat() for _ in range(2)] == [False, True]


def test_a_save_that_did_not_begin_has_failed_whatever_those_in_the_background_do(
    tmp_path: Path,
) -> None:
    def full(*, waits: bool) -> None:
        raise CheckpointError("full")

    saves, background = in_background(tmp_path)
    background.num_failed = 2
    background.newest = (True, False)  # An earlier save is still running.
    assert not saves.save(full, 5, is_last=False)
    assert saves.num_failed == 3
    assert saves.newest_has_failed() and background.waits == 0
    assert saves.must_repeat()
    assert saves.save(works, 6, is_last=False)
    assert not saves.newest_has_failed() and background.waits == 1
    background.last_has_failed = True
    assert saves.newest_has_failed()


def test_the_events_of_saves_in_the_background_hold_both_of_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saves, background = in_background(tmp_path)
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slow(*, waits: bool) -> None:
        now[0] += 2.0

    saves.save(slow, 3, is_last=False)
    saves.save(slow, 4, is_last=False)
    assert read_events(tmp_path) == []
    background.outcomes = [
        SimpleNamespace(iteration=3, reason="", seconds=9.0),
        SimpleNamespace(iteration=4, reason="The disk is full.", seconds=1.0),
    ]
    background.num_failed = 1
    saves.wait()
    assert background.waits == 1
    saved, failed = read_events(tmp_path)
    assert (saved["kind"], saved["stall"], saved["seconds"]) == ("saved", 2.0, 9.0)
    assert failed["reason"] == (
        "The checkpoint of iteration 4 could not be saved: The disk is full."
    )
    assert capsys.readouterr().out == (
        "note: The checkpoint of iteration 4 could not be saved: The disk is full. Training goes "
        "on (1 failed so far).\n"
    )
    background.last_has_failed = True
    assert saves.newest_has_failed()
    waited: list[bool] = []
    saves.finish(lambda *, waits: waited.append(waits), 4)
    assert waited == [True]
    again = read_events(tmp_path)[-1]
    assert (again["kind"], again["iteration"], again["asynchronous"]) == ("saved", 4, False)


def test_only_rank_0_reports_and_the_last_save_must_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*, waits: bool) -> None:
        raise CheckpointError("full")

    other = Saves(str(tmp_path), 1, tolerant=True)
    assert not other.save(full, 1, is_last=False)
    assert other.num_failed == 1
    assert other.save(works, 2, is_last=False)
    assert capsys.readouterr().out == "" and read_events(tmp_path) == []
    with pytest.raises(CheckpointError):
        Saves(str(tmp_path), 1, tolerant=True).save(full, 1, is_last=True)
    # Without background saves or restarts, a failed save ends the run.
    strict = Saves(str(tmp_path), 0)
    with pytest.raises(CheckpointError):
        strict.save(full, 1, is_last=False)
    assert not strict.must_repeat()
    assert strict.save(works, 2, is_last=False)
    assert [event["kind"] for event in read_events(tmp_path)] == ["save_failed"]


@pytest.mark.slow
def test_a_failed_save_is_tried_again_after_pauses_that_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*without(BACKGROUND, "--train-iters"), *"--train-iters 16 --save-interval 8".split()]
    waiting = [word for word in words if word != "--async-save"]
    monkeypatch.setattr(os, "fsync", failing_fsync(tmp_path, 3))
    code, _ = train_on_ranks([*waiting, "--max-restarts", "1"], save=tmp_path / "waiting")
    found = [(event["kind"], event["iteration"]) for event in read_events(tmp_path / "waiting")]
    assert code == 0 and found[:3] == [("save_failed", i) for i in (8, 9, 11)]
    assert found[3:] == [("saved", 15), ("saved", 16)]

    def slowly(run: Run) -> None:
        train = run.runner.train

        def step(*arguments: Any) -> Any:
            time.sleep(0.2 if 8 <= run.progress.iteration < 14 else 0)
            return train(*arguments)

        run.runner.train = step  # type: ignore[method-assign]

    monkeypatch.setattr(os, "fsync", failing_fsync(tmp_path, 1))
    code, _ = train_on_ranks(words, ranks=2, save=tmp_path / "mine", prepare=slowly)
    failed, again, last = read_events(tmp_path / "mine")
    assert code == 0 and (failed["kind"], failed["iteration"]) == ("save_failed", 8)
    assert again["iteration"] in (9, 11, 15) and last["iteration"] == 16
    assert published(tmp_path / "mine") == [again["iteration"], 16]


@pytest.mark.slow
def test_a_run_that_may_be_restarted_goes_on_after_a_failed_save_but_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*(word for word in BACKGROUND if word != "--async-save"), "--save-interval", "2"]
    for number, (fails, restarts, code, saved) in enumerate(
        [(1, "1", 0, [3, 4]), (1, "0", 2, []), (1000, "1", 2, [])]
    ):
        save = tmp_path / str(number)
        monkeypatch.setattr(os, "fsync", failing_fsync(tmp_path, fails))
        ended, rows = train_on_ranks([*words, "--max-restarts", restarts], save=save)
        assert (ended, published(save)) == (code, saved)
        told = capfd.readouterr()
        sentence = "The checkpoint of iteration 2 could not be saved: "
        assert (sentence in told.out) == (restarts == "1")
        assert (f"[rank 0] {sentence}" in told.err) == (restarts == "0")
        if code == 0:
            assert training_rows(rows)[-1]["failed_saves"] == 1
