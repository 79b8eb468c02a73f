"""Records in metrics.jsonl how a run's time is spent, and the environment of its ranks.

The ranks of a machine write their seconds to a `Board` in shared memory, which the reporting rank
reads when it reports. So this needs no communication and no synchronization with a device. With
several machines, only the ranks on the machine of the reporting rank are covered, which has the
last pipeline stages.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_ext import limits
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.host_folder import generation, host_folder
from megatron_ext.disk.writing import open_to_append
from megatron_ext.errors import say_to_stderr
from megatron_ext.extras.report.goodput import PREFIX
from megatron_ext.parallel.board import START, Board
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.train.launch import Launch
from megatron_ext.train.rank import End
from megatron_ext.train.reporting.files import (
    ENDED,
    LAUNCHED,
    METRICS_FILE,
    TIME,
    as_json,
    is_launch,
)

_PACKAGES = ("megatron-ext", "megatron-core", "torch", "transformer-engine", "triton", "numpy")
_VARIABLES = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "UB_")
"""Prefixes of the environment variables that are recorded; they set how a run computes."""
_SECRETS = ("KEY", "PASS", "SECRET", "TOKEN")
_SECONDS_FOR_GIT = 1.0


class TimeRows:
    """Appends a row of kind "time" to metrics.jsonl whenever the run reports its metrics.

    A row has the seconds spent in each phase since the last row: a mean over the ranks of this
    machine, or this rank's own seconds if there is no `Board` in shared memory.
    """

    def __init__(self, folder: Path, recorder: Recorder, launch: Launch, resumed_at: int) -> None:
        self._path = folder / METRICS_FILE
        self._recorder = recorder
        self.launch = launch
        self._iteration = resumed_at
        self._seconds: dict[int, Mapping[str, float]] = {}
        self._generation = generation()
        own = sum(recorder.seconds.values())
        now = time.time()
        # Restarted ranks count from their own start; the time before belongs to the fault.
        self._from = now - own if self._generation else min(launch.started, now - own)
        self._before_ranks = now - own - self._from
        self._board = _board()
        recorder.listeners.append(self._on_event)

    def _on_event(self, name: str, _iteration: int, _detail: Any) -> None:
        """Write the first row, for the time before the first step, when that step begins.

        The rank's `Recorder` calls this with each event's ``name`` until the first step has begun.
        """
        if name == "step":
            others = [one for one in self._recorder.listeners if one != self._on_event]
            self._recorder.listeners = others
            self.write(self._iteration)

    def write(self, iteration: int) -> None:
        """Write the seconds since the last row; ``iteration`` is the last finished step."""
        seconds = self._since_last_row()
        now = time.time()
        seconds[START] = seconds.get(START, 0.0) + self._before_ranks
        row = {
            "kind": TIME,
            "iteration": iteration,
            "before": self._iteration,
            "from": round(self._from, 3),
            "to": round(now, 3),
            "launched_at": self.launch.started,
            "generation": self._generation,
        }
        row |= {f"{PREFIX}{k}": round(v, 6) for k, v in seconds.items() if v > 0}
        self._from = now
        self._before_ranks = 0.0
        self._iteration = iteration
        append_row(self._path, row)

    def _since_last_row(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, a mean over the machine's ranks."""
        before, self._seconds = self._seconds, self._read()
        mean: dict[str, float] = {}
        for rank, seconds in self._seconds.items():
            earlier = before.get(rank, {})
            for name, value in seconds.items():
                spent = (value - earlier.get(name, 0.0)) / len(self._seconds)
                mean[name] = mean.get(name, 0.0) + spent
        return mean

    def _read(self) -> dict[int, Mapping[str, float]]:
        """Return the seconds that each local rank has spent in each phase since its start, by rank.

        Without a `Board` in shared memory, return only this rank's, under key 0.
        """
        records = [] if self._board is None else self._board.read(num_events=1)
        by_rank: dict[int, Mapping[str, float]] = {}
        now = time.monotonic()
        for record in records:
            if record.generation == self._generation and not record.ended:
                seconds = dict(record.seconds)
                # Time that is not on the board yet belongs to the rank's current phase.
                rest = max(0.0, now - record.started - sum(seconds.values()))
                seconds[record.phase] = seconds.get(record.phase, 0.0) + rest
                by_rank[record.rank] = seconds
        return by_rank or {0: self._recorder.seconds}

    def launched(self, config: RunConfig, num_iterations: int) -> None:
        """Write a row about the start of the ranks; a restart adds no settings and no environment.

        ``num_iterations`` is the number of steps that the whole run is to have.
        """
        row: dict[str, Any] = {"kind": LAUNCHED, "iteration": self._iteration, "time": time.time()}
        row |= {"launched_at": self.launch.started, "generation": self._generation}
        row |= {"world_size": config.parallel.world_size, "num_iterations": num_iterations}
        if self._generation == 0:
            from megatron_ext.extras.report.tables import changed_settings

            row |= environment(config.device)
            row |= {"settings": changed_settings(config, self.launch.given)}
            row |= {"data": list(self.launch.data_lines)}
        append_row(self._path, row)

    def finish(self, reason: str) -> None:
        """Write the last row of time, and a row on why the run has ended without a fault.

        Then write the report of the run, unless the launcher will write it.
        """
        self.write(self._recorder.iteration or self._iteration)
        reports = not self.launch.ends_itself
        ended = _ended_row(self._iteration, self.launch, reason=reason, reported=reports)
        append_row(self._path, ended)
        if reports:
            _say(end_launch(self._path.parent, self.launch))


def _board() -> Board | None:
    """Return the shared progress records of this machine's ranks; None if they cannot be opened."""
    host = host_folder()
    try:
        return None if host is None else Board.of_machine(host)
    except OSError:
        return None


def environment(device: str) -> dict[str, Any]:
    """Return facts about the machine, program and packages that a later reader may need."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "device": device,
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "versions": versions,
        "variables": variables(),
    }
    if device == "cuda":
        count = torch.cuda.device_count()
        facts["gpus"] = f"{count} × {torch.cuda.get_device_name()} in this machine"
        facts["versions"]["cuda"] = torch.version.cuda
    commit = _commit()
    return facts if commit is None else {**facts, "commit": commit}


def variables() -> dict[str, str]:
    """Return the environment variables that set how libraries compute, without secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRETS)
    }


def _commit() -> str | None:
    """Return the git commit of the working folder; None without git or a repository."""
    try:
        completed = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=_SECONDS_FOR_GIT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip() or None


def _ended_row(iteration: int, launch: Launch, **facts: Any) -> dict[str, Any]:
    row = {"kind": ENDED, "iteration": iteration, "time": round(time.time(), 3)}
    return {**row, "launched_at": launch.started, **facts}


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to metrics.jsonl by a single write, since the file may be open elsewhere."""
    with open_to_append(path, "ab", buffering=0) as file:
        file.write(as_json(row).encode())


def end_launch(folder: Path, launch: Launch, exit_code: int | None = None) -> str | None:
    """Write the report of a finished launch; return a sentence with goodput and the report's path.

    A launcher calls this after its ranks have ended in any way, with its ``exit_code``, which is
    also added to metrics.jsonl. The reporting rank passes None. Return None if no rank got far
    enough to write metrics, if the reporting rank of a successful run has written the report, or if
    the report cannot be written. This only prints a warning, and does not make the run fail.
    """
    # A run without a save folder has no report.
    from megatron_ext.extras.report.page import REPORT_FILE, write_report
    from megatron_ext.extras.report.run_folder import read_run_folder

    try:
        run = read_run_folder(folder)
        mine = [row for row in run.rows if is_launch(row, launch.started)]
        if not any(row["kind"] == LAUNCHED for row in mine):
            return None
        if exit_code == 0 and any(row.get("reported") is True for row in mine):
            return None
        if exit_code is not None:
            iteration = max(row["iteration"] for row in mine)
            ended = _ended_row(iteration, launch, exit_code=exit_code)
            run.rows.append(ended)
            with contextlib.suppress(OSError):  # A full disk may be what ended the run.
                append_row(folder / METRICS_FILE, ended)
        goodput = write_report(run)
        return f"{goodput.sentence()}; the report is {folder / REPORT_FILE}"
    except Exception as error:
        why = limits.cause(error, folder) if isinstance(error, OSError) else repr(error)
        say_to_stderr(f"warning: {folder / REPORT_FILE} cannot be written ({why}).")
        return None


@contextlib.contextmanager
def reported_end(save: str | None, launch: Launch) -> Iterator[End]:
    """Yield an `End` whose exit code the block must set, and then write the report of the launch.

    Nothing is written without a save folder, or under torchrun, where a rank writes the report.
    """
    end = End()
    try:
        yield end
    finally:
        if save is not None and launch.ends_itself:
            _say(end_launch(Path(save), launch, end.exit_code))


def _say(sentence: str | None) -> None:
    if sentence is not None:
        print(f"> {sentence}", flush=True)
