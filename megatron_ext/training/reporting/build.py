"""The reporters of a run; only the reporting rank has any."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ConfigError
from megatron_ext.training.reporting.line import LinePrinter
from megatron_ext.training.reporting.metrics_file import MetricsFile
from megatron_ext.training.reporting.plot import LossPlot
from megatron_ext.training.reporting.records import EvaluationRecord, IterationRecord, Reporter
from megatron_ext.training.reporting.servers import TensorBoard, WeightsAndBiases

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.layout import ParallelContext


class Reporters:
    """All sinks of a run; a context manager that closes them."""

    def __init__(self, sinks: list[Reporter]) -> None:
        self.sinks = sinks
        self._warned: set[int] = set()

    def on_iteration(self, record: IterationRecord) -> None:
        """Report training steps to every sink."""
        for sink in self.sinks:
            with self._going_on(sink):
                sink.on_iteration(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Report an evaluation to every sink."""
        for sink in self.sinks:
            with self._going_on(sink):
                sink.on_evaluation(record)

    @contextmanager
    def _going_on(self, sink: Reporter) -> Iterator[None]:
        """Let a sink that cannot write, as on a full disk, be warned of once and tried again."""
        try:
            yield
        except OSError as error:
            if id(sink) not in self._warned:
                self._warned.add(id(sink))
                print(
                    f"warning: {type(sink).__name__} cannot write ({error}); training goes on, "
                    "and what is reported meanwhile may be missing there.",
                    file=sys.stderr,
                    flush=True,
                )

    @property
    def writer(self) -> Any:
        """TensorBoard's writer; None without ``--tensorboard-dir`` and on other ranks."""
        return next((x.writer for x in self.sinks if isinstance(x, TensorBoard)), None)

    def say(self, text: str) -> None:
        """Print a sentence on the reporting rank."""
        if self.sinks:
            print(f"> {text}", flush=True)

    def __enter__(self) -> Reporters:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sink in self.sinks:
            with self._going_on(sink):
                sink.close()


class ProgressFile:
    """``progress.txt`` in the save folder (--log-progress)."""

    def __init__(self, folder: Path, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "progress.txt"
        self._world_size = world_size
        self._append(f"started on {world_size} ranks")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
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
    config: RunConfig, context: ParallelContext, *, resumed_at: int, num_iterations: int
) -> Reporters:
    """The sinks that a run asks for; none on ranks other than the last.

    Raises:
        ConfigError: TensorBoard or Weights & Biases asked for but not installed, or a folder that
            cannot be written.
    """
    if not context.is_reporting_rank:
        return Reporters([])
    try:
        return Reporters(_sinks(config, resumed_at, num_iterations))
    except OSError as error:
        raise ConfigError(
            f"The files of the log cannot be written ({error}); give other folders with `--save` "
            "and `--tensorboard-dir`."
        ) from error


def _sinks(config: RunConfig, resumed_at: int, num_iterations: int) -> list[Reporter]:
    sinks: list[Reporter] = [
        LinePrinter(
            on_gpu=config.device == "cuda",
            num_iterations=num_iterations,
            iteration=resumed_at,
            bar=sys.stderr.isatty(),
        )
    ]
    if config.checkpoint.save is not None:
        folder = Path(config.checkpoint.save)
        metrics = MetricsFile(folder, resumed_at)
        sinks += [metrics, LossPlot(metrics.path, f"loss of {folder}")]
        if config.logging.log_progress:
            sinks.append(ProgressFile(folder, config.parallel.world_size))
    if config.logging.tensorboard_dir:
        sinks.append(TensorBoard(config.logging.tensorboard_dir, config.logging))
    if config.logging.wandb_project:
        folder_name = config.checkpoint.save or "."
        sinks.append(WeightsAndBiases(config.logging, folder_name, config.to_dict()))
    return sinks
