"""Builds the reporters of a run (its lines, metrics, chart and trackers) on the reporting rank.

The reporting rank is the highest rank with the last pipeline stage.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ext import extras, limits
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError, say_to_stderr
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.launch import Launch
from megatron_ext.train.rank import End
from megatron_ext.train.reporting.lines import LinePrinter
from megatron_ext.train.reporting.records import (
    FINISHED,
    EvaluationRecord,
    IterationRecord,
    Reporter,
)

if TYPE_CHECKING:
    from megatron_ext.train.reporting.trackers import Trackers


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
        sinks: get the reports on intervals of steps.
        trackers: get single steps; None without a tracker.
        time_rows: records how the run's time is spent; None without a save folder.
        reason: why the run ends, if it ends without an error.
    """

    def __init__(
        self,
        sinks: list[Reporter],
        time_rows: TimeAccount | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        self.sinks = sinks
        self.trackers = trackers
        self.time_rows = time_rows
        self.reason = FINISHED
        self._warned: set[int] = set()

    def on_iteration(self, record: IterationRecord) -> None:
        """Report on the steps since the last report to all sinks."""
        for sink in self.sinks:
            with self._going_on(sink):
                sink.on_iteration(record)
        if self.time_rows is not None:
            with self._going_on(self.time_rows):
                self.time_rows.write(record.iteration)

    def on_step(self, record: IterationRecord) -> None:
        """Report a single step to the trackers."""
        if self.trackers is not None:
            self.trackers.on_step(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Report an evaluation to all sinks and trackers."""
        for sink in self.sinks:
            with self._going_on(sink):
                sink.on_evaluation(record)
        if self.trackers is not None:
            self.trackers.on_evaluation(record)

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
        return None if self.trackers is None else self.trackers.writer

    def say(self, text: str) -> None:
        """Print a sentence on the reporting rank."""
        printer = next((x for x in self.sinks if isinstance(x, LinePrinter)), None)
        if printer is not None:
            printer.print_lines([f"> {text}"])
        elif self.sinks:
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
        if self.trackers is not None:
            self.trackers.close(failed=kind is not None)


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
    launched_at = math.inf if launched is None else launched.started
    sinks: list[Reporter] = [_printer(config, num_iterations, resumed_at)]
    trackers: Trackers | None = None
    time_rows: TimeAccount | None = None
    try:
        if save is not None:
            from megatron_ext.train.reporting.files import MetricsFile, write_configuration
            from megatron_ext.train.reporting.loss_plot import LossPlot

            write_configuration(config.to_yaml(), Path(save))
            metrics = MetricsFile(Path(save), resumed_at, launched_at)
            report = _report_of(save)
            if launched is not None and report is not None:
                time_rows = report.TimeRows(Path(save), context.recorder, launched, resumed_at)
                time_rows.launched(config, num_iterations)
            sinks += [metrics, LossPlot(metrics.path, f"loss of {Path(save)}")]
        if save is not None and logs.log_progress:
            from megatron_ext.train.reporting.files import ProgressFile

            sinks.append(ProgressFile(Path(save), config.parallel.world_size))
        if logs.has_tracker:
            from megatron_ext.train.reporting.trackers import Trackers

            trackers = Trackers(config)
            trackers.start(resumed_at, launched_at)
    except OSError as error:
        raise ConfigError(
            f"The files of the log cannot be written ({error}); give other folders with `--save` "
            "and `--tensorboard-dir`."
        ) from error
    return Reporters(sinks, time_rows, trackers)


def _printer(config: RunConfig, num_iterations: int, resumed_at: int) -> LinePrinter:
    """Return what prints the run's lines: short ones on a terminal, Megatron-LM's in a log."""
    on_gpu = config.device == "cuda"
    if not (sys.stdout.isatty() or sys.stderr.isatty()):
        return LinePrinter(on_gpu=on_gpu)
    from megatron_ext.train.reporting.terminal import TerminalPrinter

    return TerminalPrinter(on_gpu=on_gpu, num_iterations=num_iterations, iteration=resumed_at)
