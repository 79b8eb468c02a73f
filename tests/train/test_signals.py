"""A signal to any process of a run, at any moment, loses nothing that the exit code promises."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_ext.checkpoint.files import folder_of, read_manifest, read_tracker
from megatron_ext.errors import EXIT_CODE_INTERRUPTED, EXIT_CODE_NOT_SAVED
from megatron_ext.train.exit_codes import EXIT_CODE_SIGNAL
from megatron_ext.train.reporting.files import read_metrics
from tests.train.nodes import until
from tests.train.signalled import MOMENTS, REACHED
from tests.training_runs import ROOT, SMALL, training_rows, without

PROGRAM = str(ROOT / "tests" / "train" / "signalled.py")
LAUNCHERS = {
    "own": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "our torchrun": [sys.executable, "-m", "megatron_ext.train.torchrun"],
}
FLAGS = [
    *without(SMALL, "--num-workers", "--train-iters", "--eval-interval", "--eval-iters"),
    *"--train-iters 3000 --data-parallel-random-init --eval-iters 0".split(),
]
FLAGS.remove("--data-parallel-random-init")
SECONDS = 240.0
"""Time for anything that a run does, on a machine that does much else."""


@dataclass(frozen=True)
class Case:
    """A signal, who gets it, when, and how the run was started."""

    launcher: str
    ranks: int
    workers: int
    moment: str
    target: str
    name: str
    times: int = 1

    def __str__(self) -> str:
        words = (self.launcher, self.ranks, f"{self.workers} workers", self.moment, self.target)
        return "-".join(map(str, (*words, self.name, self.times)))


class Started:
    """A run in a session of its own, which is killed when this context ends."""

    def __init__(self, case: Case, folder: Path, *flags: str) -> None:
        self.case, self.folder, self.save = case, folder, folder / "save"
        launched = [f"--nproc-per-node={case.ranks}"]
        if case.launcher != "own":
            launched = ["--standalone", *launched, "--monitor-interval=0.1"]
        own = launched if case.launcher == "own" else []
        words = [*LAUNCHERS[case.launcher], *([] if own else launched), PROGRAM, case.moment]
        words += [str(folder), *FLAGS, *MOMENTS[case.moment].split(), *own, *flags]
        words += ["--num-workers", str(case.workers), "--save", str(self.save)]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def alive(self) -> list[int]:
        """Return the processes of the session that still run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                of_run = os.getsid(process.pid) == self.process.pid
                if of_run and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def send(self, number: int) -> None:
        """Send the signal to the target of the case, as often as it says."""
        for _ in range(self.case.times):
            if self.case.target == "group":
                os.killpg(self.process.pid, number)
            elif self.case.target == "launcher":
                self.process.send_signal(number)
            else:
                last = self.folder / f"rank_{self.case.ranks - 1}"
                os.kill(int(last.read_text()), number)
            time.sleep(0.05)

    def reach(self) -> None:
        """Wait for the moment of the case, and for all ranks."""
        started = [self.folder / f"rank_{rank}" for rank in range(self.case.ranks)]
        paths = [self.folder / REACHED, *started]

        def reached() -> bool:
            assert self.process.poll() is None, self.log()
            return all(path.exists() for path in paths)

        until(reached, SECONDS)

    def end(self) -> int:
        """Wait for the end of the whole session, and return the exit code."""
        code = self.process.wait(SECONDS)
        until(lambda: not self.alive(), 60)
        return code

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def check_saved(self) -> None:
        """Check that the last step of the run is on disk, in a whole checkpoint."""
        steps = [row["iteration"] for row in training_rows(read_metrics(self.save / "metrics.jsonl"))]
        assert read_tracker(self.save) == steps[-1] < 3000, self.log()
        manifest = read_manifest(folder_of(self.save, steps[-1]))
        assert manifest is not None and len(manifest) > 2


def _all_cases() -> list[Case]:
    """Return every combination, in an order that is always the same."""
    sizes = itertools.product((1, 2, 4), (0, 2))
    moments = [moment for moment in MOMENTS if moment != "start"]
    rest = itertools.product(sizes, moments, ("launcher", "group", "rank"), _SIGNALS, (1, 2))
    cases = [
        Case(launcher, ranks, workers, moment, target, name, times)
        for (ranks, workers), moment, target, name, times in rest
        for launcher in LAUNCHERS
    ]
    return random.Random(5).sample(cases, len(cases))


_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
_SHARES = {"own": 90, "torchrun": 30, "our torchrun": 48}
"""Number of cases by launcher; under torchrun each rank imports everything anew."""


def _chosen() -> list[Case]:
    """Return a sample of all cases, in which one in ten is for the quick tests."""
    cases = _all_cases()
    return [
        case
        for launcher, number in _SHARES.items()
        for case in [case for case in cases if case.launcher == launcher][:number]
    ]


QUICK = [case for case in _chosen() if case.launcher == "own" and case.ranks < 4][:12]
QUICK += [
    Case("our torchrun", 2, 2, "training", "group", "SIGTERM"),
    Case("our torchrun", 1, 2, "asynchronous save", "launcher", "SIGUSR1"),
    Case("torchrun", 2, 2, "training", "launcher", "SIGTERM"),
]


def _check(case: Case, folder: Path) -> None:
    with Started(case, folder, "--exit-signal-handler", "--exit-signal", case.name) as run:
        run.reach()
        run.send(signal.Signals[case.name])
        code = run.end()
        shown = run.log()
        run.check_saved()
    assert "DataLoader worker" not in shown
    if case.launcher == "torchrun":
        # torch's agent ends with 1, or by a signal that it does not know.
        assert code in (1, -signal.SIGUSR1), shown
        return
    assert code == EXIT_CODE_SIGNAL, shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_signal_saves_what_its_code_promises(case: Case, tmp_path: Path) -> None:
    _check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in _chosen() if case not in QUICK], ids=str)
def test_a_signal_at_any_moment_saves_what_its_code_promises(case: Case, tmp_path: Path) -> None:
    _check(case, tmp_path)
