"""Reports have Megatron-LM's line to the character, and files that survive kills."""

import dataclasses
import json
import math
import re
import resource
import signal
import sys
import threading
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megatron_ext.config.output import LoggingConfig
from megatron_ext.device.gpus import peak_flops
from megatron_ext.text.cost.flops import flops_per_sample
from megatron_ext.text.task import GPT
from megatron_ext.train import loop
from megatron_ext.train.main import main
from megatron_ext.train.reporting import build, files
from megatron_ext.train.reporting.records import AVERAGED, EvaluationRecord, IterationRecord
from megatron_ext.train.reporting.start import CONFIGURATION_FILE, start_lines
from tests.training_runs import TINY, config_of, mock_data, train_steps


def _record(iteration: int = 12, **values: object) -> IterationRecord:
    fields: dict[str, object] = {
        "iteration": iteration,
        "num_iterations": 100,
        "consumed_samples": 192,
        "seconds": 0.5,
        "learning_rate": 0.0009140577,
        "global_batch_size": 16,
        "losses": {"lm loss": 7.422465},
        "loss_scale": 1.0,
        "grad_norm": 0.68417,
        "samples": 16,
        "tokens": 1024,
        "flops": 2e12,
        "world_size": 2,
    }
    return IterationRecord(**{**fields, **values})  # type: ignore[arg-type]


def _written(
    folder: Path, *records: IterationRecord | EvaluationRecord, resumed_at: int = 0
) -> list[dict[str, Any]]:
    metrics = files.MetricsFile(folder, resumed_at)
    for record in records:
        evaluates = isinstance(record, EvaluationRecord)
        (metrics.on_evaluation if evaluates else metrics.on_iteration)(record)
    metrics.close()
    return files.read_metrics(metrics.path)


FULL = OSError(28, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every disk seem full, as it is where a write has just failed."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=9, used=9, free=0))


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


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_of_tensorboard_prints_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    board = build.TensorBoard(str(tmp_path), LoggingConfig(tensorboard_queue_size=1))
    with build.Reporters([board]) as reporters:
        reporters.on_iteration(_record())
        monkeypatch.setattr(RecordWriter, "write", full)
        for iteration in range(13, 16):
            reporters.on_iteration(_record(iteration))
    shown = capsys.readouterr().err
    assert shown.startswith("warning: TensorBoard cannot write (the disk of ")
    assert shown.count("\n") == 1


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
    line = files.iteration_line(_record(), datetime(2026, 1, 2, 3, 4, 5), on_gpu=False)
    megatron = (
        " [2026-01-02 03:04:05.000000] iteration       12/     100 | consumed samples:"
        "          192 | elapsed time per iteration (ms): 500.0 | learning rate: 9.140577E-04 | "
        "global batch size:    16 | lm loss: 7.422465E+00 | loss scale: 1.0 | grad norm: 0.684 |"
    )
    assert line.startswith(megatron)
    assert line.endswith(" number of skipped iterations:   0 | number of nan iterations:   0 |")
    assert "TFLOP" not in line and "MFU: n/a" in line
    line = files.iteration_line(_record(peak_flops=4e12), datetime(2026, 1, 1), on_gpu=True)
    for part in ("throughput per GPU (TFLOP/s/GPU): 2.0 |", "MFU: 50.0%", "ETA: 0:00:44"):
        assert part in line


def test_evaluation_lines_are_framed() -> None:
    lines = files.evaluation_lines(EvaluationRecord("validation ema", 5, {"lm loss": 2.0}))
    assert " at iteration 5 with averaged weights | lm loss value: 2.000000E+00 |" in lines[1]
    lines = files.evaluation_lines(EvaluationRecord("test", 12, {"lm loss": 2.0}, final=True))
    assert lines[1] == (
        " validation loss at iteration 12 on test set | lm loss value: 2.000000E+00 | "
        f"lm loss PPL: {math.exp(2):.6E} | "
    )
    assert lines[0] == lines[2] == "-" * (len(lines[1]) + 1)
    losses = {"lm loss": 2.0, "kept tokens": 0.5}
    lines = files.evaluation_lines(EvaluationRecord("validation", 5, losses))
    assert lines[1].endswith(f"lm loss PPL: {math.exp(2):.6E} | kept tokens value: 5.000000E-01 | ")
    assert (
        "PPL"
        not in files.evaluation_lines(EvaluationRecord("validation", 5, {"focal loss": 1.0}))[1]
    )


def test_a_resumed_run_rewrites_what_it_does_again(tmp_path: Path) -> None:
    last = EvaluationRecord("validation", 5, {"lm loss": 1.0}, final=True)
    _written(tmp_path, *map(_record, range(1, 6)), last)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iterat')  # a kill in the middle of a line
    rows = _written(tmp_path, _record(4), resumed_at=3)
    assert [row["iteration"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]


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
    files.plot_metrics(rows, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    steps = [_record(i, losses={"lm loss": 8 - i / 10}) for i in range(1, 30)]
    rows = _written(tmp_path, *steps, EvaluationRecord("validation", 29, {"lm loss": 5.0}))
    files.plot_metrics(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_tags_are_megatron_lms() -> None:
    config = LoggingConfig(log_validation_ppl_to_tensorboard=True, log_throughput=True)
    scalars = build.iteration_scalars(_record(), config)
    assert sorted(scalars) == sorted(
        ["learning-rate", "batch-size", "lm loss", "grad-norm", "loss-scale", "throughput"]
    )
    record = EvaluationRecord("validation", 1, {"lm loss": 1.0, "kept tokens": 0.5})
    assert build.evaluation_scalars(record, config) == {
        "lm loss validation": 1.0,
        "lm loss validation ppl": math.exp(1.0),
        "kept tokens validation": 0.5,
    }


COMMON = {
    "train/loss": 7.422465,
    "train/lr": 0.0009140577,
    "train/grad_norm": 0.68417,
    "train/skipped_iterations": 2.0,
    "train/time(s)": 0.5,
}
VALIDATION = EvaluationRecord("validation", 12, {"lm loss": 3.5, "mtp_1 loss": 4.0})


def test_common_names_stand_beside_megatron_lms_in_the_file(tmp_path: Path) -> None:
    row, evaluation = _written(tmp_path, _record(total_skipped=2), VALIDATION)
    assert evaluation["val/loss"] == evaluation["lm loss"] == 3.5
    assert {name: row[name] for name in COMMON} == COMMON
    assert (row["lm loss"], row["learning_rate"]) == (7.422465, 0.0009140577)


def test_common_names_reach_tensorboard_also_when_not_finite(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = build.TensorBoard(str(tmp_path), LoggingConfig())
    sink.on_iteration(_record(12, total_skipped=2))
    sink.on_iteration(_record(13, grad_norm=math.inf))
    sink.on_evaluation(VALIDATION)
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    for name, value in {**COMMON, "lm loss": 7.422465}.items():
        assert events.Scalars(name)[0].value == pytest.approx(value, rel=1e-6)
        assert events.Scalars(name)[0].step == 12
    assert events.Scalars("train/grad_norm")[1].value == math.inf
    assert [(e.step, e.value) for e in events.Scalars("val/loss")] == [(12, 3.5)]


def test_common_names_reach_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    server = SimpleNamespace(log=lambda scalars, step: logged.append(scalars))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: server))
    sink = build.WeightsAndBiases(LoggingConfig(wandb_project="p"), str(tmp_path), {})
    sink.on_iteration(_record(total_skipped=2))
    assert logged[0].items() >= {**COMMON, "grad-norm": 0.68417}.items()
    sink.on_evaluation(VALIDATION)
    assert logged[1] == {"lm loss validation": 3.5, "mtp_1 loss validation": 4.0, "val/loss": 3.5}


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
