"""The rows of time agree with a clock outside of the run, and the launcher writes the report."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.extras.chaos import inject
from megatron_ext.extras.report import time_rows as time_rows_module
from megatron_ext.extras.report.goodput import account
from megatron_ext.extras.report.page import write_report
from megatron_ext.extras.report.run_folder import read_run_folder
from megatron_ext.extras.report.tables import NOT_GIVEN
from megatron_ext.extras.report.time_rows import TimeRows, reported_end
from megatron_ext.parallel import recorder as recorder_module
from megatron_ext.parallel.recorder import Recorder, open_recorder
from megatron_ext.train import launch as train_launch
from megatron_ext.train.launch import Launch, launch_of
from megatron_ext.train.reporting.build import Reporters
from megatron_ext.train.reporting.files import MetricsFile, read_metrics
from tests.extras.report.made_runs import launched_row, time_row, write_lines
from tests.training_runs import ROOT, SMALL, config_of


def _times(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "time"]


def _seconds(row: dict[str, Any]) -> dict[str, float]:
    return {k.removeprefix("seconds/"): v for k, v in row.items() if k.startswith("seconds/")}


class Clock:
    """Stands in for the module `time` where the package reads it; time passes when a test says so.

    Attributes:
        now: nanoseconds since the epoch, and since the start of the machine. Tests wait for
            multiples of 1/16 of a second, so that their sums as floats are exact.
    """

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def wait(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)

    def time(self) -> float:
        return self.now / 1e9

    def monotonic(self) -> float:
        return self.now / 1e9

    def monotonic_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recorder_module, "time", clock)
    monkeypatch.setattr(time_rows_module, "time", clock)
    return clock


def test_rows_hold_means_over_the_ranks_of_the_board(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_HOST_FOLDER", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    launched = Launch(clock.time(), ends_itself=True)
    clock.wait(2)
    recorders = []
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("RANK", str(rank))
        recorders.append(open_recorder())
    rows = TimeRows(tmp_path, recorders[0], launched, resumed_at=4)
    clock.wait(0.5)
    for recorder in recorders:
        recorder.step(5)
    with recorders[0].phase("forward"), recorders[1].phase("bubble"):
        clock.wait(0.25)
    rows.write(5)
    # The other rank stays in a phase, whose time up to the report counts.
    with recorders[1].phase("save"):
        clock.wait(0.125)
        rows.write(6)
    start, first, second = _times(tmp_path)
    assert (start["before"], start["iteration"]) == (4, 4)
    assert _seconds(start) == {"start": 2.5}
    assert (first["before"], first["iteration"], first["from"]) == (4, 5, start["to"])
    assert _seconds(first) == {"forward": 0.125, "bubble": 0.125}
    assert _seconds(second) == {"save": 0.0625, "other": 0.0625}
    for row in (start, first, second):
        length = row["to"] - row["from"]
        assert sum(_seconds(row).values()) == length


def test_a_restarted_rank_counts_from_its_own_start(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_GENERATION", "2")
    launched = Launch(clock.time(), ends_itself=True)
    clock.wait(50)
    recorder = Recorder()
    clock.wait(1)
    rows = TimeRows(tmp_path, recorder, launched, 7)
    rows.write(8)
    (row,) = _times(tmp_path)
    assert row["generation"] == 2
    assert row["to"] - row["from"] == 1


def test_a_launch_begins_with_the_process_that_is_the_program() -> None:
    """The start of a process is read from the kernel, where imports are not over yet."""
    code = (
        "import time; time.sleep(1); import sys; "
        "from megatron_ext.train.launch import launch_of; "
        "print(launch_of(sys.argv[1:]).started, launch_of(['other']).started)"
    )
    began = time.time()
    words = [sys.executable, "-c", code, "--word"]
    told = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    program, inside = map(float, told.split())
    # However long the machine takes to start it, the process sleeps after its start; the kernel
    # counts in hundredths of a second.
    assert began - 0.1 < program < inside - 0.9


def test_a_launch_of_torchrun_begins_with_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launched = launch_of(["--word"])
    assert launched.started < time.time() and not launched.ends_itself
    monkeypatch.setattr(train_launch, "_start_of", lambda pid: float(pid))
    assert launch_of([]).started == os.getppid()


def test_the_reporting_rank_reports_where_no_launcher_of_ours_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of([*SMALL, "--save", str(tmp_path)])
    recorder = Recorder()
    metrics = MetricsFile(tmp_path, 0)
    launched = Launch(time.time(), ends_itself=False, data_lines=["conversations: 3 <rows>"])
    launched = dataclasses.replace(launched, given={"seq_length"})
    rows = TimeRows(tmp_path, recorder, launched, 0)
    rows.launched(config, 2)
    with Reporters([metrics], rows):
        recorder.step(1)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (last["kind"], last["iteration"], last["reason"]) == ("ended", 1, "finished")
    shown = capsys.readouterr().out
    assert shown.startswith("> goodput ") and f"the report is {tmp_path / 'report.html'}" in shown
    settings = read_run_folder(tmp_path).start_facts["settings"]
    assert settings["model"] == [["--seq-length", "32", "none"]]
    assert list(settings).index("model") < list(settings).index(f"model{NOT_GIVEN}")
    page = (tmp_path / "report.html").read_text()
    assert "What was read of the data" in page and "conversations: 3 &lt;rows&gt;" in page


def test_a_rank_whose_launcher_reports_only_writes_why_it_ends(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    rows = TimeRows(tmp_path, recorder, Launch(clock.time(), ends_itself=True), 3)
    rows.finish("signal")
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (last["kind"], last["iteration"], last["reason"]) == ("ended", 3, "signal")
    assert last["reported"] is False
    assert capsys.readouterr().out == "" and not (tmp_path / "report.html").exists()


def test_the_launcher_reports_runs_that_failed_and_touches_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = Launch(launched_row(0, 0, 0)["launched_at"], ends_itself=True)
    rows = [launched_row(launched.started + 3, 0, 0), time_row(launched.started, 4e9, 0, 5)]
    rows[1]["to"] = launched.started + 9
    metrics = tmp_path / "metrics.jsonl"
    write_lines(metrics, rows)
    another = Launch(launched.started + 60, ends_itself=True)
    with reported_end(str(tmp_path), another):
        pass
    assert not (tmp_path / "report.html").exists() and len(read_metrics(metrics)) == 2
    with pytest.raises(ZeroDivisionError), reported_end(str(tmp_path), launched):
        raise ZeroDivisionError
    assert "failed with exit code 1" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out.startswith("> goodput 0.0%")
    metrics.unlink()
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    write_lines(metrics, rows)
    with reported_end(str(tmp_path), launched) as end:
        end.exit_code = 0
    warning = capsys.readouterr().err
    assert warning.startswith(
        f"warning: {tmp_path / 'report.html'} cannot be written (Is a directory"
    )


@pytest.mark.slow
def test_the_account_of_a_run_with_a_restart_agrees_with_a_clock_outside(tmp_path: Path) -> None:
    """A rank is killed in step 7; the run goes on after step 6, which it has saved."""
    words = [*SMALL, "--train-iters", "10", "--save", str(tmp_path), "--nproc-per-node", "2"]
    words += "--log-interval 4 --pipeline-model-parallel-size 2 --save-interval 3".split()
    fault = inject.Fault("SIGKILL", iteration=7, rank=1, at="update")
    began, lines = time.monotonic(), list[tuple[float, str]]()
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words, "--max-restarts", "1"]
    environment = {**os.environ, **inject.as_variable([fault])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic() - began, line.rstrip()))
    assert process.returncode == 0
    wall, last = lines[-1]
    run = read_run_folder(tmp_path)
    goodput = account(run.rows, run.events)
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall, abs=1e-6)
    # The account is closed before the page is written, which a loaded machine does slowly.
    begun = time.monotonic()
    write_report(run, tmp_path / "again.html")
    page_time = time.monotonic() - begun
    assert goodput.wall == pytest.approx(wall, abs=0.01 * wall + 2 * page_time)
    assert last == f"> {goodput.sentence()}; the report is {tmp_path / 'report.html'}"
    assert goodput.seconds["start"] > 0.2 * wall
    names = "computing bubble evaluate save lost restart".split()
    assert min(goodput.seconds[name] for name in names) > 0
    # Iterations 9 and 10, which no report told, are in the last row.
    told = [(row["generation"], row["before"], row["iteration"]) for row in _times(tmp_path)]
    assert told == [(0, 0, 0), (0, 0, 1), (0, 1, 4), (1, 6, 6), (1, 6, 8), (1, 8, 10)]
    page = (tmp_path / "report.html").read_text()
    assert "1 fault was seen and survived; 1 step was done again (rank 1: SIGKILL at" in page
    assert "pretrain_gpt.py" in run.start_facts["command"]


def test_variables_that_set_how_a_run_computes_are_recorded_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_DEBUG", "OMP_NUM_THREADS", "TORCH_HUB_TOKEN", "OWN_THING", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "x")
    found = time_rows_module.variables()
    assert {"NCCL_DEBUG", "OMP_NUM_THREADS"} <= set(found)
    assert not {"TORCH_HUB_TOKEN", "OWN_THING", "WANDB_API_KEY"} & set(found)
