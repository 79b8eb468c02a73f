"""Preprocessing in a job array of Slurm writes the bytes of one machine, over deaths and errors."""

import json
import os
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess import cluster as cluster_module
from megatron_ext.text.preprocess import slurm as slurm_module
from megatron_ext.text.preprocess import task
from megatron_ext.text.preprocess.cli import _run, main, parse_options
from megatron_ext.text.preprocess.cluster import numbers_of
from megatron_ext.text.preprocess.slurm import SlurmArrays, write_script
from tests.text import tiny
from tests.text.preprocess.faults import deaths, plant_deaths
from tests.text.preprocess.runs import check_pair, left_in, run, texts_of
from tests.text.preprocess.slurm import Slurm

SLURM = {"executor": "slurm", "slurm_tasks": 3, "slurm_args": "--partition=cpu --time=2:00:00"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path, monkeypatch)


def marked(folder: Path, count: int, at: int) -> tuple[Path, list[dict[str, Any]]]:
    """Write a corpus with the word MARK in the document ``at``."""
    documents = tiny.corpus(count)
    documents[at]["text"] = f"MARK {documents[at]['text']}"
    return tiny.write_jsonl(folder / "in.jsonl", documents), documents


def test_a_lost_task_is_run_again_alone(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, documents = marked(tmp_path, 160, 159)
    plant_deaths(tmp_path, monkeypatch, "MARK", times=1, parent=True)
    report, said = run(tmp_path, path, workers=1, **SLURM)
    assert deaths(tmp_path) == 1
    check_pair(tmp_path, texts_of(documents))
    assert (report.documents, report.resumed_parts) == (160, 0)
    first, second = slurm.submitted()
    # The third task has died in its last part, and has left markers of the ones before.
    *others, last = first.removeprefix("--parsable --array=0-2 ").split()
    assert len(others) == 2 and "-" in last
    lost = numbers_of(last)[-1]
    assert second == f"--parsable --array=0-0 {lost}"
    assert any("Slurm task 100_2 ended OUT_OF_MEMORY, log " in line for line in said)
    assert f"Parts {lost} are encoded again (attempt 2)." in said
    assert slurm.cancelled() == []
    assert left_in(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


@pytest.mark.slow
def test_a_part_that_always_dies_ends_the_run_and_others_are_kept(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, documents = marked(tmp_path, 60, 1)
    plant_deaths(tmp_path, monkeypatch, "MARK", times=9, parent=True)
    monkeypatch.setattr(cluster_module, "ATTEMPTS", 2)
    with pytest.raises(
        MachineFault, match=r"Parts 0 of .*out were not encoded in 2 attempts \(Slu"
    ):
        run(tmp_path, path, workers=1, **{**SLURM, "slurm_tasks": 1})
    assert deaths(tmp_path) == 2
    assert len(list((tmp_path / "out.parts").glob("slurm_*.log"))) > 2
    monkeypatch.delenv("PYTHONPATH")
    assert run(tmp_path, path)[0].resumed_parts > 0
    check_pair(tmp_path, texts_of(documents))


def test_a_bad_line_ends_the_array(slurm: Slurm, tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [*tiny.corpus(100), {"txt": "x"}])
    with pytest.raises(DataError, match=r"in.jsonl line 101 has no key 'text' \(it has "):
        run(tmp_path, path, **SLURM)
    assert len(slurm.submitted()) == 1
    report, _ = run(tmp_path, path, on_bad_line="quarantine", **SLURM)
    assert (report.documents, report.rejected) == (100, 1)
    check_pair(tmp_path, texts_of(tiny.corpus(100)))


@pytest.mark.slow
def test_a_cancelled_job_is_not_submitted_again(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = marked(tmp_path, 5, 1)
    cancel = "subprocess.run(['scancel', '100'], start_new_session=True)"
    plant_deaths(tmp_path, monkeypatch, "MARK", times=1, parent=True, before=cancel)
    with pytest.raises(DataError, match="Slurm job 100 was cancelled; finished parts are kept, so"):
        run(tmp_path, path, workers=1, **{**SLURM, "slurm_tasks": 1})
    assert len(slurm.submitted()) == 1


def test_a_script_submits_the_array_and_the_job_that_joins(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(60))
    model = str(tiny.sentencepiece_model())
    words = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
    words += ["--input", str(path), "--part-megabytes", "0.01", "--append-eod"]
    script = tmp_path / "job.sh"
    array = ["--executor", "slurm", "--slurm-tasks", "2", "--slurm-script", str(script)]
    assert main([*words, *array, "--output-prefix", str(tmp_path / "out")]) == 0
    assert f"parts in 2 tasks; `bash {script}` submits it." in capsys.readouterr().err
    assert slurm.submitted() == []
    subprocess.run(["bash", str(script)], check=True, capture_output=True)
    until = time.monotonic() + 240
    while list(tmp_path.glob("out.parts")) and time.monotonic() < until:
        time.sleep(0.1)
    check_pair(tmp_path, texts_of(tiny.corpus(60)))
    assert slurm.submitted()[1].startswith("--dependency=afterany:100 --output=")


def test_without_slurm_or_where_it_refuses_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    with pytest.raises(
        ConfigError, match="`--executor slurm` needs the program sbatch, which this"
    ):
        run(tmp_path, path, **SLURM)
    slurm = Slurm(tmp_path, monkeypatch)
    (slurm.folder / "refuse").touch()
    refused = (
        r"sbatch refused the job array \(sbatch: error: invalid partition .* change `--slurm-a"
    )
    with pytest.raises(ConfigError, match=refused):
        run(tmp_path, path, **SLURM)
    (tmp_path / "empty.jsonl").touch()
    words = ["--output-prefix", str(tmp_path / "o"), "--executor=slurm", "--slurm-script", "s"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--input"]
    for name, why in (
        ("/dev/null", "needs inputs that can"),
        ("empty.jsonl", r"\(s\) would hold"),
    ):
        with pytest.raises(ConfigError, match=f"`--slurm-script` {why}"):
            _run([*words, str(tmp_path / name)])


def test_a_queue_that_does_not_answer_delays_no_finished_run(slurm: Slurm, tmp_path: Path) -> None:
    (slurm.folder / "busy").touch()
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    _, said = run(tmp_path, path, workers=1, **{**SLURM, "slurm_tasks": 1})
    assert any("unknown: slurm_load_jobs error: Unable to contact" in line for line in said)
    check_pair(tmp_path, texts_of(tiny.corpus(5)))


def test_the_job_of_a_killed_run_is_cancelled_and_its_tasks_encode_nothing_of_the_next_plan(
    slurm: Slurm, tmp_path: Path
) -> None:
    path = tiny.write_jsonl(tmp_path / "in.jsonl", [{"txt": "x"}])
    with pytest.raises(DataError, match="has no key 'text'"):
        run(tmp_path, path, workers=1, **SLURM)
    folder = tmp_path / "out.parts"
    saved = json.loads((folder / "job.json").read_bytes())
    with pytest.raises(DataError, match="were cut anew after this job had been submitted; submit"):
        task.encode(folder, {**saved, "key": "former"}, [0])
    with pytest.raises(
        DataError, match=r"^The job names part 1, but the parts in .* are 0 to 0; n"
    ):
        task.encode(folder, saved, [0, 1])
    (folder / "slurm_job").write_text("100")
    before = slurm.cancelled()
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))  # and so another plan
    run(tmp_path, path, workers=1, **SLURM)
    assert slurm.cancelled() == [*before, "100"]


def test_tasks_read_the_options_of_their_run(tmp_path: Path) -> None:
    words = ["--input", "in.jsonl", "--output-prefix", str(tmp_path / "out"), "--workers", "3"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "folder"]
    array = ["--executor=slurm", "--slurm-tasks=4", "--slurm-script=a"]
    array += ["--slurm-args=--time=1 \n--mem=2G"]
    for more in ([], ["--sft", "--sft-messages-key", "chat"]):
        options, local = (parse_options([*words, *more, *a])[0] for a in (array, []))
        job = SimpleNamespace(options=options, folder=tmp_path, key="k", fast=True)
        write_script(job, [0], tmp_path / "job.sh", lambda _: None)  # type: ignore[arg-type]
        script = (tmp_path / "job.sh").read_text()
        assert "\n#SBATCH --time=1 --mem=2G\n#\n" in script and "--cpus-per-task=3\n" in script
        saved = json.loads((tmp_path / "job.json").read_bytes())
        assert (saved["cwd"], saved["key"], saved["fast"]) == (os.getcwd(), "k", True)
        found = task.options_of(saved)
        assert type(found) is type(local)
        assert {**vars(found), "json_keys": ()} == {**vars(local), "json_keys": ()}
        assert list(found.json_keys) == list(local.json_keys)


def test_a_task_that_cannot_begin_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "out.parts")
    assert task.main([gone, "0"]) == 1
    said = (
        rf"^error: {gone}/job.json cannot be read \(No such file .*\): the run in {gone} has ended"
    )
    assert re.match(said, capsys.readouterr().err)


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SlurmArrays, list[list[str]]]:
    """Return arrays whose programs only note their words, and the words."""
    called: list[list[str]] = []

    def call(*words: str) -> Any:
        called.append(list(words))
        return SimpleNamespace(returncode=0, stdout="7;cluster\n", stderr="")

    monkeypatch.setattr(slurm_module, "_call", call)
    monkeypatch.setattr(slurm_module.shutil, "which", lambda program: program)
    monkeypatch.setattr(slurm_module, "write_script", lambda *what: None)
    options = SimpleNamespace(slurm_tasks=3)
    job: Any = SimpleNamespace(options=options, folder=tmp_path)
    return SlurmArrays(job, range(10), lambda _: None), called


def test_parts_that_are_left_have_tasks_of_their_own(
    arrays: tuple[SlurmArrays, list[list[str]]], tmp_path: Path
) -> None:
    made, called = arrays
    made.submit(range(10))
    made.submit(range(4, 10))
    made.submit(range(150))
    script = str(tmp_path / "slurm.sh")
    assert called[0] == ["sbatch", "--parsable", "--array=0-2", script, "0-2", "3-5", "6-9"]
    assert called[1][2:] == ["--array=0-5", script, *"456789"]
    assert called[2][2] == "--array=0-99" and called[2][4:6] == ["0", "1-2"]
    assert (tmp_path / "slurm_job").read_text() == "7"
    # Whoever asks for more tasks than that gets as many again.
    options = SimpleNamespace(slurm_tasks=150)
    many = SlurmArrays(SimpleNamespace(options=options, folder=tmp_path), [], lambda _: None)  # type: ignore[arg-type]
    for _ in range(2):
        many.submit(range(400))
        assert called[-1][2] == "--array=0-149"


def test_a_queue_that_does_not_answer_ends_no_task_that_still_runs(
    arrays: tuple[SlurmArrays, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = arrays
    monkeypatch.setattr(slurm_module.time, "sleep", lambda seconds: None)
    made.submit([1, 2])
    for state, left, runs in (
        ("unknown: busy", [2], True), ("RUNNING", [], True), ("unknown: busy", [], False),
    ):  # fmt: skip
        monkeypatch.setattr(made, "_queued", lambda state=state: Counter([state]))
        assert made.running(left) == runs


def test_the_job_of_an_earlier_run_is_cancelled_once(
    arrays: tuple[SlurmArrays, list[list[str]]], tmp_path: Path
) -> None:
    made, called = arrays
    assert called == []
    made.submit([1])
    for _ in range(2):
        made.close()
    assert called[1:] == [["scancel", "7"]]
    (tmp_path / "slurm_job").write_text("7 --user=all")
    made.close()
    assert len(called) == 2 and not (tmp_path / "slurm_job").exists()


def test_a_task_that_slurm_calls_complete_may_have_left_files_that_are_late(
    arrays: tuple[SlurmArrays, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = arrays
    made.submit(range(10))  # as parts 0 to 2, 3 to 5 and 6 to 9
    for states, late in (
        ({0: "FAILED", 2: "COMPLETED"}, True),
        ({0: "FAILED", 2: "TIMEOUT"}, False),
        ({0: "FAILED", 1: "COMPLETED", 2: "TIMEOUT"}, False),
        ({0: "FAILED"}, True),
        ({}, True),
    ):
        monkeypatch.setattr(made, "_states", lambda states=states: states)
        clauses, may_be_late = made.faults([2, 9])
        assert [clause.split(",")[0].split(" ended ")[0] for clause in clauses] == [
            "Slurm task 7_0", "Slurm task 7_2",
        ]  # fmt: skip
        assert may_be_late == late
    assert made.faults([]) == ([], False)
    monkeypatch.setattr(made, "_states", lambda: {1: "CANCELLED"})
    with pytest.raises(DataError, match="Slurm job 7 was cancelled"):
        made.faults([4])


def test_the_queue_is_asked_more_seldom_but_not_ever_more_seldom(
    arrays: tuple[SlurmArrays, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = arrays
    pauses: list[float] = []
    monkeypatch.setattr(slurm_module.time, "sleep", pauses.append)
    monkeypatch.setattr(made, "_queued", lambda: {"RUNNING": 1})
    for _ in range(2):
        made.submit([1])
        assert all(made.running([1]) for _ in range(12))
    assert pauses[:3] == [0.5, 0.75, 1.125] and pauses[11] == 15 and pauses[12] == 0.5


def test_states_are_those_of_whole_tasks(
    arrays: tuple[SlurmArrays, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = arrays
    made.submit(range(3))
    answer = "7_0|FAILED\n7_1|CANCELLED by 1000\n7_[2-3]|PENDING\n7_4|\n7_12|COMPLETED\n7|RUNNING\n"
    done = SimpleNamespace(returncode=0, stdout=answer, stderr="")
    monkeypatch.setattr(slurm_module, "_call", lambda *words: done)
    assert made._states() == {0: "FAILED", 1: "CANCELLED", 12: "COMPLETED"}
    done.stdout = " PENDING (Priority)\nRUNNING (None)\nRUNNING (None)\n\n"
    assert made._queued() == {"PENDING (Priority)": 1, "RUNNING": 2}
    done.stdout = "\n"
    assert made._queued() is None
    done.returncode, done.stderr = 1, "slurm_load_jobs error: Invalid job id specified"
    assert made._queued() is None
    done.stderr = "Unable to contact  slurm controller"
    assert made._queued() == {"unknown: Unable to contact slurm controller": 1}
    monkeypatch.setattr(slurm_module.shutil, "which", lambda program: None)
    assert made._states() == {}


def test_states_are_told_when_they_change(
    arrays: tuple[SlurmArrays, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = arrays
    said: list[str] = []
    monkeypatch.setattr(made, "_say", said.append)
    monkeypatch.setattr(slurm_module.time, "sleep", lambda seconds: None)
    waiting, both, running = (
        Counter({"PENDING": 2}), Counter({"RUNNING": 1, "PENDING": 1}), Counter({"RUNNING": 2})
    )  # fmt: skip
    states = iter([waiting, waiting, both, running, running, None, running])
    monkeypatch.setattr(made, "_queued", lambda: next(states))
    made.submit([1, 2, 5])
    while made.running([1]):
        pass
    told = ["2 PENDING", "1 PENDING, 1 RUNNING", "2 RUNNING"]
    first = "Slurm job 7: 3 tasks encode 3 parts."
    assert said == [first, *(f"Slurm job 7: {state}." for state in told)]
    # Another attempt tells its states again.
    made.submit([1])
    assert made.running([1]) and said[-1] == "Slurm job 7: 2 RUNNING."
