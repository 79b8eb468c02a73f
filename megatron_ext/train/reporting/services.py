"""The trackers that a run can feed: TensorBoard, Weights & Biases, MLflow and Trackio."""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.config.output import LoggingConfig
from megatron_ext.errors import ConfigError, say_to_stderr
from megatron_ext.train.reporting.records import EvaluationRecord, IterationRecord

Record = IterationRecord | EvaluationRecord
Identity = Mapping[str, str]
"""Values by which a tracker finds one of its runs again, such as the run's id."""


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
        run_id = _run_id(start, "WANDB_RUN_ID")
        goes_on = start.identity is not None or (run_id is not None and start.resumed_at > 0)
        named = {} if run_id is None else {"id": run_id}
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity or None,
            dir=str(folder),
            config=start.settings,
            allow_val_change=True,
            **(named | {"resume": "allow"} if goes_on else named),
        )
        self.identity: Identity = {"id": self._run.id}
        self._first = self._run.starting_step if goes_on else 0
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
        asked = _run_id(start, "MLFLOW_RUN_ID")
        before = None if asked is None else self._run_before(asked)
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
            say_to_stderr(f"note: MLflow has no run {run_id} (any more); a new one is started.")
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
        sending = self._sending
        self._sending = None
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


def _run_id(start: Start, variable: str) -> str | None:
    """Return the id of the tracker's run to go on in; None to start a new one.

    The environment variable ``variable``, by which people and schedulers choose the run, counts
    before the run that the save folder remembers; a sentence says so if they differ.
    """
    kept = None if start.identity is None else start.identity["id"]
    asked = os.environ.get(variable) or kept
    if kept is not None and asked != kept:
        say_to_stderr(
            f"note: {variable} ({asked}) takes the place of the run {kept}, in which this training "
            "run went on so far."
        )
    return asked


def _as_name(tag: str) -> str:
    """Return a tag without the characters that names in MLflow cannot have."""
    return re.sub(r"[^\w\-. :/]+", "_", tag).strip("_")


def _batches(entries: list[Any], size: int) -> Iterator[list[Any]]:
    for offset in range(0, len(entries), size):
        yield entries[offset : offset + size]
