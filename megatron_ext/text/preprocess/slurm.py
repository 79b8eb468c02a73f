"""Encodes the parts of a run in a job array of Slurm, on machines that share its file system.

The script of the array lists the parts of each task. A task encodes its parts in processes of its
machine (`task.py`) and writes a marker for each finished part; nothing else reports success. If the
array ends and parts have no marker, they are submitted again, each as its own task.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_ext.data.part_pool import ATTEMPTS
from megatron_ext.disk.reading import read_text
from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess.jobs import SECONDS_FOR_FILES, Job, Say, progress_of
from megatron_ext.text.preprocess.parts import (
    SLURM_JOB,
    PartMarker,
    failure_of,
    read_marker,
    replace_file,
)
from megatron_ext.text.tokenizers.fast import InexactEngine

_LONGEST_PAUSE = 15.0
_TASKS_OF_ONE_PART = 100
_UNKNOWN = "unknown: "
"""The prefix of a task's state if squeue answers with an error."""
_SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name=preprocess
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={workers}
#SBATCH --output="{folder}/slurm_%A_%a.log"
#SBATCH {arguments}
#
# Encodes the parts of the input of {prefix}, which tools/preprocess_data.py has cut.
#
#   bash FILE                        submits all parts as a job array, and after it a job that
#                                    encodes what is missing and joins the datasets
#   sbatch --array=0-1 FILE 3 5-7    encodes part 3 in one task, and parts 5 to 7 in another
set -euo pipefail
PARTS=({parts})
if (($#)); then PARTS=("$@"); fi
if [[ -z "${{SLURM_JOB_ID:-}}" ]]; then
    ID="$(sbatch --parsable --array="0-$((${{#PARTS[@]}} - 1))" "$0" "$@")"
    exec sbatch --dependency="afterany:${{ID%%;*}}" --output={log} "$0"
fi
cd {cwd}
export PYTHONPATH={root}"${{PYTHONPATH:+:$PYTHONPATH}}"
TASK=({python} -m megatron_ext.text.preprocess.task {quoted_folder})
if [[ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]]; then
    exec "${{TASK[@]}}" "${{PARTS[$SLURM_ARRAY_TASK_ID]}}"
fi
exec "${{TASK[@]}}"
"""


def write_script(job: Job, todo: Sequence[int], path: Path, say: Say) -> None:
    """Write the job script to ``path``, and the options of its tasks to the work directory."""
    options = job.options
    folder = Path(os.path.abspath(job.folder))
    about = {"options": asdict(options), "key": job.key, "fast": job.fast, "cwd": os.getcwd()}
    replace_file(folder / "job.json", json.dumps({"kind": type(options).__name__, **about}))
    tasks = _dealt(todo, options.slurm_tasks)
    path.write_text(
        _SCRIPT.format(
            workers=options.workers,
            folder=folder,
            arguments=" ".join(options.slurm_args.split()) or "--comment=preprocess_data.py",
            prefix=options.output_prefix,
            parts=" ".join(map(ranges, tasks)),
            log=shlex.quote(os.path.abspath(f"{options.output_prefix}.slurm_%j.log")),
            cwd=shlex.quote(os.getcwd()),
            root=shlex.quote(str(Path(__file__).resolve().parents[3])),
            python=shlex.quote(sys.executable),
            quoted_folder=shlex.quote(str(folder)),
        )
    )
    path.chmod(0o755)
    say(f"Wrote {path} with {len(todo)} parts in {len(tasks)} tasks; `bash {path}` submits it.")


def _dealt(numbers: Sequence[int], count: int) -> list[Sequence[int]]:
    """Divide numbers into ``count`` consecutive pieces; fewer if some would be empty."""
    count = min(count, len(numbers))
    return [
        numbers[i * len(numbers) // count : (i + 1) * len(numbers) // count] for i in range(count)
    ]


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


def encode_by_slurm(job: Job, todo: Sequence[int], say: Say) -> None:
    """Encode the parts with the numbers ``todo`` in job arrays, and wait for them.

    Raises:
        ConfigError: this machine has no Slurm, or Slurm refuses the job.
        DataError: the input cannot be used, or somebody has cancelled the job.
        MachineFault: `ATTEMPTS` arrays have not encoded a part.
        InexactEngine: the fast engine gives other ids than the tokenizer.
    """
    for program in ("sbatch", "squeue", "scancel"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"`--executor slurm` needs the program {program}, which this machine lacks; run it "
                "where jobs are submitted, or leave `--executor` out."
            )
    _forget_former_run(job.folder)
    script = job.folder / "slurm.sh"
    write_script(job, todo, script, lambda _: None)
    watch = _Watch(job, todo)
    tasks = _dealt(todo, job.options.slurm_tasks)
    try:
        for attempt in range(1, ATTEMPTS + 1):
            array = _Array(job.folder, script, tasks)
            say(f"Slurm job {array.number}: {len(tasks)} tasks encode {len(todo)} parts.")
            with array:
                left = array.wait(watch, say)
            if not left:
                return
            faults = array.faults(left)
            for fault in faults[:3]:
                say(f"{fault}.")
            if attempt < ATTEMPTS:
                say(f"Parts {ranges(left)} are encoded again (attempt {attempt + 1}).")
            todo = left
            tasks = _dealt(left, max(job.options.slurm_tasks, _TASKS_OF_ONE_PART))
    finally:
        watch.progress.close()
    raise MachineFault(
        f"Parts {ranges(left)} of {job.options.output_prefix} were not encoded in {ATTEMPTS} "
        f"attempts ({faults[0]}); finished parts are kept, so mend this and run the same command "
        "again."
    )


def _forget_former_run(folder: Path) -> None:
    """Cancel the job of an earlier run that was killed, and remove the errors of its tasks."""
    if (folder / SLURM_JOB).exists():
        if number := _number_of_job(folder):
            _call("scancel", number)
        (folder / SLURM_JOB).unlink()
    for path in folder.glob("failed.*.json"):
        path.unlink()


def _number_of_job(folder: Path) -> str:
    """Return the job number that a work directory records; "" if the file holds none."""
    number = read_text(folder / SLURM_JOB, limit=1000).strip()
    return number if number.isalnum() else ""


class _Watch:
    """Watches an array by the files in its work directory: markers, and errors of tasks."""

    def __init__(self, job: Job, todo: Sequence[int]) -> None:
        self._job = job
        self._todo = todo
        self._done: dict[int, PartMarker] = {}
        self.progress = progress_of(job, todo)

    def look(self) -> list[int]:
        """Show the progress; return the unfinished parts, or raise the error of a task."""
        for path in self._job.folder.glob("failed.*.json"):
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


class _Array:
    """A submitted job array; leaving the `with` block before its end cancels it."""

    def __init__(self, folder: Path, script: Path, tasks: Sequence[Sequence[int]]) -> None:
        self._folder = folder
        self._tasks = tasks
        self._ended = False
        words = ["--parsable", f"--array=0-{len(tasks) - 1}", str(script), *map(ranges, tasks)]
        done = _call("sbatch", *words)
        if done.returncode:
            raise ConfigError(
                f"sbatch refused the job array ({_reason(done)}); change `--slurm-args` or "
                "`--slurm-tasks`."
            )
        self.number = done.stdout.strip().partition(";")[0]
        replace_file(folder / SLURM_JOB, self.number)

    def __enter__(self) -> "_Array":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            _call("scancel", self.number)
        (self._folder / SLURM_JOB).unlink(missing_ok=True)

    def wait(self, watch: _Watch, say: Say) -> list[int]:
        """Wait until no task is left in the queue; return the unfinished parts."""
        pause, shown = 0.5, ""
        while True:
            left = watch.look()
            states = self._queued()
            if states is None or (not left and all(s.startswith(_UNKNOWN) for s in states)):
                left = watch.look()
                break
            kinds = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            if " ".join(sorted(states)) != shown:
                say(f"Slurm job {self.number}: {kinds}.")
                shown = " ".join(sorted(states))
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        self._ended = True
        until = time.monotonic() + SECONDS_FOR_FILES
        while left and self._may_be_late(left) and time.monotonic() < until:
            time.sleep(0.5)
            left = watch.look()
        return left

    def _queued(self) -> Counter[str] | None:
        """Return the number of queued or running tasks by state; None if no task is left."""
        done = _call(
            "squeue", "--noheader", "--array", "--jobs", self.number, "--format", "%T (%r)"
        )
        if done.returncode:
            # Slurm forgets a job minutes after its end. Any other error means a busy server.
            return None if "Invalid job id" in done.stderr else Counter([_UNKNOWN + _reason(done)])
        lines = [line.strip().replace(" (None)", "") for line in done.stdout.splitlines()]
        return Counter(filter(None, lines)) or None

    def _may_be_late(self, left: Iterable[int]) -> bool:
        """Tell whether the marker of an unfinished part may still appear, as late files on NFS do.

        It may if Slurm does not report that the part's task has failed.
        """
        states = self._states()
        return any(states.get(i, "COMPLETED") == "COMPLETED" for i in self._tasks_of(left))

    def _tasks_of(self, numbers: Iterable[int]) -> list[int]:
        chosen = set(numbers)
        return [i for i, task in enumerate(self._tasks) if chosen & set(task)]

    def _states(self) -> dict[int, str]:
        """Return the last state of each task, by its index; empty if Slurm does no accounting."""
        if shutil.which("sacct") is None:
            return {}
        words = "--noheader --parsable2 --allocations --array --format JobID,State".split()
        done = _call("sacct", *words, "--jobs", self.number)
        rows = [line.partition("|") for line in done.stdout.splitlines()]
        states = {}
        for name, _, state in rows:
            index = name.partition("_")[2]
            if index.isdigit() and state:
                states[int(index)] = state.split()[0]
        return states

    def faults(self, left: Iterable[int]) -> list[str]:
        """Return a sentence on each task that has left parts unfinished.

        Raise a DataError if one of these tasks was cancelled.
        """
        states = self._states()
        sentences = []
        for i in self._tasks_of(left):
            state = states.get(i, "without a marker for each part")
            log = self._folder / f"slurm_{self.number}_{i}.log"
            sentences.append(f"Slurm task {self.number}_{i} ended {state}, log {log}")
            if state == "CANCELLED":
                raise DataError(
                    f"Slurm job {self.number} was cancelled; finished parts are kept, so run the "
                    "same command again to go on."
                )
        return sentences


def _call(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True)


def _reason(done: "subprocess.CompletedProcess[str]") -> str:
    return " ".join(done.stderr.split()) or f"exit code {done.returncode}"
