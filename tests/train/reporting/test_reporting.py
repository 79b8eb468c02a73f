"""Reports have Megatron-LM's line to the character, and files that survive kills."""

import dataclasses
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megatron_ext.config.precision import Fp8Config
from megatron_ext.device.gpus import peak_flops
from megatron_ext.text.cost.products import flops_per_sample
from megatron_ext.text.task import GPT
from megatron_ext.train import loop
from megatron_ext.train.launch import Launch
from megatron_ext.train.main import main
from megatron_ext.train.reporting import build, files, loss_plot, trackers
from megatron_ext.train.reporting.files import CONFIGURATION_FILE
from megatron_ext.train.reporting.lines import evaluation_lines, iteration_line
from megatron_ext.train.reporting.records import AVERAGED, EvaluationRecord, IterationRecord
from megatron_ext.train.reporting.start import (
    implementation_line,
    parameters_line,
    start_lines,
)
from tests.train.reporting.made_up import COMMON, FULL, VALIDATION
from tests.train.reporting.made_up import record_of as _record
from tests.training_runs import TINY, config_of, mock_data, train_steps, without


def _written(
    folder: Path, *records: IterationRecord | EvaluationRecord, resumed_at: int = 0
) -> list[dict[str, Any]]:
    metrics = files.MetricsFile(folder, resumed_at)
    for record in records:
        evaluates = isinstance(record, EvaluationRecord)
        (metrics.on_evaluation if evaluates else metrics.on_iteration)(record)
    metrics.close()
    return files.read_metrics(metrics.path)


class _FullDisk:
    def __init__(self, full: bool) -> None:
        self.full, self.written = full, 0

    def on_iteration(self, record: IterationRecord) -> None:
        if self.full:
            raise FULL
        self.written += 1

    def close(self) -> None:
        raise FULL


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_warned_of_and_runs_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink, healthy = _FullDisk(True), _FullDisk(False)
    with pytest.raises(ZeroDivisionError), build.Reporters([sink, healthy]) as reporters:
        reporters.on_iteration(_record())
        reporters.on_iteration(_record())
        sink.full = False
        reporters.on_iteration(_record())
        raise ZeroDivisionError
    assert (sink.written, healthy.written) == (1, 3)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("warning: _FullDisk cannot write (the disk of ")
    assert len(shown) == 2


def test_the_metrics_file_has_whole_lines_after_a_full_disk(tmp_path: Path) -> None:
    metrics = files.MetricsFile(tmp_path, 0)
    metrics.on_iteration(_record(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.path.stat().st_size + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            metrics.on_iteration(_record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    metrics.on_iteration(_record(3))
    metrics.close()
    assert [row["iteration"] for row in files.read_metrics(metrics.path)] == [1, 2, 3]


def test_the_line_holds_megatron_lms_fields_in_its_order_and_on_a_gpu_throughput() -> None:
    line = iteration_line(_record(), datetime(2026, 1, 2, 3, 4, 5), on_gpu=False)
    megatron = (
        " [2026-01-02 03:04:05.000000] iteration       12/     100 | consumed samples:"
        "          192 | elapsed time per iteration (ms): 500.0 | learning rate: 9.140577E-04 | "
        "global batch size:    16 | lm loss: 7.422465E+00 | loss scale: 1.0 | grad norm: 0.684 |"
    )
    assert line.startswith(megatron)
    assert line.endswith(" number of skipped iterations:   0 | number of nan iterations:   0 |")
    assert "TFLOP" not in line and "MFU: n/a" in line
    line = iteration_line(_record(peak_flops=4e12), datetime(2026, 1, 1), on_gpu=True)
    for part in ("throughput per GPU (TFLOP/s/GPU): 2.0 |", "MFU: 50.0%", "ETA: 0:00:44"):
        assert part in line
    assert "images/s" not in line and "params norm" not in line and "epoch" not in line
    more = _record(
        sample_name="images", num_zeros=0.0, params_norm=1.23456, epoch=0.25, skipped=3, nans=2
    )
    line = iteration_line(more, datetime(2026, 1, 1), on_gpu=False)
    assert " | num zeros: 0 | params norm: 1.235 | epoch: 0.250 | images/s: 32.0 | " in line
    assert " | tokens/s: 2048 | " in line
    assert line.endswith(" number of skipped iterations:   3 | number of nan iterations:   2 |")


def test_evaluation_lines_are_framed() -> None:
    lines = evaluation_lines(EvaluationRecord("validation ema", 5, {"lm loss": 2.0}))
    assert " at iteration 5 with averaged weights | lm loss value: 2.000000E+00 |" in lines[1]
    lines = evaluation_lines(EvaluationRecord("test", 12, {"lm loss": 2.0}, final=True))
    assert lines[1] == (
        " validation loss at iteration 12 on test set | lm loss value: 2.000000E+00 | "
        f"lm loss PPL: {math.exp(2):.6E} | "
    )
    assert lines[0] == lines[2] == "-" * (len(lines[1]) + 1)
    losses = {"lm loss": 2.0, "kept tokens": 0.5}
    lines = evaluation_lines(EvaluationRecord("validation", 5, losses))
    assert lines[1].endswith(f"lm loss PPL: {math.exp(2):.6E} | kept tokens value: 5.000000E-01 | ")
    assert "PPL" not in evaluation_lines(EvaluationRecord("validation", 5, {"focal loss": 1.0}))[1]


def test_a_resumed_run_rewrites_what_it_does_again(tmp_path: Path) -> None:
    last = EvaluationRecord("validation", 5, {"lm loss": 1.0}, final=True)
    _written(tmp_path, *map(_record, range(1, 6)), last)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iterat')  # a kill in the middle of a line
    rows = _written(tmp_path, _record(4), resumed_at=3)
    assert [row["iteration"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]


def test_a_row_has_the_numbers_of_its_record_in_its_units(tmp_path: Path) -> None:
    more = {"skipped": 3, "nans": 2, "total_skipped": 5, "epoch": 0.0, "samples": 8}
    record = _record(**more, num_zeros=0.0, params_norm=1.5, failed_saves=4)
    final = EvaluationRecord("test", 12, {"lm loss": 2.0}, consumed_samples=192, final=True)
    plain, row, evaluation = _written(tmp_path, _record(11), record, final)
    assert not {"num_zeros", "params_norm", "failed_saves", "train/epoch"} & plain.keys()
    expected = {
        "consumed_samples": 192, "global_batch_size": 16, "seconds_per_iteration": 0.5,
        "tokens_per_second": 2048.0, "skipped_iterations": 3, "nan_iterations": 2,
        "total_skipped_iterations": 5, "num_zeros": 0.0, "params_norm": 1.5, "failed_saves": 4,
        "train/samples": 192.0, "train/throughput": 16.0, "train/epoch": 0.0, "loss_scale": 1.0,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert evaluation == {
        "kind": "evaluation", "split": "test", "iteration": 12, "consumed_samples": 192,
        "final": True, "lm loss": 2.0,
    }  # fmt: skip
    assert math.isnan(_record(losses={}).common["train/loss"])


def test_a_row_can_be_read_at_once(tmp_path: Path) -> None:
    metrics = files.MetricsFile(tmp_path, 0)
    metrics.on_iteration(_record(1))
    assert [row["iteration"] for row in files.read_metrics(metrics.path)] == [1]
    metrics.close()


def test_rows_end_at_the_first_line_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = files.as_json({"kind": "train", "iteration": 1, "least": -math.inf, "most": math.inf})
    assert "-Infinity" in whole
    for broken in ('{"kind": "train"}', '{"iteration": 2}', "[]", '{"kind": 3, "iteration": 2}'):
        path.write_text(f"{whole}{broken}\n{whole}")
        (row,) = files.read_metrics(path)
        assert (row["least"], row["most"]) == (-math.inf, math.inf)


def test_rows_of_time_stay_with_their_launch(tmp_path: Path) -> None:
    """The ranks of one launch may differ by a second about its beginning."""
    rows = [
        {"kind": "time", "iteration": 4, "launched_at": 100.5},
        {"kind": "train", "iteration": 4, "launched_at": 100.5},
        {"kind": "launched", "iteration": 0, "launched_at": 90.0},
        {"kind": "ended", "iteration": 2},
        # Further steps follow, so this one is no longer the evaluation at the end.
        {"kind": "evaluation", "iteration": 3, "final": True},
    ]
    path = tmp_path / files.METRICS_FILE

    def kept(resumed_at: int, launched_at: float) -> list[str]:
        path.write_text("".join(map(files.as_json, rows)))
        files.MetricsFile(tmp_path, resumed_at, launched_at).close()
        return [row["kind"] for row in files.read_metrics(path)]

    assert kept(0, 101.25) == ["time"]
    assert kept(0, 101.75) == []
    # A resumed run keeps them all, but no step that it will repeat.
    assert kept(3, 500.0) == ["time", "launched", "ended", "resumed"]
    assert kept(4, 500.0) == ["time", "train", "launched", "ended", "resumed"]
    path.unlink()
    # Nothing is resumed in an empty file.
    files.MetricsFile(tmp_path, 3).close()
    assert files.read_metrics(path) == []


@pytest.mark.parametrize("value", [True, "1", None, math.nan, 10**400])
def test_what_is_no_finite_number(value: object) -> None:
    with pytest.raises(ValueError, match=r"is no number|is not finite"):
        files.number(value)


def test_numbers_are_floats() -> None:
    assert [files.number(value) for value in (2, 2.5, -3)] == [2.0, 2.5, -3.0]


def test_the_moving_average_is_corrected_and_skips_what_is_not_finite() -> None:
    assert loss_plot.smoothed([3.0, 3.0]) == [3.0, 3.0]
    # Below 100 values, each new one counts for half.
    first, second, third = loss_plot.smoothed([1.0, 4.0, math.nan])
    assert (first, second, third) == (1.0, pytest.approx(3.0), pytest.approx(3.0))
    assert math.isnan(loss_plot.smoothed([math.nan])[0])
    values = [0.0] * 499 + [1.0]
    assert loss_plot.smoothed(values)[-1] == pytest.approx(0.1, rel=1e-6)


def drawn(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Return the figure that is drawn of these rows."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: figures.append(self))
    with pytest.raises(FileNotFoundError):
        # Nothing has been written that could be moved to its place.
        loss_plot.plot_metrics(rows, folder / "loss.png", "the title")
    return figures[0]


def test_the_picture_of_a_run_has_each_loss_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"kind": "train", "learning_rate": 0.0, "grad_norm": 1.0, "train/loss": 5.0}
    rows: list[dict[str, Any]] = [
        {**train, "iteration": i, "lm loss": 9.0 - i / 100, "z loss": 0.0} for i in range(1, 251)
    ]
    rows.append({"kind": "resumed", "iteration": 30})
    for split, loss in (("validation set 0", 7.0), ("validation set 1", 6.0)):
        rows.append({"kind": "evaluation", "iteration": 40, "split": split, "lm loss": loss})
    losses, norms, rates = drawn(rows, monkeypatch, tmp_path).axes
    names = [x.get_text() for x in losses.get_legend().get_texts()]
    assert names == [
        "lm loss, training", "z loss, training", "lm loss, validation set 0",
        "lm loss, validation set 1",
    ]  # fmt: skip
    # Many values become a smoothed line over a faint one, but only losses.
    assert [len(line.get_xdata()) for line in losses.get_lines()[:4]] == [250] * 4
    assert [len(axes.get_lines()) for axes in (norms, rates)] == [1, 1]
    assert list(rates.get_lines()[0].get_ydata()) == [0.0] * 250
    last = losses.get_lines()[-1]
    assert list(last.get_xdata()) == [30, 30]
    assert [x.get_text() for x in losses.texts] == ["resumed"]
    assert losses.get_title(loc="left") == "the title"


def test_a_picture_that_cannot_be_drawn_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def full(self: Any, path: Path, **_: Any) -> None:
        Path(path).write_text("half")
        raise FULL

    monkeypatch.setattr(Figure, "savefig", full)
    row = {"kind": "train", "iteration": 1, "lm loss": 1.0}
    with pytest.raises(OSError, match="No space"):
        loss_plot.plot_metrics([row], tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []
    loss_plot.plot_metrics([], tmp_path / "loss.png")


def test_the_loss_is_drawn_at_most_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    times: list[float] = []
    monkeypatch.setattr(loss_plot, "plot_metrics", lambda rows, path, title: times.append(now[0]))
    plot = loss_plot.LossPlot(tmp_path / "metrics.jsonl", "loss")
    for now[0] in (130.0, 160.0, 160.5, 170.0, 221.0):
        plot.on_iteration(_record())
    assert times == [160.5, 221.0]
    plot.close()
    assert times == [160.5, 221.0, 221.0]


def test_no_chart_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**settings: Any) -> Any:
        raise ImportError("no _path in matplotlib")

    monkeypatch.setattr(loss_plot, "new_figure", broken)
    metrics = files.MetricsFile(tmp_path, 0)
    metrics.on_iteration(_record())
    metrics.close()
    with build.Reporters([loss_plot.LossPlot(metrics.path, "loss")]):
        pass
    warning = "LossPlot cannot write (matplotlib cannot be imported: no _path in matplotlib)"
    assert warning in capsys.readouterr().err


def test_a_figure_needs_no_backend_of_a_notebook() -> None:
    """Check it in a new process: matplotlib reads the variable when it is first imported."""
    program = "from megatron_ext.disk.figures import new_figure; print(new_figure(), end='')"
    notebook = {"MPLBACKEND": "module://matplotlib_inline.no_such_backend"}
    command = [sys.executable, "-c", f"{program}; import os; print(os.environ['MPLBACKEND'])"]
    shown = subprocess.check_output(command, text=True, env={**os.environ, **notebook})
    assert shown.startswith("Figure(") and shown.endswith("no_such_backend\n")


def test_every_line_is_json_even_with_a_bad_norm(tmp_path: Path) -> None:
    """Strict JSON knows no NaN; the file's reader, a resumed run and the plot do."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    path = tmp_path / "metrics.jsonl"
    bad = [
        _record(iteration, grad_norm=norm, skipped=1, total_skipped=7)
        for iteration, norm in enumerate((math.nan, math.inf, 0.5), start=1)
    ]
    for records, resumed_at in ((bad, 0), ([], 3)):
        _written(tmp_path, *records, resumed_at=resumed_at)
        rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
        assert [row["grad_norm"] for row in rows[:3]] == ["NaN", "Infinity", 0.5]
    rows = files.read_metrics(path)
    assert math.isnan(rows[0]["grad_norm"]) and rows[1]["grad_norm"] == math.inf
    assert rows[0]["skipped_iterations"] == 1
    assert math.isnan(rows[0]["train/grad_norm"]) and rows[0]["train/skipped_iterations"] == 7
    loss_plot.plot_metrics(rows, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    steps = [_record(i, losses={"lm loss": 8 - i / 10}) for i in range(1, 30)]
    rows = _written(tmp_path, *steps, EvaluationRecord("validation", 29, {"lm loss": 5.0}))
    loss_plot.plot_metrics(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_common_names_stand_beside_megatron_lms_in_the_file(tmp_path: Path) -> None:
    row, evaluation = _written(tmp_path, _record(total_skipped=2), VALIDATION)
    assert evaluation["val/loss"] == evaluation["lm loss"] == 3.5
    assert {name: row[name] for name in COMMON} == COMMON
    assert (row["lm loss"], row["learning_rate"]) == (7.422465, 0.0009140577)


class Account:
    """Keeps what it is told about the time of a run; its disk may be full."""

    def __init__(self, full: bool = False) -> None:
        self.full = full
        self.told: list[Any] = []

    def launched(self, config: Any, num_iterations: int) -> None:
        self.told.append(num_iterations)

    def write(self, iteration: int) -> None:
        self.told.append(iteration)
        if self.full:
            raise FULL

    def finish(self, reason: str) -> None:
        self.told.append(reason)


def test_a_fault_is_no_end_of_the_account_and_a_full_disk_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    account = Account(full=True)
    with pytest.raises(ZeroDivisionError), build.Reporters([], account) as reporters:
        reporters.on_iteration(_record(3))
        raise ZeroDivisionError
    assert account.told == [3]
    assert capsys.readouterr().err.startswith("warning: Account cannot write (")


def test_progress_is_appended(tmp_path: Path) -> None:
    for world_size in (2, 4):
        progress = files.ProgressFile(tmp_path, world_size)
        progress.on_iteration(_record())
        progress.on_evaluation(EvaluationRecord("validation", 12, {"lm loss": 3.5}))
        progress.close()
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    assert [line.split("\t", 1)[1] for line in lines[4:]] == [
        "started on 4 ranks",
        "iteration 12\tsamples 192\t2048 tokens/s",
        "evaluation at iteration 12\t{'lm loss': 3.5}",
        "ended",
    ]


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[float | str] = []

    def on_iteration(self, record: IterationRecord) -> None:
        self.seen.append(record.seconds)

    def on_step(self, record: IterationRecord) -> None:
        self.seen.append(f"step {record.seconds}")

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self.seen.append(record.split)

    def close(self, **options: bool) -> None:
        self.seen.append(f"end {options}" if options else "end")


def test_sinks_get_intervals_and_trackers_single_steps(capsys: pytest.CaptureFixture[str]) -> None:
    sink, tracker, account = Sink(), Sink(), Account()
    trackers: Any = tracker
    with build.Reporters([sink], account, trackers) as reporters:
        reporters.on_iteration(_record(3, seconds=0.3))
        reporters.on_step(_record(4, seconds=0.2))
        reporters.on_evaluation(VALIDATION)
        reporters.reason = "the clock"
        reporters.say("a sentence")
    assert sink.seen == [0.3, "validation", "end"]
    assert tracker.seen == ["step 0.2", "validation", "end {'failed': False}"]
    assert account.told == [3, "the clock"]
    assert capsys.readouterr().out == "> a sentence\n"
    with build.Reporters([]) as reporters:
        reporters.on_step(_record(4))
        reporters.say("nothing")
    assert reporters.writer is None
    assert capsys.readouterr().out == ""


def test_which_sinks_a_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = ["--save", str(tmp_path / "save")]
    config = config_of([*FLAGS, *save, *"--wandb-project p --wandb-exp-name e".split()])
    started: list[Any] = []
    account = Account()

    def rows(folder: Path, recorder: Any, launch: Launch, resumed_at: int) -> Account:
        started.append((folder, launch.started, resumed_at))
        return account

    monkeypatch.setattr(build, "_report_of", lambda save: SimpleNamespace(TimeRows=rows))
    starts: list[Any] = []
    monkeypatch.setattr(trackers.Trackers, "start", lambda self, *given: starts.append(given))
    kept: list[Any] = []
    monkeypatch.setattr(
        files, "MetricsFile", lambda *given: kept.append(given) or SimpleNamespace(path=tmp_path)
    )
    context: Any = SimpleNamespace(is_reporting_rank=True, recorder=None)

    def built(launched: Launch | None, config: Any = config) -> list[Any]:
        reporters = build.build_reporters(
            config, context, resumed_at=5, num_iterations=9, launched=launched
        )
        tracked = [] if reporters.trackers is None else ["Trackers"]
        return [*(type(sink).__name__ for sink in reporters.sinks), *tracked]

    usual = ["LinePrinter", "SimpleNamespace", "LossPlot"]
    assert built(Launch(77.0, ends_itself=True)) == [*usual, "Trackers"]
    assert (started, account.told) == ([(tmp_path / "save", 77.0, 5)], [9])
    assert built(None) == [*usual, "Trackers"]
    assert [given[1:] for given in kept] == starts == [(5, 77.0), (5, math.inf)]
    assert len(started) == 1
    logs = dataclasses.replace(config.logging, log_progress=True, wandb_project="")
    assert built(None, dataclasses.replace(config, logging=logs)) == [*usual, "ProgressFile"]
    context.is_reporting_rank = False
    assert built(None) == []


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("validation set 1", ["val/loss set 1"]),
        ("validation" + AVERAGED, ["val/loss ema"]),
        ("test", []),
    ],
)
def test_only_validation_splits_have_a_common_name(split: str, names: list[str]) -> None:
    assert list(EvaluationRecord(split, 1, {"lm loss": 1.0}).common) == names


FLAGS = [*TINY, *mock_data(), "--train-iters", "2"]


def test_flops_of_a_llama_layer_by_hand() -> None:
    config = config_of([*FLAGS, "--padded-vocab-size", "2048"])
    h, s, ffn, layers, vocab, kv = 64, 64, 172, 4, 2048, 32
    attention = h * (h + 2 * kv) + h * s + h * h  # QKV, scores and values (causal), output
    per_token = layers * (attention + 3 * h * ffn) + h * vocab
    assert flops_per_sample(config) == 3 * 2 * s * per_token


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Xeon", None)]
)
def test_peaks_of_known_gpus(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_sizes_layout_and_what_is_not_a_default_fill_less_than_a_screen() -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    config = config_of([*FLAGS, *layout, "--save", "out"], ranks=8)
    lines = start_lines(config, {"num_layers", "swiglu"})
    assert lines[:3] == [
        "> starting 8 ranks (cpu): tensor 2 × pipeline 2 × context 1 × data 2, schedule 1f1b",
        "> 2 iterations; 16 samples in a step: 4 micro-batches × micro-batch size 2 × "
        "data-parallel size 2",
        "> model: layers 4, hidden size 64, feed-forward 172, heads 4, sequence length 64",
    ]
    assert lines[3:5] == ["> given on the command line:", ">   model: --num-layers 4 --swiglu"]
    rest = " ".join(lines[6:])
    assert lines[5] == "> derived, or from a file, a checkpoint or the task:"
    for flag in ("--pipeline-schedule 1f1b", "--kv-channels 16", "--split 90,5,5", "--lr 0.001"):
        assert flag in rest
    assert lines[-1] == f"> the whole configuration is in out/{CONFIGURATION_FILE}"
    assert len(lines) < 40
    assert max(map(len, lines)) <= 100


def test_the_configuration_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = ["--nproc-per-node", "1", "--save", str(tmp_path), "--load", str(tmp_path)]
    assert main(GPT, [*FLAGS, *more, "--exit-interval", "1"]) == 0
    shown = capfd.readouterr().out
    # By hand: 2 x 2048 x 64 of the vocabulary, 4 layers, and the last norm.
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 172 + 2 * 64
    total = 2 * 2048 * 64 + 4 * layer + 64
    assert f"> parameters: {total:,}; at most {total:,} on one rank\n" in shown
    assert main(GPT, [*FLAGS, *more]) == 0
    kept = yaml.safe_load((tmp_path / CONFIGURATION_FILE).read_text())
    assert (kept["training"]["exit_interval"], kept["model"]["padded_vocab_size"]) == (None, 2048)
    words = ["--config", str(tmp_path / CONFIGURATION_FILE)]
    kept["model"]["unpadded_vocab_size"] = None  # The tokenizer gives it anew.
    assert config_of(words).to_dict() == kept


def _losses_on_board(folder: Path) -> dict[int, float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {event.step: event.value for event in events.Scalars("lm loss")}


def test_rows_and_boards_hold_the_losses_of_their_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The printed line of iteration 2 alone is the mean of two steps, as Megatron-LM prints it."""
    flags = [*TINY, *mock_data(), *"--train-iters 6 --num-layers 1".split()]
    board = ["--tensorboard-dir", str(tmp_path / "a")]
    rows = {row["iteration"]: row for row in train_steps([*flags, *board], tmp_path / "each")}
    own = {iteration: row["lm loss"] for iteration, row in rows.items()}
    printed = re.findall(r"iteration +(\d+)/.* lm loss: (\S+) ", capfd.readouterr().out)
    lines = {int(iteration): float(loss) for iteration, loss in printed}
    assert lines == pytest.approx({**own, 2: (own[1] + own[2]) / 2}, rel=1e-6)
    assert _losses_on_board(tmp_path / "a") == pytest.approx(own, rel=1e-6)
    assert own[1] != own[2] and sorted(own) == [1, 2, 3, 4, 5, 6]

    often = f"--log-interval 3 --tensorboard-dir {tmp_path / 'b'} --tensorboard-log-interval 2"
    rows = {r["iteration"]: r for r in train_steps([*flags, *often.split()], tmp_path / "third")}
    want = {1: own[1], 3: (own[2] + own[3]) / 2, 6: (own[4] + own[5] + own[6]) / 3}
    assert {x: row["lm loss"] for x, row in rows.items()} == pytest.approx(want, rel=1e-6)
    even = {step: own[step] for step in (2, 4, 6)}
    assert _losses_on_board(tmp_path / "b") == pytest.approx(even, rel=1e-6)


def test_the_memory_of_a_gpu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those that torch counts as allocated and as reserved."""
    for name, count in {"allocated": 3 * 2**30, "reserved": 5 * 2**30}.items():
        monkeypatch.setattr(torch.cuda, f"memory_{name}", lambda _device, count=count: count)
    assert loop.memory_of(torch.device("cpu")) == {}
    record = _record(memory=loop.memory_of(torch.device("cuda")))
    (row,) = _written(tmp_path, record)
    assert (row["memory/allocated"], row["memory/reserved"]) == (3 * 2.0**30, 5 * 2.0**30)


def test_steps_whose_data_decides_their_size_say_so() -> None:
    config = config_of(FLAGS, ranks=2)
    training = dataclasses.replace(config.training, micro_batch_range=(2, 8))
    lines = start_lines(dataclasses.replace(config, training=training), set())
    assert "16 to 64 samples in a step: 4 micro-batches × micro-batch size 2 to 8 × " in lines[1]


@pytest.mark.parametrize(
    ("load", "ranks", "threads", "is_told"),
    [(4.5, 1, None, True), (3.5, 1, None, False), (4.5, 1, "1", False), (4.5, 4, None, False)],
)
def test_the_first_lines_tell_of_threads_that_will_wait_for_processors(
    load: float, ranks: int, threads: str | None, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of([*FLAGS, "--nproc-per-node", str(ranks)], ranks=ranks)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert ("busy (load 4.5 on 4 processors)" in start_lines(config, set())[-1]) == is_told


def test_the_first_lines_name_experts_and_samples_and_quote_words(tmp_path: Path) -> None:
    more = "--num-experts 4 --expert-model-parallel-size 2 --train-samples 32 --no-load-optim"
    more += " --no-calculate-per-token-loss"
    flags = [*TINY, *mock_data(), *more.split(), "--load", str(tmp_path / "a b")]
    config = config_of(without(flags, "--lr-warmup-iters", "--lr-decay-iters"), ranks=2)
    lines = start_lines(config, {"num_experts"})
    assert lines[0].endswith("data 2, experts over 2")
    assert lines[1].startswith("> 32 samples; 16 samples in a step: ")
    text = " ".join(line.removeprefix(">").strip() for line in lines)
    assert f"--load '{tmp_path}/a b'" in text
    assert "--no-calculate-per-token-loss" in text and "False" not in text
    assert lines[-1] == "> `--print-config` shows the whole configuration"


def test_the_lines_on_parameters_and_implementations() -> None:
    assert parameters_line(2000, 1500, 700) == (
        "parameters: 2,000, 1,500 of them trained; at most 700 on one rank"
    )
    config = config_of(FLAGS)
    plain = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])

    class Own(torch.optim.AdamW):
        pass

    Own.__module__ = "megatron_ext.optim.own"
    own = Own([torch.zeros(1, requires_grad=True)])

    def line(optimizer: Any, fp8: Fp8Config | None = None) -> str:
        return implementation_line(config.model, fp8 or config.fp8, optimizer)

    assert line(None).endswith("; optimizer: none; fp8: none")
    for one in (plain, own):
        assert line(SimpleNamespace(optimizer=one)).endswith("; optimizer: torch AdamW; fp8: none")
    none = SimpleNamespace(optimizer=None)
    chain = SimpleNamespace(chained_optimizers=[none, SimpleNamespace(optimizer=plain)])
    assert "; optimizer: torch AdamW;" in line(chain)
    assert "; optimizer: none on this rank;" in line(SimpleNamespace(chained_optimizers=[none]))
    plain.matrices = []  # type: ignore[attr-defined]
    assert "; optimizer: Muon and torch AdamW;" in line(SimpleNamespace(optimizer=plain))
    plain.param_groups[0]["fused"] = True
    assert "; optimizer: Muon and torch AdamW fused;" in line(SimpleNamespace(optimizer=plain))
    plain.make_kernel = True  # type: ignore[attr-defined]
    assert "; optimizer: Muon and Triton AdamW;" in line(SimpleNamespace(optimizer=plain))
    for gathers, said in ((True, ", weights kept in 8 bits"), (False, "")):
        fp8 = Fp8Config(fp8_format="e4m3", fp8_recipe="delayed", fp8_param_gather=gathers)
        assert line(None, fp8).endswith(f"; fp8: e4m3 by the delayed recipe{said}")


def test_a_configuration_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    files.write_configuration("old", folder)

    def full(*_: Any) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr("megatron_ext.train.reporting.files.os.replace", full)
        with pytest.raises(OSError, match="No space"):
            files.write_configuration("new", folder)
    assert (folder / CONFIGURATION_FILE).read_text() == "old"
    files.write_configuration("new", folder)
    assert (folder / CONFIGURATION_FILE).read_text() == "new"
    assert len(list(folder.iterdir())) == 1
