"""Stand-ins for sbatch, squeue, sacct and scancel, which really run the tasks as processes."""

import os
import sys
from pathlib import Path

import pytest

from megatron_ext.text.preprocess import slurm

_PROGRAM = '''#!{python}
import os, re, signal, subprocess, sys, time
STATE, ENDED = "{folder}/jobs", ("COMPLETED", "FAILED", "OUT_OF_MEMORY", "CANCELLED")
program = os.path.basename(sys.argv[0])
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:] if word[:2] == "--")
words = [word for word in sys.argv[1:] if word[:2] != "--"]

def states(job):
    """Return the state of each task of a job by its index."""
    folder = f"{{STATE}}/{{job}}"
    return {{name: open(f"{{folder}}/{{name}}").read() for name in sorted(os.listdir(folder))
            if name.isdigit()}}

def put(job, task, state):
    with open(f"{{STATE}}/{{job}}/new", "w") as out:
        out.write(state)
    os.replace(f"{{STATE}}/{{job}}/new", f"{{STATE}}/{{job}}/{{task}}")

def sbatch():
    if os.path.exists("{folder}/refuse"):
        sys.exit("sbatch: error: invalid partition specified: cpu")
    job = 100 + len(os.listdir(STATE))
    os.mkdir(f"{{STATE}}/{{job}}")
    given = [*(word for word in sys.argv[1:] if word[:2] == "--"), *words[1:]]
    with open("{folder}/submitted", "a") as out:
        out.write(" ".join(given) + "\\n")
    script = f"{{STATE}}/{{job}}/script"
    with open(words[0]) as given, open(script, "w") as copy:
        copy.write(given.read())
    last = int(options["array"].partition("-")[2]) if "array" in options else 0
    for task in range(last + 1):
        put(job, task, "PENDING")
    print(f"{{job}};cluster")
    sys.stdout.flush()
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        work(job, last + 1, script)

def work(job, count, script):
    """Run the tasks of a job, two at a time."""
    with open(f"{{STATE}}/{{job}}/leader", "w") as out:
        out.write(str(os.getpid()))
    before = options.get("dependency", "").partition(":")[2]
    while before and any(state not in ENDED for state in states(before).values()):
        time.sleep(0.05)
    log = options.get("output") or re.search('SBATCH --output="(.*)"', open(script).read())[1]
    waiting, running = list(range(count)), {{}}
    while waiting or running:
        while waiting and len(running) < 2:
            task = waiting.pop(0)
            about = {{"SLURM_JOB_ID": str(job)}}
            if "array" in options:
                about["SLURM_ARRAY_TASK_ID"] = str(task)
            name = log.replace("%A", str(job)).replace("%a", str(task)).replace("%j", str(job))
            put(job, task, "RUNNING")
            running[task] = subprocess.Popen(
                ["bash", script, *words[1:]], env=dict(os.environ, **about),
                stdout=open(name, "w"), stderr=subprocess.STDOUT)
        for task, process in list(running.items()):
            code = process.poll()
            if code is not None:
                killed = code in (-9, 137)
                put(job, task, "OUT_OF_MEMORY" if killed else "FAILED" if code else "COMPLETED")
                del running[task]
        time.sleep(0.02)

def squeue():
    if os.path.exists("{folder}/busy"):
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller")
    for state in states(sys.argv[sys.argv.index("--jobs") + 1]).values():
        if state not in ENDED:
            print(f"{{state}} ({{'Priority' if state == 'PENDING' else 'None'}})")

def sacct():
    job = sys.argv[sys.argv.index("--jobs") + 1]
    for task, state in states(job).items():
        print(f"{{job}}_{{task}}|{{state}}{{' by 0' if state == 'CANCELLED' else ''}}")

def scancel():
    job = sys.argv[1]
    with open("{folder}/cancelled", "a") as out:
        out.write(job + "\\n")
    os.killpg(int(open(f"{{STATE}}/{{job}}/leader").read()), signal.SIGKILL)
    for task, state in states(job).items():
        if state not in ENDED:
            put(job, task, "CANCELLED")

globals()[program]()
'''


class Slurm:
    """A folder with the stand-ins, which come first in PATH, and what they have been asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "slurm"
        (self.folder / "jobs").mkdir(parents=True)
        (self.folder / "bin").mkdir()
        text = _PROGRAM.format(python=sys.executable, folder=self.folder)
        for name in ("sbatch", "squeue", "sacct", "scancel"):
            (self.folder / "bin" / name).write_text(text)
            (self.folder / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm, "_LONGEST_PAUSE", 0.5)

    def submitted(self) -> list[str]:
        """Return options and words of each call of sbatch, without the script."""
        path = self.folder / "submitted"
        return path.read_text().splitlines() if path.exists() else []

    def cancelled(self) -> list[str]:
        path = self.folder / "cancelled"
        return path.read_text().split() if path.exists() else []
