"""Builds the reporters of a run (TensorBoard, W&B and others) on the reporting rank.

The reporting rank is the highest rank with the last pipeline stage.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_ext import extras, limits
from megatron_ext.config.output import LoggingConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.writing import open_to_append
from megatron_ext.errors import ConfigError, say_to_stderr
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.launch import End, Launch
from megatron_ext.train.reporting.files import LinePrinter, MetricsFile
from megatron_ext.train.reporting.records import (
    FINISHED,
    EvaluationRecord,
    IterationRecord,
    Reporter,
)
from megatron_ext.train.reporting.start import write_configuration


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
    if config.log_memory_to_tensorboard and torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        optional["mem-reserved-bytes"] = stats["reserved_bytes.all.current"]
        optional["mem-allocated-bytes"] = stats["allocated_bytes.all.current"]
        optional["mem-max-allocated-bytes"] = stats["allocated_bytes.all.peak"]
    return scalars | {name: value for name, value in optional.items() if value is not None}


def evaluation_scalars(record: EvaluationRecord, config: LoggingConfig) -> dict[str, float]:
    """Return the scalars of an evaluation's report, keyed by Megatron-LM's tags."""
    scalars = {}
    for name, value in record.losses.items():
        scalars[f"{name} {record.split}"] = value
        perplexity = record.perplexity_of(name)
        if config.log_validation_ppl_to_tensorboard and perplexity is not None:
            scalars[f"{name} {record.split} ppl"] = perplexity
    return scalars


def _imported(module: str, given: str, called: str) -> Any:
    package = module.rsplit(".", maxsplit=1)[-1]
    try:
        return importlib.import_module(module)
    except Exception as error:  # A package that does not suit the others raises anything.
        fault = "is not installed"
        remedy = f"run `pip install {package}`"
        if importlib.util.find_spec(package) is not None:
            fault = f"cannot be imported ({type(error).__name__}: {error})"
            remedy = f"run `pip install -U {package}`, or leave the flag out"
        raise ConfigError(f"{given} needs {called}, which {fault}; {remedy}.") from error


class TensorBoard:
    """Writes scalars to event files, under Megatron-LM's tags and those of fine-tuning tools.

    As in Megatron-LM, each scalar has one tag by iteration and one by consumed samples.
    """

    follows_steps = True

    def __init__(self, folder: str, config: LoggingConfig) -> None:
        module = "torch.utils.tensorboard"
        tensorboard = _imported(module, f"`--tensorboard-dir` ({folder})", "TensorBoard")
        self._config = config
        usual = threading.excepthook

        def hook(arguments: threading.ExceptHookArgs) -> None:
            """Ignore an OSError of TensorBoard's writer thread; the next write raises it again."""
            writes = type(arguments.thread).__name__ == "_AsyncWriterThread"
            if not (writes and isinstance(arguments.exc_value, OSError)):
                usual(arguments)

        threading.excepthook = hook
        queue = config.tensorboard_queue_size
        self.writer: Any = tensorboard.SummaryWriter(folder, max_queue=queue)

    def on_iteration(self, record: IterationRecord) -> None:
        if record.iteration % self._config.tensorboard_log_interval == 0:
            self._write(record, iteration_scalars(record, self._config))

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._write(record, evaluation_scalars(record, self._config))

    def _write(self, record: IterationRecord | EvaluationRecord, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, record.iteration)
            self.writer.add_scalar(f"{tag} vs samples", value, record.consumed_samples)
        for tag, value in record.common.items():
            self.writer.add_scalar(tag, value, record.iteration)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Sends the scalars of steps to a Weights & Biases run."""

    follows_steps = True

    def __init__(self, config: LoggingConfig, folder: str, settings: dict[str, Any]) -> None:
        given = f"`--wandb-project` ({config.wandb_project})"
        wandb = _imported("wandb", given, "Weights & Biases")
        own = Path(config.wandb_save_dir or folder) / "wandb"
        if own.is_symlink():
            own.unlink()
        self._config = config
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity or None,
            dir=config.wandb_save_dir or folder,
            config=settings,
        )

    def on_iteration(self, record: IterationRecord) -> None:
        scalars: dict[str, float] = {"samples vs steps": record.consumed_samples}
        scalars |= iteration_scalars(record, self._config) | record.common
        self._run.log(scalars, step=record.iteration)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        scalars = evaluation_scalars(record, self._config) | record.common
        self._run.log(scalars, step=record.iteration)

    def close(self) -> None:
        self._run.finish()


def _follows_steps(sink: Reporter) -> bool:
    return getattr(sink, "follows_steps", False)


class TimeAccount(Protocol):
    """Protocol of a record of how a run spends its time; the add-on ``report`` implements it."""

    def launched(self, config: RunConfig, num_iterations: int) -> None:
        """Record the settings, the machine and the packages with which the ranks start."""

    def write(self, iteration: int) -> None:
        """Record how the time since the last call was spent, up to step ``iteration``."""

    def finish(self, reason: str) -> None:
        """Record the rest of the time, and why the run has ended without a fault."""


def _report_of(save: str | None) -> Any:
    """Return the module of the add-on ``report`` that records how a run's time is spent.

    Return None if the run has no save folder, or if the add-on is not installed.
    """
    return None if save is None else extras.part("report", "time_rows")


@contextmanager
def reported_end(save: str | None, launch: Launch) -> Iterator[End]:
    """Yield an `End`, in which the caller sets the exit code; on exit, write the run's report.

    The add-on ``report`` does this. Nothing is written without the add-on or a save folder, or if
    `Launch.ends_itself` is false: then the reporting rank writes the report.
    """
    report = _report_of(save)
    if report is None:
        yield End()
    else:
        with report.reported_end(save, launch) as end:
            yield end


class Reporters:
    """All reporters of a run, as a context manager that closes them on exit.

    Attributes:
        time_rows: records how the run's time is spent; None without a save folder.
        reason: why the run ends, if it ends without an error.
    """

    def __init__(self, sinks: list[Reporter], time_rows: TimeAccount | None = None) -> None:
        self.sinks = sinks
        self.time_rows = time_rows
        self.reason = FINISHED
        self._warned: set[int] = set()

    def on_iteration(self, record: IterationRecord, own: IterationRecord | None = None) -> None:
        """Send a report on the steps since the last report to all sinks.

        TensorBoard and Weights & Biases get ``own``, the record of the last step alone, instead of
        ``record``, unless ``own`` is None.
        """
        for sink in self.sinks:
            with self._going_on(sink):
                sink.on_iteration(own or record if _follows_steps(sink) else record)
        if self.time_rows is not None:
            with self._going_on(self.time_rows):
                self.time_rows.write(record.iteration)

    def on_step(self, record: IterationRecord) -> None:
        """Report a single step to TensorBoard and Weights & Biases, at their own interval."""
        for sink in filter(_follows_steps, self.sinks):
            with self._going_on(sink):
                sink.on_iteration(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        for sink in self.sinks:
            with self._going_on(sink):
                sink.on_evaluation(record)

    @contextmanager
    def _going_on(self, sink: Reporter | TimeAccount) -> Iterator[None]:
        """Suppress an OSError of ``sink``, such as a full disk; warn once for each sink."""
        try:
            yield
        except OSError as error:
            if id(sink) not in self._warned:
                self._warned.add(id(sink))
                say_to_stderr(
                    f"warning: {type(sink).__name__} cannot write ({limits.cause(error)}); "
                    "training goes on, and what is reported meanwhile may be missing there."
                )

    @property
    def writer(self) -> Any:
        """Return TensorBoard's writer on the reporting rank; None without ``--tensorboard-dir``."""
        return next((x.writer for x in self.sinks if isinstance(x, TensorBoard)), None)

    def say(self, text: str) -> None:
        """Print a sentence on the reporting rank."""
        if self.sinks:
            print(f"> {text}", flush=True)

    def __enter__(self) -> Reporters:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for sink in self.sinks:
            with self._going_on(sink):
                sink.close()
        if self.time_rows is not None and kind is None:
            with self._going_on(self.time_rows):
                self.time_rows.finish(self.reason)


class ProgressFile:
    """Appends a line for each report to ``progress.txt`` in the save folder."""

    def __init__(self, folder: Path, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "progress.txt"
        self._world_size = world_size
        self._append(f"started on {world_size} ranks")

    def _append(self, text: str) -> None:
        with open_to_append(self._path) as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\t{text}\n")

    def on_iteration(self, record: IterationRecord) -> None:
        self._append(
            f"iteration {record.iteration}\tsamples {record.consumed_samples}\t"
            f"{record.tokens_per_second:.0f} tokens/s"
        )

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._append(f"evaluation at iteration {record.iteration}\t{record.losses}")

    def close(self) -> None:
        self._append("ended")


def build_reporters(
    config: RunConfig,
    context: ParallelContext,
    *,
    resumed_at: int,
    num_iterations: int,
    launched: Launch | None = None,
) -> Reporters:
    """Build the sinks that the flags select; on ranks other than the reporting rank, build none.

    ``resumed_at`` is the iteration of the loaded state, 0 for a new run. If ``launched`` is given,
    the add-on ``report`` records how the time since that launch is spent. Raise a ConfigError if a
    package is not installed or a folder is not writable.
    """
    if not context.is_reporting_rank:
        return Reporters([])
    logs = config.logging
    save = config.checkpoint.save
    on_gpu = config.device == "cuda"
    bar = sys.stderr.isatty()
    sinks: list[Reporter] = [
        LinePrinter(on_gpu=on_gpu, num_iterations=num_iterations, iteration=resumed_at, bar=bar)
    ]
    time_rows: TimeAccount | None = None
    try:
        if save is not None:
            from megatron_ext.train.reporting.loss_plot import LossPlot

            write_configuration(config.to_yaml(), Path(save))
            launched_at = math.inf if launched is None else launched.started
            metrics = MetricsFile(Path(save), resumed_at, launched_at)
            report = _report_of(save)
            if launched is not None and report is not None:
                time_rows = report.TimeRows(Path(save), context.recorder, launched, resumed_at)
                time_rows.launched(config, num_iterations)
            sinks += [metrics, LossPlot(metrics.path, f"loss of {Path(save)}")]
        if save is not None and logs.log_progress:
            sinks.append(ProgressFile(Path(save), config.parallel.world_size))
        if logs.tensorboard_dir:
            sinks.append(TensorBoard(logs.tensorboard_dir, logs))
        if logs.wandb_project:
            sinks.append(WeightsAndBiases(logs, save or ".", config.to_dict()))
    except OSError as error:
        raise ConfigError(
            f"The files of the log cannot be written ({error}); give other folders with `--save` "
            "and `--tensorboard-dir`."
        ) from error
    return Reporters(sinks, time_rows)
