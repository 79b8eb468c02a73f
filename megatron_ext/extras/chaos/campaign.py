"""Runs a training program with injected faults, and without any for comparison."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext import extras
from megatron_ext.config.parser import read_words
from megatron_ext.disk.events import read_events
from megatron_ext.errors import ConfigError
from megatron_ext.extras.chaos.goodput import Costs, Point
from megatron_ext.extras.chaos.inject import as_variable
from megatron_ext.extras.chaos.outcome import Result, Row, Truth, digests, judge, steps_of
from megatron_ext.extras.chaos.plan import Case, check_possible, completed
from megatron_ext.extras.chaos.run import run_program
from megatron_ext.inspect.layouts import NamedLayout
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.task import Task, TaskChoice

_SECONDS_FOR_A_RUN = 60.0
_SECONDS_FOR_A_FAULT = 20.0
_SECONDS_FOR_A_STEP = 1.0


@dataclass
class Campaign:
    """Runs of one program with the same flags, in different layouts and with different faults.

    Attributes:
        program: the training program.
        words: the user's flags for it.
        folder: parent of the runs' folders.
        added: flags that the last run got in addition to the user's.
    """

    program: Task | TaskChoice
    words: Sequence[str]
    folder: Path
    added: list[str] = field(default_factory=list)
    _truths: dict[tuple[str, int], Truth] = field(default_factory=dict)
    _bare: dict[str, Truth] = field(default_factory=dict)

    def check(self, case: Case) -> None:
        """Raise a ConfigError if a fault of a case cannot happen in its run."""
        words, _ = completed(self.program, self.words, case, self.folder / "save")
        check_possible(self.program, words, case)

    def truth(self, case: Case) -> Truth:
        """Return the run without faults that has a case's layout and number of steps.

        The first call for a layout and number of steps runs it.

        Raises:
            ConfigError: the undisturbed run fails.
        """
        key = case.layout.name, case.steps
        if key not in self._truths:
            self._truths[key] = self._undisturbed(case)
        return self._truths[key]

    def _undisturbed(self, case: Case, *, bare: bool = False) -> Truth:
        name = "bare" if bare else "undisturbed"
        folder = self._folder(f"{case.layout.name}_{case.steps}_{name}")
        words, self.added = completed(self.program, self.words, case, folder / "save", bare=bare)
        log = folder / "log"
        deadline = 10 * _SECONDS_FOR_A_RUN + _SECONDS_FOR_A_STEP * case.steps
        ended = run_program(self.program, words, log=log, environment={}, deadline=deadline)
        if ended.code != 0:
            text = log.read_text(encoding="utf-8", errors="replace")
            why = "hung" if ended.code is None else f"ended with exit code {ended.code}"
            raise ConfigError(
                f"The undisturbed run in layout {case.layout.name} {why}, so there is nothing to "
                f"compare with; its output ends with:\n{text[-2000:]}"
            )
        rows = steps_of(folder / "save")
        times = [row["seconds_per_iteration"] for row in rows.values()]
        saves = [event for event in read_events(folder / "save") if event["kind"] == "saved"]
        stall = statistics.median([event["stall"] for event in saves]) if saves else 0.0
        checksums = digests(folder / "save")
        return Truth(checksums, rows, statistics.median(times), ended.seconds, stall)

    def costs(self, layout: NamedLayout, restarts: Sequence[float] = ()) -> Costs:
        """Return the times that steps, snapshots in memory, saves and restarts take in a layout.

        They are measured in undisturbed runs, except the time of a restart: that is the median of
        ``restarts``, the seconds from each fault to the first new step.
        """
        interval = self._snapshot_interval
        case = Case(layout, 0, (), steps=10 * max(3, interval))
        truth = self.truth(case)
        bare = self._bare.get(layout.name)
        if bare is None:
            bare = self._bare[layout.name] = self._undisturbed(case, bare=True)
        step = seconds_of_a_step(bare.rows, interval)
        return Costs(
            step=step,
            snapshot=max(0.0, seconds_of_a_step(truth.rows, interval) - step),
            save=truth.save_seconds,
            restart=statistics.median(restarts) if restarts else 0.0,
            copied_every=interval,
        )

    @property
    def _snapshot_interval(self) -> int:
        checkpoint = read_words(self.words, self.program).values.get("checkpoint", {})
        return int(checkpoint.get("peer_checkpoint_interval") or 1)

    def point(self, result: Result) -> Point:
        """Return a run's goodput and its number of faults per hour."""
        assert result.folder is not None
        save = result.folder / "save"
        account = extras.needed("report", "goodput", "--faults-per-hour").account
        goodput = account(read_metrics(save / "metrics.jsonl"), read_events(save))
        return Point(len(result.case.faults) / (goodput.wall / 3600.0), goodput.share)

    def run(self, case: Case) -> Result:
        """Run the program with the faults of a case, and compare it with the undisturbed run.

        Return the outcome of the run and of each fault.

        Raises:
            ConfigError: a fault cannot happen, or the undisturbed run fails.
        """
        self.check(case)
        truth = self.truth(case)
        folder = self._folder(f"{case.layout.name}_seed{case.seed}_{time.time_ns()}")
        records = folder / "faults"
        records.mkdir()
        words, self.added = completed(self.program, self.words, case, folder / "save")
        deadline = _SECONDS_FOR_A_RUN + 4 * truth.seconds + _SECONDS_FOR_A_FAULT * len(case.faults)
        ended = run_program(
            self.program,
            words,
            log=folder / "log",
            environment=as_variable(case.faults, records),
            deadline=deadline,
        )
        most = self._snapshot_interval
        return judge(case, ended, folder / "save", records, truth, most_lost=most)

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        if folder.exists():
            raise ConfigError(
                f"The folder {folder} holds a run of an earlier call; give another `--folder`, or "
                "remove it."
            )
        folder.mkdir(parents=True)
        return folder


def seconds_of_a_step(rows: Mapping[int, Row], interval: int) -> float:
    """Return a typical step time in seconds: the median of the means of blocks of steps.

    A mean includes the work that is done once in ``interval`` steps; the median excludes pauses of
    the machine. The first block, which warms up, is left out.

    Args:
        rows: the training metrics by step.
        interval: number of consecutive steps in a block.
    """
    times = [rows[iteration]["seconds_per_iteration"] for iteration in sorted(rows)]
    blocks = [times[n : n + interval] for n in range(interval, len(times), interval)]
    return statistics.median([statistics.fmean(block) for block in blocks])
