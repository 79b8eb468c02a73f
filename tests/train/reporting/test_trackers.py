"""Trackers get each step's own values, and no fault of theirs ends a run."""

import json
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.output import CheckpointConfig, LoggingConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.train.main import check_folders
from megatron_ext.train.reporting import build, services, trackers
from megatron_ext.train.reporting.records import EvaluationRecord
from tests.train.reporting.made_up import COMMON, FULL, VALIDATION
from tests.train.reporting.made_up import record_of as _record
from tests.training_runs import TINY, config_of, mock_data

WANDB = "--wandb-project p --wandb-exp-name e"
MLFLOW = "--mlflow-experiment e --mlflow-tracking-uri http://server"
TRACKIO = "--trackio-project p"


def config_with(*words: str) -> RunConfig:
    """Return the configuration of a tiny run with further flags."""
    flags = [word for some in words for word in some.split()]
    return config_of([*TINY, *mock_data(), "--train-iters", "2", *flags])


def test_tags_are_megatron_lms() -> None:
    config = LoggingConfig(log_validation_ppl_to_tensorboard=True, log_throughput=True)
    scalars = trackers.iteration_scalars(_record(), config)
    assert sorted(scalars) == sorted(
        ["learning-rate", "batch-size", "lm loss", "grad-norm", "loss-scale", "throughput"]
    )
    every = LoggingConfig(
        log_loss_scale_to_tensorboard=False,
        log_world_size_to_tensorboard=True,
        log_timers_to_tensorboard=True,
    )
    record = _record(
        num_zeros=7.0, params_norm=3.5, attention_logits={"layer 1": 8.0, "layer 2": 9.0}
    )
    found = trackers.iteration_scalars(record, every)
    names = ["max_attention_logit", "max_attention_logit/layer 1", "max_attention_logit/layer 2"]
    assert [found[name] for name in names] == [9.0, 8.0, 9.0]
    assert (found["world-size"], found["iteration-time"]) == (2.0, 0.5)
    assert (found["num-zeros"], found["params-norm"], found["batch-size"]) == (7.0, 3.5, 16.0)
    assert not {"loss-scale", "throughput"} & found.keys()
    assert trackers.iteration_scalars(_record(), config)["throughput"] == 2.0
    plain = LoggingConfig(log_validation_ppl_to_tensorboard=False)
    assert list(trackers.evaluation_scalars(VALIDATION, plain)) == [
        "lm loss validation", "mtp_1 loss validation",
    ]  # fmt: skip
    # The perplexity is bounded as in Megatron-LM, and other tasks have none.
    assert EvaluationRecord("test", 1, {"lm loss": 900.0}).perplexity_of("lm loss") == math.exp(20)
    assert (
        EvaluationRecord("test", 1, {"lm loss": 1.0}, perplexity=False).perplexity_of("lm loss")
        is None
    )
    evaluation = EvaluationRecord("validation", 1, {"lm loss": 1.0, "kept tokens": 0.5})
    assert trackers.evaluation_scalars(evaluation, config) == {
        "lm loss validation": 1.0,
        "lm loss validation ppl": math.exp(1.0),
        "kept tokens validation": 0.5,
    }


def test_the_memory_of_a_gpu_has_megatron_lms_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoggingConfig(log_memory_to_tensorboard=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not any(name.startswith("mem") for name in trackers.iteration_scalars(_record(), config))
    stats = {"reserved_bytes.all.current": 3, "allocated_bytes.all.current": 1}
    stats["allocated_bytes.all.peak"] = 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    found = trackers.iteration_scalars(_record(), config)
    assert {name: value for name, value in found.items() if name.startswith("mem")} == {
        "mem-reserved-bytes": 3, "mem-allocated-bytes": 1, "mem-max-allocated-bytes": 2,
    }  # fmt: skip


class Wandb:
    """Stands in for Weights & Biases: keeps what it is sent, by run."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.runs: list[Any] = []
        self.last_step = 0

    def init(self, **given: Any) -> Any:
        self.given = given
        run = SimpleNamespace(
            id=given.get("id", f"id{len(self.runs)}"),
            starting_step=self.last_step + 1 if "id" in given else 0,
            rows=[],
            artifacts=[],
            exit_code=None,
        )
        run.log = lambda scalars, step: run.rows.append((step, scalars))
        run.log_artifact = lambda path, **named: run.artifacts.append((path, named))
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    service = Wandb()
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", service)
    return service


class MlflowError(Exception):
    """An error of the stand-in for MLflow."""

    def __init__(self, error_code: str) -> None:
        super().__init__(error_code)
        self.error_code = error_code


class Mlflow:
    """Stands in for MLflow's package and client."""

    def __init__(self) -> None:
        self.entities = SimpleNamespace(
            Param=lambda name, value: (name, value),
            Metric=lambda name, value, time, step: (name, value, step),
        )
        self.exceptions = SimpleNamespace(MlflowException=MlflowError)
        self.uri: str | None = ""
        self.experiments: list[str] = []
        self.runs: dict[str, Any] = {}
        self.sizes: list[int] = []
        self.fault: Exception | None = None
        self.going = threading.Event()
        self.going.set()

    def MlflowClient(self, tracking_uri: str | None) -> Any:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        if name not in self.experiments:
            return None
        return SimpleNamespace(experiment_id=str(self.experiments.index(name)))

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return str(len(self.experiments) - 1)

    def create_run(self, experiment: str, run_name: str) -> Any:
        info = SimpleNamespace(run_id=f"run{len(self.runs)}", lifecycle_stage="active")
        run = SimpleNamespace(info=info, data=SimpleNamespace(params={}), name=run_name)
        run.metrics, run.artifacts, run.status = [], [], "RUNNING"
        self.runs[info.run_id] = run
        return run

    def get_run(self, run_id: str) -> Any:
        if self.fault is not None:
            raise self.fault
        if run_id not in self.runs:
            raise MlflowError("RESOURCE_DOES_NOT_EXIST")
        return self.runs[run_id]

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].status = status

    def log_batch(self, run_id: str, params: Any = (), metrics: Any = ()) -> None:
        self.going.wait(10)
        if self.fault is not None:
            raise self.fault
        self.sizes.append(len([*params, *metrics]))
        for name, value in params:
            assert self.runs[run_id].data.params.setdefault(name, value) == value
        self.runs[run_id].metrics += metrics

    def log_artifact(self, run_id: str, path: str) -> None:
        self.runs[run_id].artifacts.append(path)

    def log_artifacts(self, run_id: str, path: str, name: str) -> None:
        self.runs[run_id].artifacts.append((path, name))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id].status = status


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    service = Mlflow()
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", service)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    return service


class Trackio:
    """Stands in for Trackio, which finds runs by name."""

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.finished: list[str] = []

    def init(self, *, name: str | None, resume: str, project: str, config: Any, embed: bool) -> Any:
        named = [run for run in self.runs if run.name == name]
        if resume == "allow" and named:
            return named[-1]
        number = len(self.runs)
        run = SimpleNamespace(name=name or f"made-up-{number}", id=f"id{number}", config=config)
        run.rows, run.artifacts = [], []
        run.log = lambda scalars, step: run.rows.append((step, scalars))
        run.log_artifact = lambda path, **named: run.artifacts.append((path, named))
        self.runs.append(run)
        return run

    def finish(self) -> None:
        self.finished.append("finished")


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> Trackio:
    service = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", service)
    return service


def started(config: RunConfig, resumed_at: int = 0, launched_at: float = math.inf) -> Any:
    """Return the trackers of a run that has just been started or resumed."""
    made = trackers.Trackers(config)
    made.start(resumed_at, launched_at)
    return made


def test_what_wandb_gets(tmp_path: Path, wandb: Wandb) -> None:
    # A link that somebody has left there would lead out of the folder.
    for folder in ("save", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "wandb").symlink_to(tmp_path)
    config = config_with(WANDB, "--wandb-entity team --save", str(tmp_path / "save"))
    made = started(config)
    assert wandb.given == {
        "project": "p", "name": "e", "entity": "team", "dir": str(tmp_path / "save"),
        "config": config.to_dict(), "allow_val_change": True,
    }  # fmt: skip
    assert not (tmp_path / "save" / "wandb").is_symlink()
    made.on_step(_record(total_skipped=2))
    made.on_evaluation(VALIDATION)
    made.close()
    (first, row), (second, evaluation) = wandb.runs[0].rows
    assert (first, second, wandb.runs[0].exit_code) == (12, 12, 0)
    assert row.items() >= {**COMMON, "grad-norm": 0.68417, "samples vs steps": 192}.items()
    assert evaluation == {
        "lm loss validation": 3.5, "mtp_1 loss validation": 4.0, "val/loss": 3.5,
    }  # fmt: skip
    started(config_with(WANDB, "--wandb-save-dir", str(tmp_path / "own")))
    assert (wandb.given["dir"], wandb.given["entity"]) == (str(tmp_path / "own"), None)
    assert not (tmp_path / "own" / "wandb").is_symlink()


def test_wandb_keeps_the_first_values_of_repeated_steps_and_a_sentence_says_so(
    tmp_path: Path, wandb: Wandb, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with(WANDB, "--save", str(tmp_path))
    started(config).close(failed=True)
    assert wandb.runs[0].exit_code == 1
    wandb.last_step = 10
    assert not capsys.readouterr().err
    made = started(config, resumed_at=10)
    assert (wandb.given["id"], wandb.given["resume"]) == ("id0", "allow")
    assert not capsys.readouterr().err
    made = started(config, resumed_at=8)
    assert "gets no others of the steps 9 to 10." in capsys.readouterr().err
    made.on_evaluation(EvaluationRecord("validation", 8, {"lm loss": 1.0}))
    for iteration in (9, 10, 11):
        made.on_step(_record(iteration))
    assert [step for step, _ in wandb.runs[-1].rows] == [11, 11]


def test_what_mlflow_gets(tmp_path: Path, mlflow: Mlflow) -> None:
    made = started(config_with(MLFLOW, "--save", str(tmp_path / "name")))
    (run,) = mlflow.runs.values()
    assert (mlflow.uri, mlflow.experiments, run.name) == ("http://server", ["e"], "name")
    params = run.data.params
    assert (params["optimizer.lr"], params["device"]) == ("0.001", "cpu")
    assert max(mlflow.sizes) <= 100 < len(params)
    made.on_step(_record(total_skipped=2, grad_norm=math.inf))
    made.on_evaluation(VALIDATION)
    made.close()
    values = {name: (value, step) for name, value, step in run.metrics}
    # MLflow allows no parentheses in a name.
    assert values["train/time_s"] == (0.5, 12) and "train/time(s)" not in values
    assert values["grad-norm"] == (math.inf, 12)
    assert values["lm loss"] == (7.422465, 12) and values["lm loss validation"] == (3.5, 12)
    assert run.status == "FINISHED"
    started(config_with("--mlflow-experiment e --mlflow-run-name own")).close(failed=True)
    again = mlflow.runs["run1"]
    assert (mlflow.uri, mlflow.experiments, again.name) == (None, ["e"], "own")
    assert again.status == "FAILED"


def test_training_does_not_wait_for_mlflow(mlflow: Mlflow, tmp_path: Path) -> None:
    made = started(config_with(MLFLOW))
    mlflow.sizes.clear()
    mlflow.going.clear()
    for iteration in range(1, 201):
        made.on_step(_record(iteration))
    assert mlflow.sizes == []
    mlflow.going.set()
    made.close()
    steps = [step for name, _, step in mlflow.runs["run0"].metrics if name == "lm loss"]
    assert steps == list(range(1, 201))
    assert mlflow.sizes[1:-1] == [1000] * (len(mlflow.sizes) - 2)


def test_mlflow_notes_the_settings_that_change_when_a_run_is_resumed(
    tmp_path: Path, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    save = f"--save {tmp_path}"
    started(config_with(MLFLOW, save)).close()
    made = started(config_with(MLFLOW, save, "--lr 2e-3"), resumed_at=20)
    (run,) = mlflow.runs.values()
    changed = {name: value for name, value in run.data.params.items() if " from step " in name}
    assert changed == {"optimizer.lr from step 21": "0.002"}
    assert run.status == "RUNNING"
    made.close()
    run.info.lifecycle_stage = "deleted"
    started(config_with(MLFLOW, save), resumed_at=20)
    assert sorted(mlflow.runs) == ["run0", "run1"]
    del mlflow.runs["run1"]
    started(config_with(MLFLOW, save), resumed_at=20)
    assert capsys.readouterr().err == (
        "note: MLflow has no run run0 (any more); a new one is started.\n"
        "note: MLflow has no run run1 (any more); a new one is started.\n"
    )


def test_the_run_that_the_environment_names_counts_before_the_remembered_one(
    tmp_path: Path,
    wandb: Wandb,
    mlflow: Mlflow,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_with(WANDB, MLFLOW, "--save", str(tmp_path))
    mlflow.create_run("0", "of a scheduler")
    monkeypatch.setenv("WANDB_RUN_ID", "of-a-sweep")
    monkeypatch.setenv("MLFLOW_RUN_ID", "run0")
    started(config).close()
    assert (wandb.given["id"], "resume" in wandb.given) == ("of-a-sweep", False)
    assert list(mlflow.runs) == ["run0"] and not capsys.readouterr().err
    monkeypatch.setenv("WANDB_RUN_ID", "another")
    started(config, resumed_at=2).close()
    assert (wandb.given["id"], wandb.given["resume"]) == ("another", "allow")
    assert list(mlflow.runs) == ["run0"]
    assert capsys.readouterr().err == (
        "note: WANDB_RUN_ID (another) takes the place of the run of-a-sweep, in which this "
        "training run went on so far.\n"
    )


def test_what_trackio_gets(tmp_path: Path, trackio: Trackio) -> None:
    save = f"--save {tmp_path}"
    made = started(config_with(TRACKIO, save, "--trackio-run-name n"))
    made.on_step(_record(12))
    made.close()
    resumed = started(config_with(TRACKIO, save, "--trackio-run-name n"), resumed_at=12)
    resumed.on_step(_record(13))
    (run,) = trackio.runs
    assert [(step, row["lm loss"], row["train/samples"]) for step, row in run.rows] == [
        (12, 7.422465, 192.0), (13, 7.422465, 192.0),
    ]  # fmt: skip
    assert (run.name, run.config["optimizer.lr"], trackio.finished) == ("n", 0.001, ["finished"])
    # Another run takes the name. The first one does not go on in it.
    started(config_with(TRACKIO, "--trackio-run-name n"))
    started(config_with(TRACKIO, save, "--trackio-run-name n"), resumed_at=13)
    assert [run.name for run in trackio.runs] == ["n", "n", "n from step 14"]


def test_a_run_goes_on_in_its_old_run_only_where_it_is_the_same(
    tmp_path: Path, trackio: Trackio, wandb: Wandb, capsys: pytest.CaptureFixture[str]
) -> None:
    save = f"--save {tmp_path / 'a'}"

    def number(words: str, resumed_at: int, launched_at: float = math.inf) -> int:
        made = started(config_with(words), resumed_at, launched_at)
        return trackio.runs.index(made._trackers["Trackio"]._run)

    assert number(f"{TRACKIO} {save}", 0, 100.0) == 0
    # Restarted ranks belong to the same launch; another launch from the start is another run.
    assert number(f"{TRACKIO} {save}", 0, 100.5) == 0
    assert number(f"{TRACKIO} {save}", 0, 300.0) == 1
    assert number(f"{TRACKIO} {save}", 5, 500.0) == 1
    # The other tracker's run is not forgotten.
    started(config_with(WANDB, save), 6)
    assert number(f"{TRACKIO} {save}", 7) == 1
    assert number(f"--trackio-project other {save}", 8) == 2
    assert number(f"{TRACKIO} --save {tmp_path / 'b'}", 8) == 3
    # Without a save folder nothing is kept.
    assert number(TRACKIO, 0) == number(TRACKIO, 9) - 1
    assert not Path(trackers.TRACKERS_FILE).exists()
    assert not capsys.readouterr().err
    for broken in ("{", "[]", '{"trackio": {"place": ["p"], "identity": 3}}'):
        (tmp_path / "b" / trackers.TRACKERS_FILE).write_text(broken)
        count = len(trackio.runs)
        assert number(f"{TRACKIO} --save {tmp_path / 'b'}", 8) == count
    assert capsys.readouterr().err.count("; the trackers start new runs.") == 2


def test_a_tracker_that_does_not_start_ends_a_new_run_but_no_resumed_one(
    tmp_path: Path,
    mlflow: Mlflow,
    trackio: Trackio,
    wandb: Wandb,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_with(MLFLOW, WANDB, "--save", str(tmp_path))
    for fault in (ConnectionRefusedError("API_DOWN"), MlflowError("API_DOWN")):
        mlflow.fault = fault
        with pytest.raises(ConfigError) as caught:
            started(config)
        assert caught.value.messages == (
            "`--mlflow-experiment` (e) starts no run in MLflow (API_DOWN); repair that, or leave "
            "the flag out.",
        )
    # The run that had been started elsewhere is ended.
    assert wandb.runs[-1].exit_code == 1
    mlflow.fault = None
    started(config)
    kept = json.loads((tmp_path / trackers.TRACKERS_FILE).read_text())
    mlflow.fault = MlflowError("API_DOWN")
    made = started(config, resumed_at=5)
    made.on_step(_record(6))
    assert [step for step, _ in wandb.runs[-1].rows] == [6]
    assert capsys.readouterr().err.startswith("warning: MLflow cannot write (API_DOWN); training")
    # The next restart may reach it again.
    again = json.loads((tmp_path / trackers.TRACKERS_FILE).read_text())
    assert again["mlflow"] == kept["mlflow"]


def test_a_tracker_that_breaks_is_said_once_and_the_others_go_on(
    mlflow: Mlflow,
    wandb: Wandb,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(services.MLflow, "SECONDS_TO_END", 0.05)
    with build.Reporters([], None, started(config_with(MLFLOW, WANDB))) as reporters:
        mlflow.fault = MlflowError("API_DOWN")
        for iteration in range(1, 4):
            reporters.on_step(_record(iteration))
            time.sleep(0.01)
        mlflow.fault = None
        time.sleep(0.01)
        for iteration in range(4, 6):
            reporters.on_step(_record(iteration))
            time.sleep(0.02)
    assert [step for step, _ in wandb.runs[0].rows] == [1, 2, 3, 4, 5]
    steps = [step for name, _, step in mlflow.runs["run0"].metrics if name == "lm loss"]
    assert steps[-1] == 5 and 1 not in steps
    assert capsys.readouterr().err.count("warning: MLflow cannot write (API_DOWN); training ") == 1
    # A server that does not answer does not hold up the end.
    made = started(config_with(MLFLOW))
    mlflow.going.clear()
    made.on_step(_record(1))
    begin = time.monotonic()
    made.close()
    assert time.monotonic() < begin + 5
    mlflow.going.set()


def test_artifacts_are_uploaded_when_asked_for_and_only_of_a_run_that_ends_well(
    tmp_path: Path, mlflow: Mlflow, wandb: Wandb, trackio: Trackio
) -> None:
    for step in (4, 8):
        (tmp_path / f"iter_{step:07d}").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    newest, report = str(tmp_path / "iter_0000008"), str(tmp_path / "report.html")
    plain = f"{MLFLOW} {WANDB} {TRACKIO} --save {tmp_path}"
    both = f"{plain} --tracker-artifacts checkpoint report"
    for words, failed, counts in ((plain, False, 0), (both, True, 0), (both, False, 2)):
        started(config_with(words)).close(failed=failed)
        for service in (mlflow, wandb, trackio):
            runs: Any = service.runs
            run = list(runs.values())[-1] if isinstance(runs, dict) else runs[-1]
            assert len(run.artifacts) == counts, words
    assert (
        run.artifacts
        == wandb.runs[-1].artifacts
        == [
            (newest, {"name": "model-id2", "type": "model"}),
            (report, {"name": "report-id2", "type": "report"}),
        ]
    )
    assert mlflow.runs["run2"].artifacts == [(newest, "iter_0000008"), report]
    assert "<html" in Path(report).read_text()


def test_a_missing_package_is_told_before_training_and_a_broken_one_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_folders(LoggingConfig(mlflow_experiment="e", trackio_project="p"), CheckpointConfig())
    assert caught.value.messages == (
        "`--mlflow-experiment` (e) needs MLflow, which is not installed; run `pip install mlflow`.",
        "`--trackio-project` (p) needs Trackio, which is not installed; run `pip install trackio`.",
    )
    (tmp_path / "wandb.py").write_text("import math; math.float_")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"needs the package wandb, which cannot be imported"):
        started(config_with(WANDB))


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_of_tensorboard_prints_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    made = started(config_with(f"--tensorboard-dir {tmp_path} --tensorboard-queue-size 1"))
    with build.Reporters([], None, made) as reporters:
        reporters.on_step(_record())
        monkeypatch.setattr(RecordWriter, "write", full)
        for iteration in range(13, 16):
            reporters.on_step(_record(iteration))
    shown = capsys.readouterr().err
    assert shown.startswith("warning: TensorBoard cannot write (the disk of ")
    assert shown.count("\n") == 1


def test_common_names_reach_tensorboard_also_when_not_finite(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    made = started(config_with(f"--tensorboard-dir {tmp_path}"))
    assert made.writer is not None
    made.on_step(_record(12, total_skipped=2))
    made.on_step(_record(13, grad_norm=math.inf))
    made.on_evaluation(VALIDATION)
    made.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    for name, value in {**COMMON, "lm loss": 7.422465}.items():
        assert events.Scalars(name)[0].value == pytest.approx(value, rel=1e-6)
        assert events.Scalars(name)[0].step == 12
    assert events.Scalars("train/grad_norm")[1].value == math.inf
    assert [(e.step, e.value) for e in events.Scalars("val/loss")] == [(12, 3.5)]
    samples = events.Scalars("lm loss vs samples")
    assert [event.step for event in samples] == [192, 192]


def test_only_write_errors_of_tensorboards_own_thread_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    board = started(config_with(f"--tensorboard-dir {tmp_path}"))
    own = type("_AsyncWriterThread", (), {})()
    for thread, error in ((own, FULL), (own, ValueError()), (threading.current_thread(), FULL)):
        threading.excepthook(SimpleNamespace(thread=thread, exc_value=error))  # type: ignore[arg-type]
    assert [type(x.exc_value) for x in told] == [ValueError, OSError]
    closed: list[bool] = []
    monkeypatch.setattr(board.writer, "close", lambda: closed.append(True))
    board.close()
    assert closed == [True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself_keeps_a_run_and_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path / 'store'}"
    flags = f"--mlflow-experiment e --mlflow-tracking-uri {uri} --save {tmp_path}"
    for first, lr in ((1, "1e-3"), (3, "2e-3")):
        made = started(config_with(flags, f"--lr {lr}"), resumed_at=first - 1)
        for iteration in (first, first + 1):
            made.on_step(_record(iteration, losses={"lm loss": 10.0 - iteration}))
        made.close()
    client = real.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params["optimizer.lr from step 3"] == "0.002"
    history = client.get_metric_history(run.info.run_id, "lm loss")
    assert [(point.step, point.value) for point in history] == [
        (1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0),
    ]  # fmt: skip
