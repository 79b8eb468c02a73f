"""Sends the values of single steps to trackers: TensorBoard, Weights & Biases, MLflow and Trackio.

Each tracker is a class with the methods of `Tracker`, and a row in `KINDS`. A run keeps the
identities of its runs in the trackers in ``trackers.json`` in its save folder, so that it goes on
in the same ones when it is resumed from there.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_ext import extras, limits
from megatron_ext.config.output import LoggingConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import ConfigError, FlagError, say_to_stderr
from megatron_ext.train.reporting.files import is_launch
from megatron_ext.train.reporting.records import EvaluationRecord, IterationRecord

TRACKERS_FILE = "trackers.json"
_LONGEST_CAUSE = 300
Record = IterationRecord | EvaluationRecord
Identity = Mapping[str, str]
"""Values by which a tracker finds one of its runs again, such as the run's id."""


def iteration_scalars(record: IterationRecord, config: LoggingConfig) -> dict[str, float]:
    """Return the scalars of an iteration's report, keyed by Megatron-LM's tags."""
    scalars = {
        "learning-rate": record.learning_rate,
        "batch-size": float(record.global_batch_size),
        **record.losses,
        "grad-norm": record.grad_norm,
    }
    optional = {
        "loss-scale": record.loss_scale if config.log_loss_scale_to_tensorboard else None,
        "world-size": float(record.world_size) if config.log_world_size_to_tensorboard else None,
        "iteration-time": record.seconds if config.log_timers_to_tensorboard else None,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "throughput": record.tflops_per_device if config.log_throughput else None,
    }
    if config.log_memory_to_tensorboard:
        optional |= _memory_scalars()
    return scalars | {name: value for name, value in optional.items() if value is not None}


def _memory_scalars() -> dict[str, float | None]:
    """Return the bytes of this rank's GPU that torch holds, keyed by Megatron-LM's tags."""
    # Flags of trackers are checked before torch is imported.
    import torch

    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
    }


def evaluation_scalars(record: EvaluationRecord, config: LoggingConfig) -> dict[str, float]:
    """Return the scalars of an evaluation's report, keyed by Megatron-LM's tags."""
    scalars = {}
    for name, value in record.losses.items():
        scalars[f"{name} {record.split}"] = value
        perplexity = record.perplexity_of(name)
        if config.log_validation_ppl_to_tensorboard and perplexity is not None:
            scalars[f"{name} {record.split} ppl"] = perplexity
    return scalars


@dataclass(frozen=True)
class Start:
    """The facts that a tracker gets when a run starts or is resumed.

    Attributes:
        settings: values of the run's configuration, by section and field.
        folder: the save folder, or else the working folder.
        resumed_at: iteration of the loaded state; 0 for a new run.
        identity: the `Tracker.identity` of the tracker's run to go on in; None to start a new one.
    """

    settings: Mapping[str, Any]
    folder: Path
    resumed_at: int = 0
    identity: Identity | None = None

    @property
    def flat_settings(self) -> dict[str, Any]:
        """Return the settings under names such as ``training.lr``."""
        flat: dict[str, Any] = {}
        for section, fields in self.settings.items():
            if isinstance(fields, Mapping):
                flat |= {f"{section}.{name}": value for name, value in fields.items()}
            else:
                flat[section] = fields
        return flat


class Tracker(Protocol):
    """A service or a folder that keeps the values of runs, and draws them.

    The methods may raise any error, which does not end the run.

    Attributes:
        identity: the values by which the tracker goes on in the same run later; {} for none.
    """

    identity: Identity

    def log(self, record: Record, scalars: dict[str, float]) -> None:
        """Keep the values of a step or of an evaluation.

        ``scalars`` have Megatron-LM's tags; those of ``record.common`` have common names.
        """

    def upload(self, path: Path) -> None:
        """Keep a copy of a file or folder."""

    def close(self, *, failed: bool) -> None:
        """End the tracker's run; ``failed`` says whether an error has ended the training run."""


class TensorBoard:
    """Writes scalars to event files, under Megatron-LM's tags and those of fine-tuning tools.

    As in Megatron-LM, each scalar has one tag by iteration and one by consumed samples.
    """

    def __init__(self, config: LoggingConfig, start: Start) -> None:
        module = _imported("torch.utils.tensorboard", "--tensorboard-dir", config.tensorboard_dir)
        self.identity: Identity = {}
        usual = threading.excepthook

        def hook(arguments: threading.ExceptHookArgs) -> None:
            """Ignore an OSError of TensorBoard's writer thread; the next write raises it again."""
            writes = type(arguments.thread).__name__ == "_AsyncWriterThread"
            if not (writes and isinstance(arguments.exc_value, OSError)):
                usual(arguments)

        threading.excepthook = hook
        queue = config.tensorboard_queue_size
        self.writer: Any = module.SummaryWriter(config.tensorboard_dir, max_queue=queue)

    def log(self, record: Record, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, record.iteration)
            self.writer.add_scalar(f"{tag} vs samples", value, record.consumed_samples)
        for tag, value in record.common.items():
            self.writer.add_scalar(tag, value, record.iteration)

    def upload(self, path: Path) -> None:
        """Do nothing: TensorBoard shows files in place."""

    def close(self, *, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Sends the values of steps to a run in Weights & Biases.

    Its steps can only increase. So steps that a resumed run repeats keep the values that they got
    first; a sentence says so.
    """

    def __init__(self, config: LoggingConfig, start: Start) -> None:
        wandb = _imported("wandb", "--wandb-project", config.wandb_project)
        folder = Path(config.wandb_save_dir or start.folder)
        own = folder / "wandb"
        if own.is_symlink():
            own.unlink()
        resumed = {} if start.identity is None else {"id": start.identity["id"], "resume": "allow"}
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity or None,
            dir=str(folder),
            config=start.settings,
            allow_val_change=True,
            **resumed,
        )
        self.identity: Identity = {"id": self._run.id}
        self._first = self._run.starting_step if resumed else 0
        if start.resumed_at + 1 < self._first:
            say_to_stderr(
                f"note: Weights & Biases has values up to step {self._first - 1} of this run, and "
                f"keeps them; it gets no others of the steps {start.resumed_at + 1} to "
                f"{self._first - 1}."
            )

    def log(self, record: Record, scalars: dict[str, float]) -> None:
        scalars = scalars | record.common
        if isinstance(record, EvaluationRecord):
            # An evaluation at the step of a resumed run's start belongs to no step that repeats.
            self._run.log(scalars, step=max(record.iteration, self._first))
        elif record.iteration >= self._first:
            scalars["samples vs steps"] = record.consumed_samples
            self._run.log(scalars, step=record.iteration)

    def upload(self, path: Path) -> None:
        kind = "model" if path.is_dir() else "report"
        self._run.log_artifact(str(path), name=f"{kind}-{self.identity['id']}", type=kind)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """Sends the values of steps to a run in MLflow, from a thread, so that training never waits.

    While a request is on its way, values are collected for the next one.
    """

    SECONDS_TO_END = 60.0
    """How long the end of a run waits for values that are still on their way."""
    _MOST_PARAMS = 100
    _MOST_METRICS = 1000
    """Most entries of one request to a server of MLflow."""

    def __init__(self, config: LoggingConfig, start: Start) -> None:
        # By MLflow's own defaults, the start of a run would wait more than four minutes for a
        # server that does not run.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        # It would warn of each request that it repeats; a run says once that MLflow fails.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._mlflow = _imported("mlflow", "--mlflow-experiment", config.mlflow_experiment)
        client = self._mlflow.MlflowClient(tracking_uri=config.mlflow_tracking_uri or None)
        self._client: Any = client
        params = {_as_name(name): str(value) for name, value in start.flat_settings.items()}
        before = None if start.identity is None else self._run_before(start.identity["id"])
        if before is None:
            experiment = client.get_experiment_by_name(config.mlflow_experiment)
            if experiment is None:
                number = client.create_experiment(config.mlflow_experiment)
            else:
                number = experiment.experiment_id
            name = config.mlflow_run_name or start.folder.resolve().name
            run_id = client.create_run(number, run_name=name).info.run_id
        else:
            run_id = before.info.run_id
            client.update_run(run_id, status="RUNNING")
            # MLflow does not change a parameter.
            kept = before.data.params
            params = {
                f"{name} from step {start.resumed_at + 1}" if name in kept else name: value
                for name, value in params.items()
                if kept.get(name) != value
            }
        self.identity: Identity = {"id": run_id}
        entries = [self._mlflow.entities.Param(name, value) for name, value in params.items()]
        for batch in _batches(entries, self._MOST_PARAMS):
            client.log_batch(run_id, params=batch)
        self._waiting: list[Any] = []
        self._pool = ThreadPoolExecutor(1, "mlflow")
        self._sending: Future[None] | None = None

    def _run_before(self, run_id: str) -> Any:
        """Return the run with this id; None if MLflow no longer has it."""
        try:
            run = self._client.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        if run is None or run.info.lifecycle_stage == "deleted":
            say_to_stderr(f"note: MLflow no longer has the run {run_id}; a new one is started.")
            return None
        return run

    def log(self, record: Record, scalars: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        scalars = scalars | record.common
        metric = self._mlflow.entities.Metric
        self._waiting += [
            metric(_as_name(tag), float(value), now, record.iteration)
            for tag, value in scalars.items()
        ]
        if self._sending is None or self._sending.done():
            self._settle(0.0)
            self._sending = self._pool.submit(self._send, self._waiting)
            self._waiting = []

    def _send(self, metrics: list[Any]) -> None:
        for batch in _batches(metrics, self._MOST_METRICS):
            self._client.log_batch(self.identity["id"], metrics=batch)

    def _settle(self, seconds: float) -> None:
        """Wait for the request that is on its way; raise its error if it has failed."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result(seconds)

    def _flush(self) -> None:
        self._settle(self.SECONDS_TO_END)
        self._sending = self._pool.submit(self._send, self._waiting)
        self._waiting = []
        self._settle(self.SECONDS_TO_END)

    def upload(self, path: Path) -> None:
        run_id = self.identity["id"]
        if path.is_dir():
            self._client.log_artifacts(run_id, str(path), path.name)
        else:
            self._client.log_artifact(run_id, str(path))

    def close(self, *, failed: bool) -> None:
        try:
            self._flush()
            self._client.set_terminated(self.identity["id"], "FAILED" if failed else "FINISHED")
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


class Trackio:
    """Sends the values of steps to a run in Trackio."""

    def __init__(self, config: LoggingConfig, start: Start) -> None:
        trackio = _imported("trackio", "--trackio-project", config.trackio_project)
        self._trackio = trackio
        options = {"project": config.trackio_project, "config": start.flat_settings, "embed": False}
        before = start.identity
        name = config.trackio_run_name or None if before is None else before["name"]
        resume = "never" if before is None else "allow"
        self._run: Any = trackio.init(name=name, resume=resume, **options)
        if before is not None and self._run.id != before["id"]:
            # Trackio finds runs by name. This one is newer, and belongs to somebody else.
            name = f"{name} from step {start.resumed_at + 1}"
            self._run = trackio.init(name=name, resume="never", **options)
        self.identity: Identity = {"name": self._run.name, "id": self._run.id}

    def log(self, record: Record, scalars: dict[str, float]) -> None:
        scalars = scalars | record.common
        self._run.log(scalars, step=record.iteration)

    def upload(self, path: Path) -> None:
        kind = "model" if path.is_dir() else "report"
        self._run.log_artifact(str(path), name=f"{kind}-{self.identity['id']}", type=kind)

    def close(self, *, failed: bool) -> None:
        self._trackio.finish()


@dataclass(frozen=True)
class Kind:
    """A kind of tracker.

    Attributes:
        title: its name in messages.
        package: the package to install.
        fields: the fields of `LoggingConfig` that say where the values go; the first switches the
            tracker on. A run goes on in its old run of the tracker only if all are unchanged.
        start: starts or resumes a run in the tracker.
    """

    title: str
    package: str
    fields: tuple[str, ...]
    start: Callable[[LoggingConfig, Start], Tracker]

    @property
    def flag(self) -> str:
        """Return the flag that switches the tracker on."""
        return f"--{self.fields[0].replace('_', '-')}"

    def place(self, config: LoggingConfig) -> list[str]:
        """Return where the values go."""
        return [str(getattr(config, field)) for field in self.fields]


KINDS = (
    Kind("TensorBoard", "tensorboard", ("tensorboard_dir",), TensorBoard),
    Kind("Weights & Biases", "wandb", ("wandb_project", "wandb_entity"), WeightsAndBiases),
    Kind("MLflow", "mlflow", ("mlflow_experiment", "mlflow_tracking_uri"), MLflow),
    Kind("Trackio", "trackio", ("trackio_project",), Trackio),
)


def kinds_of(config: LoggingConfig) -> list[Kind]:
    """Return the kinds of trackers that the flags switch on."""
    return [kind for kind in KINDS if getattr(config, kind.fields[0])]


def missing_packages(config: LoggingConfig) -> list[str]:
    """Return a sentence for each tracker whose package is not installed; import no package."""
    return [
        FlagError(
            kind.flag,
            getattr(config, kind.fields[0]),
            f"needs {kind.title}, which is not installed",
            f"run `pip install {kind.package}`",
        )
        for kind in kinds_of(config)
        if importlib.util.find_spec(kind.package) is None
    ]


def _imported(module: str, flag: str, value: object) -> Any:
    """Import and return a module of an installed package, which the given flag needs."""
    package = module.rsplit(".", maxsplit=1)[-1]
    try:
        return importlib.import_module(module)
    except Exception as error:  # A package that does not suit the others raises anything.
        raise ConfigError.about(
            flag,
            value,
            f"needs the package {package}, which cannot be imported "
            f"({type(error).__name__}: {error})",
            f"run `pip install -U {package}`, or leave the flag out",
        ) from error


def _as_name(tag: str) -> str:
    """Return a tag without the characters that names in MLflow cannot have."""
    return re.sub(r"[^\w\-. :/]+", "_", tag).strip("_")


def _batches(entries: list[Any], size: int) -> Iterator[list[Any]]:
    for offset in range(0, len(entries), size):
        yield entries[offset : offset + size]


class Trackers:
    """All trackers of a run. Whatever goes wrong in them, the run goes on; it is said once."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._trackers: dict[str, Tracker] = {}
        self._failing: set[str] = set()

    def start(self, resumed_at: int, launched_at: float = math.inf) -> None:
        """Start the trackers' runs, or go on in those of the run that is resumed.

        Args:
            resumed_at: iteration of the loaded state; 0 for a new run.
            launched_at: when this launch began, in seconds since 1970. A launch whose ranks are
                restarted before the first checkpoint goes on in the same runs, too.

        Raises:
            ConfigError: a tracker of a new run cannot be started. A run that is resumed or
                restarted goes on without it.
        """
        save = self._config.checkpoint.save
        logs = self._config.logging
        path = Path(save or ".") / TRACKERS_FILE
        kept = {} if save is None else _read(path)
        goes_on = save is not None and (resumed_at > 0 or is_launch(kept, launched_at))
        settings = self._config.to_dict()
        # Trackers whose flags are left out this time keep their entries.
        entries = dict(kept) if goes_on else {}
        if launched_at < math.inf:
            entries["launched_at"] = launched_at
        for kind in kinds_of(logs):
            identity = _identity(entries.get(kind.package), kind.place(logs))
            start = Start(settings, Path(save or "."), resumed_at, identity)
            if goes_on:
                with self._going_on(kind.title):
                    self._trackers[kind.title] = kind.start(logs, start)
            else:
                try:
                    self._trackers[kind.title] = _started(kind, logs, start)
                except ConfigError:
                    self.close(failed=True)
                    raise
            tracker = self._trackers.get(kind.title)
            if tracker is not None and tracker.identity:
                entry = {"place": kind.place(logs), "identity": dict(tracker.identity)}
                entries[kind.package] = entry
        if save is not None and entries.keys() - {"launched_at"}:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".json.tmp")
            write_text(temporary, json.dumps(entries, indent=1) + "\n")
            os.replace(temporary, path)

    def on_step(self, record: IterationRecord) -> None:
        """Send the values of a single step."""
        self._send(record, iteration_scalars(record, self._config.logging))

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Send the values of an evaluation."""
        self._send(record, evaluation_scalars(record, self._config.logging))

    def _send(self, record: Record, scalars: dict[str, float]) -> None:
        for title, tracker in self._trackers.items():
            with self._going_on(title):
                tracker.log(record, dict(scalars))

    @property
    def writer(self) -> Any:
        """Return TensorBoard's writer; None without ``--tensorboard-dir``."""
        boards = (each for each in self._trackers.values() if isinstance(each, TensorBoard))
        return next((board.writer for board in boards), None)

    def close(self, *, failed: bool = False) -> None:
        """End the trackers' runs; before that, upload what ``--tracker-artifacts`` asks for.

        Nothing is uploaded if an error has ended the run, as ``failed`` says.
        """
        paths = [] if failed else self._artifacts()
        for title, tracker in self._trackers.items():
            for path in paths:
                with self._going_on(title):
                    tracker.upload(path)
            with self._going_on(title):
                tracker.close(failed=failed)

    def _artifacts(self) -> list[Path]:
        """Return the files and folders to upload; write the report if it is one of them."""
        save = self._config.checkpoint.save
        paths: list[Path] = []
        if save is None:
            return paths
        if "checkpoint" in self._config.logging.tracker_artifacts:
            from megatron_ext.checkpoint.files import published, standing_folder_of

            paths += [standing_folder_of(Path(save), x) for x in published(Path(save))[-1:]]
        if "report" in self._config.logging.tracker_artifacts:
            with self._going_on("`--tracker-artifacts report`"):
                tool = extras.needed("report", "tool", "--tracker-artifacts report")
                paths.append(tool.report([Path(save)], None))
        return paths

    @contextmanager
    def _going_on(self, title: str) -> Iterator[None]:
        """Suppress any error of the tracker called ``title``, and warn of the first one."""
        try:
            yield
        except Exception as error:  # Each service has errors of its own.
            if title not in self._failing:
                self._failing.add(title)
                say_to_stderr(
                    f"warning: {title} cannot write ({_cause(error)}); training goes on, and "
                    "what is reported meanwhile may be missing there."
                )


def _cause(error: BaseException) -> str:
    """Return the reason of an error; services tell long stories."""
    text = limits.cause(error)
    return text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}…"


def _started(kind: Kind, config: LoggingConfig, start: Start) -> Tracker:
    """Start a tracker; raise a ConfigError if it cannot be started."""
    try:
        return kind.start(config, start)
    except ConfigError:
        raise
    except Exception as error:
        value = getattr(config, kind.fields[0])
        raise ConfigError.about(
            kind.flag,
            value,
            f"starts no run in {kind.title} ({_cause(error)})",
            "repair that, or leave the flag out",
        ) from error


def _read(path: Path) -> dict[str, Any]:
    """Return the content of ``trackers.json``; {} if there is none, or if it cannot be read."""
    if not path.exists():
        return {}
    try:
        return read_json_object(path)
    except UnreadableFile as error:
        say_to_stderr(f"note: {error}; the trackers start new runs.")
        return {}


def _identity(entry: object, place: list[str]) -> Identity | None:
    """Return the identity in an entry of ``trackers.json``; None if it belongs to another place."""
    if not isinstance(entry, dict) or entry.get("place") != place:
        return None
    identity = entry.get("identity")
    return identity if isinstance(identity, dict) and "id" in identity else None
