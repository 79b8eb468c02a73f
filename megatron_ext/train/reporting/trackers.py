"""Sends the values of single steps to the trackers of a run, and goes on when one fails.

A tracker is a class of `services`, a field of `TRACKERS`, and a row in `KINDS`. A run keeps the
identities of its runs in the trackers in ``trackers.json`` in its save folder, so that it goes on
in the same ones when it is resumed from there.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext import extras, limits
from megatron_ext.config.output import TRACKERS, LoggingConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import ConfigError, FlagError, say_to_stderr
from megatron_ext.train.reporting.files import is_launch
from megatron_ext.train.reporting.records import EvaluationRecord, IterationRecord
from megatron_ext.train.reporting.services import (
    Identity,
    MLflow,
    Record,
    Start,
    TensorBoard,
    Tracker,
    Trackio,
    WeightsAndBiases,
)

TRACKERS_FILE = "trackers.json"
_LONGEST_CAUSE = 300


def iteration_scalars(record: IterationRecord, config: LoggingConfig) -> dict[str, float]:
    """Return the scalars of an iteration's report, keyed by Megatron-LM's tags."""
    scalars = {
        "learning-rate": record.learning_rate,
        "batch-size": float(record.global_batch_size),
        **record.losses,
        "grad-norm": record.grad_norm,
        **record.logits,
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


KINDS = {
    kind.fields[0]: kind
    for kind in (
        Kind("TensorBoard", "tensorboard", ("tensorboard_dir",), TensorBoard),
        Kind("Weights & Biases", "wandb", ("wandb_project", "wandb_entity"), WeightsAndBiases),
        Kind("MLflow", "mlflow", ("mlflow_experiment", "mlflow_tracking_uri"), MLflow),
        Kind("Trackio", "trackio", ("trackio_project",), Trackio),
    )
}
"""Each kind of tracker by the field of `TRACKERS` that switches it on."""


def kinds_of(config: LoggingConfig) -> list[Kind]:
    """Return the kinds of trackers that the flags switch on."""
    return [KINDS[name] for name in TRACKERS if getattr(config, name)]


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
