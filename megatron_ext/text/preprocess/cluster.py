"""Encodes the parts of a run's input in tasks of Slurm or Ray, on machines that share its files.

A task (`task.py`) reads the run's options and the list of parts from the work directory. It writes
a marker file for each part that it has finished; nothing else reports success. If a task fails with
an error that another attempt would also meet, it writes the error to a file, and the run ends.
Otherwise, parts that have no marker when all tasks have ended are encoded again.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Protocol

from megatron_ext.data.part_pool import ATTEMPTS
from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess.jobs import Job, Say, progress_of
from megatron_ext.text.preprocess.parts import (
    PartMarker,
    failure_of,
    failure_paths,
    read_marker,
    replace_file,
)
from megatron_ext.text.tokenizers.fast import InexactEngine

_SECONDS_FOR_FILES = 30.0
"""The seconds after which a file that another machine wrote must be visible here.

On NFS it may be late."""


class Cluster(Protocol):
    """Runs tasks that encode parts of the input on other machines, for `encode_on`.

    A part is finished when its marker file is in the work directory.
    """

    def submit(self, numbers: Sequence[int]) -> None:
        """Submit tasks that encode the parts with the given numbers; each call is a new attempt."""
        ...

    def running(self, left: Sequence[int]) -> bool:
        """Wait a moment; return whether any task is still queued or running.

        ``left`` are the numbers of the parts that have no marker file.
        """
        ...

    def faults(self, left: Sequence[int]) -> tuple[list[str], bool]:
        """Return (clauses for an error that tell how tasks failed, whether to wait for a marker).

        Call this when all tasks have ended. ``left`` are the numbers of the parts without a marker
        file; the clauses describe the tasks that should have encoded them. The second value is
        True if one of these tasks may have succeeded, so that its marker may still appear on the
        shared file system.
        """
        ...

    def close(self) -> None:
        """Cancel the tasks that still run."""
        ...


def encode_on(cluster: Cluster, job: Job, todo: Sequence[int], say: Say) -> None:
    """Encode the parts of ``job`` with the numbers ``todo`` on a cluster, then close the cluster.

    Parts whose tasks fail are encoded again; ``say`` is called with sentences for the user on this.

    Raises:
        DataError: the input cannot be used, or somebody has cancelled the tasks.
        MachineFault: `ATTEMPTS` attempts have failed to encode a part.
        InexactEngine: gigatoken, the fast encoder, gives other ids than the tokenizer.
    """
    for path in failure_paths(job.folder):  # An earlier run with the same plan has left them.
        path.unlink()
    watch = Watch(job, todo)
    left = list(todo)
    with closing(watch.progress), closing(cluster):
        for attempt in range(1, ATTEMPTS + 1):
            cluster.submit(left)
            while cluster.running(left):
                left = watch.look()
            left = watch.look()
            until = time.monotonic() + _SECONDS_FOR_FILES
            faults, may_be_late = cluster.faults(left)
            while may_be_late and time.monotonic() < until:
                time.sleep(0.5)
                left = watch.look()
                faults, may_be_late = cluster.faults(left)
            if not left:
                return
            for fault in faults[:3]:
                say(f"{fault}.")
            if attempt < ATTEMPTS:
                say(f"Parts {ranges(left)} are encoded again (attempt {attempt + 1}).")
    raise MachineFault(
        f"Parts {ranges(left)} of {job.options.output_prefix} were not encoded in {ATTEMPTS} "
        f"attempts ({faults[0]}); finished parts are kept, so mend this and run the same command "
        "again."
    )


class Watch:
    """Watches tasks by the files that they write: markers of finished parts, and errors."""

    def __init__(self, job: Job, todo: Sequence[int]) -> None:
        self._job = job
        self._todo = todo
        self._done: dict[int, PartMarker] = {}
        self.progress = progress_of(job, todo)

    def look(self) -> list[int]:
        """Show the progress; return the numbers of the parts without a marker file.

        If a task has written an error to a file, raise it as an InexactEngine or a DataError.
        """
        for path in failure_paths(self._job.folder):
            failure = failure_of(path)
            if failure.key != self._job.key:  # A task of an earlier plan was still running.
                continue
            if failure.kind == "inexact":
                raise InexactEngine(failure.messages[0])
            raise DataError(failure.messages)
        for number in self._todo:
            if number not in self._done:
                marker = read_marker(self._job.folder, self._job.key, number)
                if marker is not None:
                    self._done[number] = marker
        done = sum(self._job.parts[number].num_bytes for number in self._done)
        self.progress.show(done, sum(marker.documents for marker in self._done.values()))
        return [number for number in self._todo if number not in self._done]


def save_job(job: Job) -> None:
    """Write the file in the work directory from which tasks build this job."""
    about = {"options": asdict(job.options), "key": job.key, "fast": job.fast, "cwd": os.getcwd()}
    about["kind"] = type(job.options).__name__
    replace_file(job.folder / "job.json", json.dumps(about))


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as a text such as ``0-3,7``, which `numbers_of` reads."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def numbers_of(text: str) -> list[int]:
    """Parse a text such as ``0-3,7`` into its numbers; raise a ConfigError for any other text."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(
            f"The parts of a task ({text}) must be numbers, such as 0-3,7; mend them."
        )
    ends = [piece.split("-") for piece in text.split(",")]
    return [number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]
