"""Tasks on other machines write the bytes of one machine, over deaths, late files and errors."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess import cluster as cluster_module
from megatron_ext.text.preprocess import run as run_module
from megatron_ext.text.preprocess import task
from megatron_ext.text.preprocess.cluster import Watch, numbers_of, ranges, save_job
from megatron_ext.text.preprocess.jobs import Job, Say
from megatron_ext.text.preprocess.parts import Failure, read_plan, write_failure
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


def test_numbers_of_parts_are_written_short() -> None:
    for numbers, text in (([0], "0"), ([0, 1, 2, 7, 9, 10], "0-2,7,9-10"), ([5, 6], "5-6")):
        assert ranges(numbers) == text
        assert numbers_of(text) == numbers
    with pytest.raises(
        ConfigError, match=r"^The parts of a task \(3,x\) must be numbers, such as "
    ):
        numbers_of("3,x")
