"""A signal to any process of a run, at any moment, loses nothing that the exit code promises."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch.distributed.run

from megatron_ext.checkpoint.files import folder_of, read_tracker
from megatron_ext.checkpoint.manifest import read_manifest
from megatron_ext.errors import EXIT_CODE_INTERRUPTED, EXIT_CODE_NOT_SAVED, run_program
from megatron_ext.train.exit_codes import EXIT_CODE_SIGNAL
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.torchrun import run_torchrun
from tests.train.nodes import SECONDS, until
from tests.train.signalled import MOMENTS, REACHED, slowed
from tests.training_runs import ROOT, SMALL, training_rows, without

PROGRAM = str(ROOT / "tests" / "train" / "signalled.py")
LAUNCHERS: dict[str, Callable[[list[str]], "int | None"]] = {
    "own": lambda words: slowed(words[0], Path(words[1]))(words[2:]),
    "torchrun": torch.distributed.run.main,
    "our torchrun": run_torchrun,
}
FLAGS = [
    *without(SMALL, "--num-workers", "--train-iters", "--eval-interval", "--eval-iters"),
    *"--train-iters 3000 --eval-iters 0".split(),
]


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
    """A run in a session of its own, which is killed when this context ends.

    Its launcher, or the agent that starts its ranks, is forked, as the imports take longer than all
    else that it does.
    """

    def __init__(
        self, case: Case, folder: Path, *flags: str, saves: bool = True, restarts: int = 0
    ) -> None:
        self.case, self.folder, self.save = case, folder, folder / "save"
        size = f"--nproc-per-node={case.ranks}"
        self._words = [case.moment, str(folder), *FLAGS, *MOMENTS[case.moment].split(), *flags]
        self._words += ["--num-workers", str(case.workers)]
        self._words += ["--save", str(self.save)] if saves else []
        if case.launcher == "own":
            self._words.append(size)
        else:
            self._words = [
                "--standalone",
                size,
                "--monitor-interval=0.1",
                f"--max-restarts={restarts}",
                PROGRAM,
                *self._words,
            ]
        sys.stdout.flush()
        sys.stderr.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run()

    def _run(self) -> NoReturn:
        code = 1
        try:
            os.setsid()
            os.chdir(ROOT)
            os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = open(1, "w", buffering=1, closefd=False)
            sys.stderr = open(2, "w", buffering=1, closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            program = LAUNCHERS[self.case.launcher]
            sys.argv = ["program", *self._words]
            run_program(program)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()

    def poll(self) -> int | None:
        """Return the status of the launcher if it has ended, negative after a signal."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def alive(self) -> list[int]:
        """Return the processes of the run that still run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                # torchrun puts each rank in a session of its own, and names the folder to it.
                of_run = os.getsid(process.pid) == self.pid or str(self.folder) in process.cmdline()
                if of_run and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def sessions(self) -> list[int]:
        """Return the processes with a session of their own, which are torchrun's ranks."""
        found = []
        for pid in set(self.alive()) - {self.pid}:
            with suppress(ProcessLookupError):
                found += [pid] if os.getsid(pid) == pid else []
        return found

    def send(self, number: int) -> None:
        """Send the signal to the target of the case, as often as it says."""
        for _ in range(self.case.times):
            if self.case.target == "group":
                os.killpg(self.pid, number)
            elif self.case.target == "launcher":
                os.kill(self.pid, number)
            else:
                last = self.folder / f"rank_{self.case.ranks - 1}"
                os.kill(int(last.read_text()), number)
            time.sleep(0.05)

    def reach(self) -> None:
        """Wait for the moment of the case, and for all ranks."""
        started = [self.folder / f"rank_{rank}" for rank in range(self.case.ranks)]
        paths = [self.folder / REACHED, *started]

        def reached() -> bool:
            assert self.poll() is None, self.log()
            return all(path.exists() for path in paths)

        until(reached)

    def end(self) -> int:
        """Wait for the end of all processes, and return the exit code."""
        until(lambda: self.poll() is not None)
        until(lambda: not self.alive())
        assert self._code is not None
        return self._code

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def check_saved(self) -> None:
        """Check that the last step of the run is on disk, in a whole checkpoint."""
        steps = [
            row["iteration"] for row in training_rows(read_metrics(self.save / "metrics.jsonl"))
        ]
        assert read_tracker(self.save) == steps[-1] < 3000, self.log()
        manifest = read_manifest(folder_of(self.save, steps[-1]))
        assert manifest is not None and len(manifest) > 2


_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
_SHARES = {
    ("own", 1): 12,
    ("own", 2): 16,
    ("own", 4): 10,
    ("torchrun", 1): 4,
    ("torchrun", 2): 3,
    ("torchrun", 4): 1,
    ("our torchrun", 1): 5,
    ("our torchrun", 2): 4,
    ("our torchrun", 4): 2,
}
"""Number of cases by launcher and ranks; under torchrun each rank imports everything anew."""


def _chosen() -> list[Case]:
    """Return a sample of all combinations, which is always the same."""
    cases = []
    for (launcher, ranks), number in _SHARES.items():
        targets = ("launcher", "group", "rank")
        sizes = itertools.product((0, 2), MOMENTS, targets, _SIGNALS, (1, 2))
        every = [Case(launcher, ranks, *rest) for rest in sizes]
        cases += random.Random(f"{launcher} {ranks}").sample(every, number)
    return [
        *cases,
        Case("our torchrun", 2, 2, "training", "group", "SIGTERM"),
        Case("our torchrun", 1, 2, "asynchronous save", "launcher", "SIGUSR1"),
        Case("torchrun", 2, 2, "training", "launcher", "SIGTERM"),
    ]


CHOSEN = _chosen()
QUICK = [case for case in CHOSEN if case.launcher == "own" and case.ranks < 4][::5]


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
@pytest.mark.parametrize("case", [case for case in CHOSEN if case not in QUICK], ids=str)
def test_a_signal_at_any_moment_saves_what_its_code_promises(case: Case, tmp_path: Path) -> None:
    _check(case, tmp_path)


def test_a_scheduler_learns_that_a_run_could_not_save(tmp_path: Path) -> None:
    """The shell's code after SIGTERM is that of runs that have saved."""
    case = Case("own", 1, 2, "training", "launcher", "SIGTERM")
    for number, ranks in enumerate((1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        one = replace(case, ranks=ranks)
        with Started(one, folder, "--exit-signal-handler", "--exit-signal", "SIGUSR1") as run:
            run.reach()
            run.send(signal.SIGTERM)
            assert run.end() == EXIT_CODE_NOT_SAVED, run.log()
        said = f"ended by SIGTERM: nothing has been saved in `--save` ({run.save}); give "
        assert f"{said}`--exit-signal-handler`, and SIGTERM saves" in run.log()
    (tmp_path / "none").mkdir()
    with Started(case, tmp_path / "none", "--exit-signal-handler", saves=False) as run:
        run.reach()
        run.send(signal.SIGTERM)
        assert run.end() == EXIT_CODE_NOT_SAVED, run.log()
    assert "ended by SIGTERM: nothing has been saved, as `--save` is not given; give" in run.log()


@pytest.mark.parametrize(
    ("launcher", "ranks", "moment"),
    [("own", 1, "asynchronous save"), ("own", 2, "save"), ("our torchrun", 2, "data")],
)
def test_two_interruptions_tell_what_is_lost_and_how_to_keep_it(
    launcher: str, ranks: int, moment: str, tmp_path: Path
) -> None:
    case = Case(launcher, ranks, 2, moment, "group", "SIGINT", times=2)
    with Started(case, tmp_path) as run:
        run.reach()
        run.send(signal.SIGINT)
        assert run.end() == EXIT_CODE_INTERRUPTED, run.log()
    shown = run.log()
    assert "Traceback" not in shown
    newest, lost = read_tracker(run.save), f"nothing has been saved in `--save` ({run.save})"
    if newest is not None:
        where = f"the newest checkpoint in `--save` ({run.save}) is of iteration {newest}"
        lost = f"{where}, and later steps are lost"
    said = f"interrupted: {lost}; give `--exit-signal-handler --exit-signal SIGINT`, and Ctrl-C "
    assert shown.count(f"{said}saves a checkpoint before the run ends.") == 1, shown


def test_the_code_without_a_handler_is_the_shells(tmp_path: Path) -> None:
    with Started(Case("own", 2, 2, "training", "launcher", "SIGTERM"), tmp_path) as run:
        run.reach()
        run.send(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM, run.log()
    assert f"ended by SIGTERM: nothing has been saved in `--save` ({run.save}); " in run.log()


def test_a_killed_rank_takes_its_workers_along(tmp_path: Path) -> None:
    with Started(Case("own", 1, 2, "training", "rank", "SIGKILL"), tmp_path) as run:
        run.reach()
        assert len(run.alive()) == 3
        run.send(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL, run.log()


def test_restarts_follow_faults_and_not_the_exit_signal(tmp_path: Path) -> None:
    case = Case("own", 2, 2, "training", "rank", "SIGTERM")
    flags = "--max-restarts 3 --exit-signal-handler".split()
    with Started(case, tmp_path, *flags) as run:
        run.reach()
        run.send(signal.SIGKILL)
        until(lambda: "restart 1 of 3" in run.log())
        # While no rank runs, or one has just been forked.
        os.kill(run.pid, signal.SIGTERM)
        assert run.end() == EXIT_CODE_SIGNAL, run.log()
        run.check_saved()
    assert "restart 2" not in run.log()


@pytest.mark.slow
def test_a_rank_whose_agent_dies_during_the_imports_does_not_run_alone(tmp_path: Path) -> None:
    case = Case("torchrun", 1, 0, "training", "launcher", "SIGKILL")
    with Started(case, tmp_path, "--exit-signal-handler") as run:
        # torchrun and the libraries that it imports start other programs meanwhile.
        until(lambda: any(_catches(rank, signal.SIGTERM) for rank in run.sessions()))
        assert "starting 1 ranks" not in run.log()
        run.send(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        until(lambda: not run.alive())
    assert "] iteration" not in run.log()


@pytest.mark.slow
def test_torchrun_does_not_start_ranks_again_that_have_saved(tmp_path: Path) -> None:
    case = Case("our torchrun", 2, 2, "training", "rank", "SIGUSR1")
    flags = "--exit-signal-handler --exit-signal SIGUSR1".split()
    with Started(case, tmp_path, *flags, restarts=3) as run:
        run.reach()
        run.send(signal.SIGUSR1)
        assert run.end() == EXIT_CODE_SIGNAL, run.log()
        run.check_saved()


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def test_a_program_says_during_its_imports_that_it_has_not_saved() -> None:
    words = [sys.executable, "pretrain_gpt.py", "--exit-signal-handler"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    until(lambda: _catches(process.pid, signal.SIGTERM))
    process.terminate()
    _, said = process.communicate(timeout=SECONDS)
    assert (process.returncode, said) == (
        EXIT_CODE_NOT_SAVED,
        "ended by SIGTERM before the first step\n",
    )
