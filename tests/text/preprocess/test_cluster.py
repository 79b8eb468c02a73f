"""Tasks on other machines write the bytes of one machine, over deaths, late files and errors."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess import cluster as cluster_module
from megatron_ext.text.preprocess import run as run_module
from megatron_ext.text.preprocess import task
from megatron_ext.text.preprocess.cluster import Watch, numbers_of, ranges, save_job
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.jobs import Job, Say
from megatron_ext.text.preprocess.parts import (
    Failure,
    PartWriter,
    failure_of,
    failure_paths,
    read_plan,
    write_failure,
)
from megatron_ext.text.tokenizers.fast import InexactEngine
from tests.text import tiny
from tests.text.preprocess.runs import check_pair, left_in, run, texts_of


class Here:
    """A cluster whose tasks run in this process as those of Ray do in theirs.

    Attributes:
        deaths: how many tasks of a part die, by its number.
        late: parts whose files are seen only when all tasks have ended.
    """

    def __init__(self) -> None:
        self.deaths: dict[int, int] = {}
        self.late: set[int] = set()
        self.attempts: list[list[int]] = []
        self.closed = False

    def encode(self, job: Job, todo: Sequence[int], say: Say) -> None:
        save_job(job)
        self._job = job
        cluster_module.encode_on(self, job, todo, say)

    def submit(self, numbers: Sequence[int]) -> None:
        self.attempts.append(list(numbers))
        self._waiting = list(numbers)

    def running(self, left: Sequence[int]) -> bool:
        if not self._waiting:
            return False
        number = self._waiting.pop(0)
        if self.deaths.get(number, 0) >= len(self.attempts) or number in self.late:
            return True
        assert task.encode_by_ray(str(self._job.folder), self._job.key, number) == ""
        return True

    def faults(self, left: Sequence[int]) -> tuple[list[str], bool]:
        for number in self.late & set(left):
            task.encode_by_ray(str(self._job.folder), self._job.key, number)
        return [f"Task {number} died" for number in left], not self.late.isdisjoint(left)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    cluster = Here()
    monkeypatch.setattr(run_module, "encode_parts", cluster.encode)
    return cluster


def test_lost_parts_are_encoded_again_when_late_files_have_come(here: Here, tmp_path: Path) -> None:
    documents = tiny.corpus(160)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    here.deaths = {1: 1, 2: 2}
    here.late = {3}
    report, said = run(tmp_path, path)
    assert (report.documents, report.resumed_parts) == (160, 0)
    assert here.attempts[1:] == [[1, 2], [2]] and here.closed
    assert said[1:] == [
        "Task 1 died.",
        "Task 2 died.",
        "Parts 1-2 are encoded again (attempt 2).",
        "Task 2 died.",
        "Parts 2 are encoded again (attempt 3).",
    ]
    check_pair(tmp_path, texts_of(documents))
    assert left_in(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


def test_a_part_that_always_dies_ends_the_run_and_the_next_one_goes_on(
    here: Here, tmp_path: Path
) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(60))
    here.deaths = {1: 9}
    with pytest.raises(
        MachineFault, match=r"Parts 1 of .*out were not encoded in 3 attempts \(Task 1 died\); fini"
    ):
        run(tmp_path, path)
    assert here.closed and len(here.attempts) == 3
    folder = tmp_path / "out.parts"
    # A process that still has a task of an earlier plan encodes nothing.
    assert task.encode_by_ray(str(folder), "former", 1) == ""
    (path_of_failure,) = failure_paths(folder)
    failure = failure_of(path_of_failure)
    assert (failure.key, failure.kind) == ("former", "refused")
    assert "were cut anew after this job had been submitted" in failure.messages[0]
    path_of_failure.unlink()
    write_failure(folder, Failure("refused", ["of the earlier run"], read_plan(folder).key))
    here.deaths = {}
    assert run(tmp_path, path)[0].resumed_parts > 0
    check_pair(tmp_path, texts_of(tiny.corpus(60)))


def test_a_bad_line_ends_the_run(here: Here, tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [{"txt": "x"}, *tiny.corpus(100)])
    with pytest.raises(DataError, match=r"in.jsonl line 1 has no key 'text' \(it has "):
        run(tmp_path, path)
    assert here.closed and len(here._waiting) == len(here.attempts[0]) - 1
    gone = task.encode_by_ray(str(tmp_path / "gone"), "key", 0)
    assert "No such file or directory" in gone


def test_only_the_tasks_of_this_plan_end_the_run(tmp_path: Path) -> None:
    options = SimpleNamespace(log_interval=1)
    watch = Watch(SimpleNamespace(folder=tmp_path, key="new", parts=[], options=options), [])
    for key in ("former", "new"):
        assert watch.look() == []
        failed = {"kind": "inexact", "messages": ["ids differ"], "key": key}
        (tmp_path / f"failed.{key}.json").write_text(json.dumps(failed))
    with pytest.raises(InexactEngine, match="ids differ"):
        watch.look()
    failed = {"kind": "refused", "messages": ["no key", "bad lines are in x"], "key": "new"}
    (tmp_path / "failed.new.json").write_text(json.dumps(failed))
    with pytest.raises(DataError) as caught:
        watch.look()
    assert list(caught.value.messages) == failed["messages"]


def test_parts_that_end_before_the_first_look_need_no_other_attempt(tmp_path: Path) -> None:
    """All failures of an earlier run of the same plan are forgotten before the first task."""
    part = Part("/in", "in", 0, 9, "plain", 9)
    options = SimpleNamespace(log_interval=1, output_prefix="out")
    job: Any = SimpleNamespace(folder=tmp_path, key="key", parts=[part] * 2, options=options)
    for _ in range(2):
        write_failure(tmp_path, Failure("refused", ["of the earlier run"], "key"))

    class AtOnce(Here):
        def submit(self, numbers: Sequence[int]) -> None:
            super().submit(numbers)
            for number in numbers:
                writer = PartWriter(tmp_path, "key", number, 1, [np.dtype("uint16")])
                writer.finish()

        def running(self, left: Sequence[int]) -> bool:
            return False

    cluster = AtOnce()
    cluster_module.encode_on(cluster, job, [0, 1], print)
    assert cluster.attempts == [[0, 1]] and cluster.closed


def test_three_faults_of_each_attempt_are_told(tmp_path: Path) -> None:
    part = Part("/in", "in", 0, 9, "plain", 9)
    options = SimpleNamespace(log_interval=1, output_prefix="out")
    job: Any = SimpleNamespace(folder=tmp_path, key="key", parts=[part] * 5, options=options)

    class Dying(Here):
        def running(self, left: Sequence[int]) -> bool:
            return False

    said: list[str] = []
    with pytest.raises(MachineFault, match=r"Parts 0-4 of out were not encoded in 3 attempts \(Ta"):
        cluster_module.encode_on(Dying(), job, range(5), said.append)
    died = ["Task 0 died.", "Task 1 died.", "Task 2 died."]
    again = [f"Parts 0-4 are encoded again (attempt {attempt})." for attempt in (2, 3)]
    assert said == [*died, again[0], *died, again[1], *died]


def test_numbers_of_parts_are_written_short() -> None:
    for numbers, text in (([0], "0"), ([0, 1, 2, 7, 9, 10], "0-2,7,9-10"), ([5, 6], "5-6")):
        assert ranges(numbers) == text
        assert numbers_of(text) == numbers
    with pytest.raises(
        ConfigError, match=r"^The parts of a task \(3,x\) must be numbers, such as "
    ):
        numbers_of("3,x")


def test_the_progress_of_a_cluster_is_that_of_the_finished_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (10, 200, 3000, 40_000)
    parts = [Part("/in", "in", 0, size, "plain", size) for size in sizes]
    options = SimpleNamespace(log_interval=1)
    job: Any = SimpleNamespace(folder=tmp_path, key="key", parts=parts, options=options)
    watch = Watch(job, [1, 2, 3])
    assert (watch.progress._total, watch.progress._earlier) == (43_210, 10)
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(watch.progress, "show", lambda *amounts: shown.append(amounts))
    assert watch.look() == [1, 2, 3]
    for number in (0, 2, 1):
        writer = PartWriter(tmp_path, "key", number, 1, [np.dtype("uint16")])
        writer.count(9, 5 + number)
        writer.finish()
        watch.look()
    assert watch.look() == [3]
    assert shown == [(0, 0), (0, 0), (3000, 7), (3200, 13), (3200, 13)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InexactEngine("differ"), "inexact"),
        (DataError("bad line"), "refused"),
        (ConfigError("bad flag"), "refused"),
        (MachineFault("disk"), None),
    ],
)
def test_an_error_that_another_attempt_would_meet_ends_the_run(
    error: Exception, kind: str | None, tmp_path: Path
) -> None:
    def work() -> None:
        raise error

    assert list(task.attempt(tmp_path, "k", work)) == [str(error)]
    failures = [failure_of(path) for path in failure_paths(tmp_path)]
    assert failures == ([] if kind is None else [Failure(kind, [str(error)], "k")])
    assert list(task.attempt(tmp_path, "k", lambda: None)) == []


def test_a_task_tells_by_its_exit_code_who_has_to_mend_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path)
    assert task.main([]) == task.main([folder, "0", "1"]) == 2
    (tmp_path / "job.json").write_text("{}")
    assert task.main([folder, "0"]) == 1
    (tmp_path / "job.json").write_text("[")
    assert task.main([folder, "0"]) == 1
    (tmp_path / "job.json").write_text(json.dumps({"cwd": folder, "key": "k"}))
    assert task.main([folder, "x"]) == 2
    assert "The parts of a task (x) must be numbers" in capsys.readouterr().err
    for error, code in ((None, 0), (MachineFault("disk full"), 1), (DataError("bad line"), 1)):

        def encode(*_: Any, error: Exception | None = error) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(task, "encode", encode)
        assert task.main([folder, "0"]) == code
        assert ("error: " in capsys.readouterr().err) == (code == 1)
