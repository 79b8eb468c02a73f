"""The job of examples/slurm goes on over time limits and faults, with stand-ins for Slurm."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_ext.train.exit_codes import EXIT_CODE_SIGNAL
from tests.examples.scripts import EXAMPLES, LAUNCHED, ROOT, rows
from tests.train.nodes import SECONDS, until
from tests.training_runs import documents

TINY = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --train-iters 30 "
    "--lr-warmup-iters 1 --eval-iters 0 --log-interval 1 --save-interval 100 "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --no-sequence-parallel "
    "--tokenizer-type NullTokenizer --vocab-size 90"
)
PYTHON = """#!/usr/bin/env bash
# Adds the flags of a tiny run to those of the script.
if [[ "$*" == *pretrain_gpt.py* ]]; then exec {python} "$@" $TINY; fi
exec {python} "$@"
"""
FAILING = """#!/usr/bin/env bash
# Ends as nodes do that get SIGTERM, after one of them has left the exit code $TINY.
case "$*" in
    *megatron_ext.train.torchrun*)
        if [[ "$TINY" ]]; then
            mkdir -p "$MEGATRON_EXT_EXIT_CODES" && echo "$TINY" > "$MEGATRON_EXT_EXIT_CODES/node"
        fi
        exit 143 ;;
    *exit_codes*) exec {python} "$@" ;;
esac
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") echo localhost ;;
    "show job") echo "JobId=$3 JobState=RUNNING" ;;
    "requeue "*) echo "$2" >> {folder}/requeued ;;
esac
"""
SRUN = """#!{python}
# Runs one task for each node; the first that ends badly ends the others (--kill-on-bad-exit).
import os, subprocess, sys, time
words = sys.argv[2:] if sys.argv[1] == "--kill-on-bad-exit=1" else sys.exit("not asked to kill")
tasks = [subprocess.Popen(words, env=dict(os.environ, SLURM_NODEID=str(node)))
         for node in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
while any(task.poll() is None for task in tasks):
    if any(task.returncode for task in tasks):
        for task in tasks:
            if task.poll() is None:
                task.terminate()
        break
    time.sleep(0.05)
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""


class Slurm:
    """Runs the job script as Slurm does, and queues it again when it asks for that."""

    def __init__(self, folder: Path, *words: str, python: str = PYTHON, restarts: int = 0) -> None:
        self._folder, self._words, self._restarts = folder, words, restarts
        programs = {"python": python, "scontrol": SCONTROL, "srun": SRUN}
        (folder / "bin").mkdir()
        for name, text in programs.items():
            path = folder / "bin" / name
            path.write_text(
                text.replace("{python}", sys.executable).replace("{folder}", str(folder))
            )
            path.chmod(0o755)

    def run(self, disturb: Callable[[psutil.Process], None], tiny: str = TINY) -> tuple[int, str]:
        """Run the job once, disturb it meanwhile, and return its exit code and its output."""
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        given = {"JOB_ID": "77", "JOB_NUM_NODES": "2", "JOB_NODELIST": "two", "GPUS_ON_NODE": "1"}
        given |= {"SUBMIT_DIR": str(ROOT), "RESTART_COUNT": str(self._restarts)}
        programs = self._folder / "bin"
        environment = {
            **inherited,
            **{f"SLURM_{name}": value for name, value in given.items()},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": str(programs / "python"),
            "TINY": tiny,
            "RESTARTS": "0",
            "OMP_NUM_THREADS": "1",
        }
        log = self._folder / f"log_{self._restarts}"
        script = EXAMPLES / "slurm" / "pretrain_gpt.sbatch"
        with log.open("w") as output, subprocess.Popen(
            ["bash", str(script), *self._words], env=environment, stdout=output,
            stderr=subprocess.STDOUT,
        ) as job:  # fmt: skip
            try:
                disturb(psutil.Process(job.pid))
                code = job.wait(timeout=SECONDS)
            finally:
                if job.poll() is None:
                    for process in psutil.Process(job.pid).children(recursive=True):
                        process.kill()
        self._restarts += 1
        return code, log.read_text()

    def queued_again(self) -> int:
        """Return how often the job has been queued again."""
        path = self._folder / "requeued"
        return len(path.read_text().splitlines()) if path.exists() else 0


def _named(job: psutil.Process, word: str) -> list[psutil.Process]:
    """Return the Python processes of a job whose program is ``word``."""
    found = []
    for process in job.children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(word in given for given in words[:4]) and "srun" not in words[1]:
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("left", "restarts", "again"), [("", 10, True), ("1", 9, True), ("1", 10, False)]
)
def test_only_the_time_limit_queues_a_job_again_without_end(
    left: str, restarts: int, again: bool, tmp_path: Path
) -> None:
    slurm = Slurm(tmp_path, "data", "none", str(tmp_path), python=FAILING, restarts=restarts)
    code, shown = slurm.run(lambda job: None, left)
    assert (code, slurm.queued_again()) == (int(left or EXIT_CODE_SIGNAL), again), shown


@pytest.mark.slow
def test_a_job_goes_on_after_its_time_limit_and_a_killed_rank(tmp_path: Path) -> None:
    save = tmp_path / "save"
    data = documents(tmp_path / "data", 400)
    slurm = Slurm(tmp_path, data, "none", str(save))

    def steps() -> int:
        path = save / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def time_limit(job: psutil.Process) -> None:
        until(lambda: steps() >= 3)
        for process in [*_named(job, "torchrun"), *_named(job, "pretrain_gpt.py")]:
            process.send_signal(signal.SIGTERM)

    code, shown = slurm.run(time_limit)
    assert (code, slurm.queued_again()) == (EXIT_CODE_SIGNAL, 1), shown
    before = steps()
    assert 3 <= before < 30

    def kill_a_rank(job: psutil.Process) -> None:
        until(lambda: steps() > before)
        _named(job, "pretrain_gpt.py")[0].kill()

    code, shown = slurm.run(kill_a_rank)
    assert (code, slurm.queued_again()) == (128 + signal.SIGKILL, 2), shown
    assert "a rank was ended by SIGKILL; worth another start" in shown
    code, shown = slurm.run(lambda job: None)
    assert (code, slurm.queued_again()) == (0, 2), shown
    assert [row["iteration"] for row in rows(save, "train")] == list(range(1, 31))
    code, shown = slurm.run(lambda job: None, f"{TINY} --lr-warmup-iters x")
    assert code != 0 and slurm.queued_again() == 2, shown
    assert "exit code 2: a flag, a file or a checkpoint must be corrected first" in shown
