"""Encodes the parts of a run in job arrays of Slurm.

The script of an array lists the parts of each task. A task encodes its parts in processes on one
machine.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.disk.reading import read_text
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess.cluster import ranges, save_job
from megatron_ext.text.preprocess.jobs import Job, Say
from megatron_ext.text.preprocess.parts import SLURM_JOB, replace_file

_LONGEST_PAUSE = 15.0
_TASKS_OF_ONE_PART = 100
_UNKNOWN = "unknown: "
"""The prefix of squeue's error message where `_queued` returns that in place of a task's state."""
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
    """Write the script of a Slurm job array that encodes the parts with the numbers ``todo``.

    The script's path is ``path``. Also write ``job.json``, which the tasks of the array read, to
    the work directory.
    """
    options = job.options
    folder = Path(os.path.abspath(job.folder))
    save_job(job)
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
    """Divide numbers into at most ``count`` consecutive pieces, of which none is empty."""
    count = min(count, len(numbers))
    return [
        numbers[i * len(numbers) // count : (i + 1) * len(numbers) // count] for i in range(count)
    ]


class SlurmArrays:
    """Encodes the parts of a job in a job array of Slurm; a new array repeats parts that failed.

    An array that an earlier run has left is cancelled first. Raise a ConfigError if this machine
    has no Slurm, or Slurm refuses an array.
    """

    def __init__(self, job: Job, todo: Sequence[int], say: Say) -> None:
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise ConfigError(
                    f"`--executor slurm` needs the program {program}, which this machine lacks; "
                    "run it where jobs are submitted, or leave `--executor` out."
                )
        self._folder = job.folder
        self.close()  # An earlier run that was killed may have left an array.
        self._script = job.folder / "slurm.sh"
        write_script(job, todo, self._script, lambda _: None)
        self._say = say
        self._num_tasks = job.options.slurm_tasks
        self._tasks: list[Sequence[int]] = []
        self._number = ""
        self._pause = 0.5
        self._shown = ""

    def submit(self, numbers: Sequence[int]) -> None:
        self._tasks = _dealt(numbers, self._num_tasks)
        self._num_tasks = max(self._num_tasks, _TASKS_OF_ONE_PART)
        words = [f"--array=0-{len(self._tasks) - 1}", str(self._script), *map(ranges, self._tasks)]
        done = _call("sbatch", "--parsable", *words)
        if done.returncode:
            raise ConfigError(
                f"sbatch refused the job array ({_reason(done)}); change `--slurm-args` or "
                "`--slurm-tasks`."
            )
        self._number = done.stdout.strip().partition(";")[0]
        replace_file(self._folder / SLURM_JOB, self._number)
        self._say(
            f"Slurm job {self._number}: {len(self._tasks)} tasks encode {len(numbers)} parts."
        )
        self._pause = 0.5
        self._shown = ""

    def running(self, left: Sequence[int]) -> bool:
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)
        states = self._queued()
        if states is None or (not left and all(s.startswith(_UNKNOWN) for s in states)):
            (self._folder / SLURM_JOB).unlink()
            return False
        if " ".join(sorted(states)) != self._shown:
            kinds = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            self._say(f"Slurm job {self._number}: {kinds}.")
            self._shown = " ".join(sorted(states))
        return True

    def _queued(self) -> Counter[str] | None:
        """Return the number of queued or running tasks in each state; None if no task is left."""
        done = _call(
            "squeue", "--noheader", "--array", "--jobs", self._number, "--format", "%T (%r)"
        )
        if done.returncode:
            # Slurm forgets a job minutes after its end. Any other error means a busy server.
            return None if "Invalid job id" in done.stderr else Counter([_UNKNOWN + _reason(done)])
        lines = [line.strip().replace(" (None)", "") for line in done.stdout.splitlines()]
        return Counter(filter(None, lines)) or None

    def faults(self, left: Sequence[int]) -> tuple[list[str], bool]:
        """Return how tasks failed, as phrases for an error, and whether a marker may only be late.

        A marker is the file that tells that a part is finished. ``left`` are the numbers of the
        parts without one; the phrases describe the tasks that should have encoded these parts. The
        second value is True if one of these tasks may have succeeded, so that its marker may still
        appear. Raise a DataError if one of them was cancelled.
        """
        tasks = [i for i, numbers in enumerate(self._tasks) if not set(left).isdisjoint(numbers)]
        states = self._states() if tasks else {}
        clauses = []
        for i in tasks:
            state = states.get(i, "without a marker for each part")
            log = self._folder / f"slurm_{self._number}_{i}.log"
            clauses.append(f"Slurm task {self._number}_{i} ended {state}, log {log}")
            if state == "CANCELLED":
                raise DataError(
                    f"Slurm job {self._number} was cancelled; finished parts are kept, so run the "
                    "same command again to go on."
                )
        return clauses, any(states.get(i, "COMPLETED") == "COMPLETED" for i in tasks)

    def _states(self) -> dict[int, str]:
        """Return the last state of each task, such as "COMPLETED", by the index of the task.

        Return {} if Slurm keeps no record of ended jobs (it has no `sacct`).
        """
        if shutil.which("sacct") is None:
            return {}
        words = "--noheader --parsable2 --allocations --array --format JobID,State".split()
        done = _call("sacct", *words, "--jobs", self._number)
        rows = [line.partition("|") for line in done.stdout.splitlines()]
        states = {}
        for name, _, state in rows:
            index = name.partition("_")[2]
            if index.isdigit() and state:
                states[int(index)] = state.split()[0]
        return states

    def close(self) -> None:
        path = self._folder / SLURM_JOB
        if path.exists():
            number = read_text(path, limit=1000).strip()
            if number.isalnum():
                _call("scancel", number)
            path.unlink()


def _call(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True)


def _reason(done: "subprocess.CompletedProcess[str]") -> str:
    return " ".join(done.stderr.split()) or f"exit code {done.returncode}"
