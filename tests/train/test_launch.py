"""Ranks that fail, hang or are killed end all the others, with their reason shown."""

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_ext.device import Device
from megatron_ext.errors import (
    EXIT_CODE_INTERRUPTED,
    ConfigError,
    MachineFault,
    MegatronExtError,
    loader_ends_with_parent,
)
from megatron_ext.parallel.context import init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.train import forking
from megatron_ext.train import launch as module
from megatron_ext.train.exit_codes import (
    EXIT_CODE_LOST_CONTACT,
    EXIT_CODE_NO_ANSWER,
    EXIT_CODE_NO_MEMORY,
)
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.forking import _forked, fork_ranks
from megatron_ext.train.launch import SCHEDULED, check_launcher, launch, launch_of, refuse
from megatron_ext.train.rank import run_rank
from megatron_ext.train.schedulers import notes_on_nodes
from megatron_ext.train.supervision import Supervision
from megatron_ext.train.supervisor import SignalForwarder

CPU = Device("cpu", "gloo")


def _rank() -> int:
    return int(os.environ["RANK"])


def _only(rank: int, act: Callable[[], object]) -> Callable[[], object]:
    """Return a program in which one rank acts, and all wait for a minute unless that ends it."""

    def main() -> object:
        if _rank() == rank and (found := act()) is not None:
            return found
        time.sleep(60)
        return 0

    return main


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _fail(error: BaseException) -> Any:
    raise error


def test_all_ranks_run_with_their_environment(tmp_path: Path) -> None:
    def main() -> int:
        assert os.environ["WORLD_SIZE"] == "3"
        (tmp_path / os.environ["RANK"]).touch()
        return 0

    assert launch(main, nproc_per_node=3, device=CPU) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_users_error_is_one_sentence_and_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    error = ConfigError("`--flag` (1) must be 2; use 2.")
    for rank, main in ((1, _only(1, lambda: _fail(error))), (0, lambda: _fail(error))):
        start = time.monotonic()
        assert fork_ranks(main, 3) == 2
        assert time.monotonic() - start < 10
        assert capfd.readouterr().err == f"[rank {rank}] `--flag` (1) must be 2; use 2.\n"


def test_rank_0_tells_an_error_of_the_flags_and_torchruns_summary_repeats_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / str(_rank()))
        return refuse(ConfigError(["one", "two"]))

    assert fork_ranks(main, 2) == 2
    assert capfd.readouterr().err == "error: one\nerror: two\n"
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "0"))
    assert "  traceback : error: one\n  error: two" in str(ChildFailedError("main", {0: failure}))
    assert not (tmp_path / "1").exists()


def test_a_rank_that_alone_finds_an_error_of_the_flags_tells_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_ext.train.launch.SECONDS_FOR_RANK_0", 0.2)
    assert fork_ranks(_only(1, lambda: refuse(ConfigError("one"))), 2) == 2
    assert capfd.readouterr().err == "[rank 1] error: one\n"


def test_a_crash_shows_its_traceback_and_a_kill_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert fork_ranks(_only(0, lambda: _fail(RuntimeError("out of luck"))), 2) == 1
    shown = capfd.readouterr().err
    assert "[rank 0] Traceback" in shown and "out of luck" in shown
    assert fork_ranks(_only(1, _signal(signal.SIGKILL)), 2) == 128 + signal.SIGKILL
    assert "[rank 1] was ended by SIGKILL" in capfd.readouterr().err


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    def main() -> int:
        if _rank() == 0:
            return 7
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        return 0

    start = time.monotonic()
    assert fork_ranks(main, 2) == 7
    assert time.monotonic() - start < 15


def test_a_stopped_rank_is_named_within_the_time_given(capfd: pytest.CaptureFixture[str]) -> None:
    main = _only(1, _signal(signal.SIGSTOP))
    start = time.monotonic()
    assert fork_ranks(main, 2, timeout_minutes=1 / 60) == EXIT_CODE_NO_ANSWER
    assert time.monotonic() - start < 15
    shown = capfd.readouterr().err
    assert shown.startswith("[rank 1] has been stopped by a signal (such as SIGSTOP) for longer")
    assert shown.count("\n") == 1


def test_a_rank_that_goes_on_in_time_is_left_alone() -> None:
    def main() -> int:
        if _rank() == 1:
            time.sleep(1.5)
            return 0
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    def wake() -> None:
        time.sleep(1)
        for child in psutil.Process().children():
            child.send_signal(signal.SIGCONT)

    waker = threading.Thread(target=wake)
    waker.start()
    assert fork_ranks(main, 2, timeout_minutes=1) == 0
    waker.join()


def test_a_rank_that_does_not_answer_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Every group of a run gives up after the time that the flag gives, not after a minute."""

    def main() -> int:
        context = init_groups(Layout(3), CPU, timeout_minutes=1 / 12)
        if _rank() == 1:
            time.sleep(60)
        torch.distributed.all_reduce(torch.ones(1), group=context.pgs.dp_cp)
        return 0

    start = time.monotonic()
    assert fork_ranks(main, 3, timeout_minutes=1 / 12) == EXIT_CODE_NO_ANSWER
    assert time.monotonic() - start < 30
    shown = capfd.readouterr().err
    assert "[rank 1] does not answer: others have waited for it for `--distributed-time" in shown
    assert "Traceback" not in shown
    assert "[rank 2] does not" not in shown


def test_the_exit_code_is_that_of_the_rank_that_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The others lose their connection, which is said in a sentence."""

    def main() -> int:
        init_groups(Layout(2), CPU, timeout_minutes=1)
        if _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(1))
        return 0

    assert fork_ranks(main, 2) == 128 + signal.SIGKILL
    shown = capfd.readouterr().err
    assert "[rank 1] was ended by SIGKILL" in shown
    assert "Traceback" not in shown


def test_under_torchrun_main_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    here = os.getpid()
    seen: list[int] = []
    assert launch(lambda: seen.append(os.getpid()), nproc_per_node=4, device=CPU) == 0
    assert seen == [here]


def test_one_rank_in_this_process_leaves_its_environment() -> None:
    def main() -> int:
        assert (_rank(), os.environ["WORLD_SIZE"]) == (0, "1")
        return 3

    before = dict(os.environ)
    assert launch(main, nproc_per_node=1, device=CPU) == 3
    assert dict(os.environ) == before


def test_groups_that_cannot_be_built_leave_none() -> None:
    def main() -> int:
        CPU.activate(0)
        with pytest.raises(ConfigError, match="The layout needs 2 ranks, but 1 were started"):
            init_groups(Layout(2), CPU)
        return int(torch.distributed.is_initialized())

    assert fork_ranks(main, 1) == 0


def _allocate() -> None:
    torch.empty(1 << 60)


def _allocate_and_fail_at_the_end() -> None:
    try:
        _allocate()
    finally:
        raise ImportError("a library cannot be mapped either")


def test_exit_codes_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_rank(lambda: None) == 0
    assert run_rank(lambda: 5) == 5
    assert run_rank(lambda: sys.exit(0)) == 0
    # More than any machine has, for which torch raises a plain RuntimeError.
    assert run_rank(_allocate) == EXIT_CODE_NO_MEMORY
    assert "Memory ran out. A smaller `--micro-batch-size` takes less" in capsys.readouterr().err
    assert run_rank(_allocate_and_fail_at_the_end) == EXIT_CODE_NO_MEMORY


SCRIPT = """
import os, sys, time
from megatron_ext.device import Device
from megatron_ext.errors import loader_ends_with_parent
from megatron_ext.parallel.context import init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.exit_codes import EXIT_CODE_NO_MEMORY
from megatron_ext.train.forking import fork_ranks
def main():
    init_groups(Layout(2), Device("cpu", "gloo"))
    open(sys.argv[1] + "/" + str(os.getpid()), "w").close()
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
sys.exit(fork_ranks(main, 2))
"""


def test_other_children_of_the_process_are_left_to_who_started_them() -> None:
    def main() -> int:
        time.sleep(0.5)
        return 5 if _rank() == 1 else 0

    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as foreign:
        time.sleep(0.3)
        assert fork_ranks(main, 2) == 5
        assert foreign.wait() == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_no_orphans(number: signal.Signals, tmp_path: Path) -> None:
    ranks, temporary = tmp_path / "ranks", tmp_path / "temporary"
    ranks.mkdir()
    temporary.mkdir()
    words = [sys.executable, "-c", SCRIPT, str(ranks)]
    process = subprocess.Popen(words, env={**os.environ, "TMPDIR": str(temporary)})
    end = time.monotonic() + 60
    while len(list(ranks.iterdir())) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(0.3)
    process.send_signal(number)
    process.wait(timeout=20)
    for path in ranks.iterdir():
        _wait_until_gone(int(path.name))
    assert list(temporary.iterdir()) == []


def _wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"rank {pid} outlived its launcher")


def test_a_killed_rank_leaves_no_loader_of_data(tmp_path: Path) -> None:
    """torch's own would live on for up to five seconds, and then tell of it in a traceback."""

    def main() -> int:
        if _rank() == 1:
            start = loader_ends_with_parent()
            if os.fork() == 0:
                start(0)
                (tmp_path / str(os.getpid())).touch()
                time.sleep(60)
            while not list(tmp_path.iterdir()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return 0

    assert fork_ranks(main, 2) == 128 + signal.SIGKILL
    (loader,) = tmp_path.iterdir()
    _wait_until_gone(int(loader.name))


def test_empty_variables_of_a_launcher_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.setenv("RANK", " ")
    check_launcher()
    assert "WORLD_SIZE" not in os.environ and "RANK" not in os.environ
    # Some launchers leave spaces around their numbers.
    monkeypatch.setenv("WORLD_SIZE", " 4\n")
    check_launcher()
    assert int(os.environ["WORLD_SIZE"]) == 4


def test_a_variable_of_a_launcher_that_is_no_number_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"variable `WORLD_SIZE` \(two\) must be a number"):
        check_launcher()
    # The error is printed at once, as by a process that no launcher has started.
    assert "WORLD_SIZE" not in os.environ and "RANK" not in os.environ


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PET_NNODES", "1", ""),
        ("SLURM_STEP_NUM_TASKS", "", ""),
        ("SLURM_STEP_NUM_TASKS", "8", "This process belongs to 8 tasks of one `srun` (`SLURM_STEP"),
        (
            "SKYPILOT_NUM_NODES",
            "2",
            "This process belongs to a SkyPilot task of 2 nodes (`SKYPILOT",
        ),
    ],
)
def test_one_of_several_processes_of_a_scheduler_says_that_it_trains_by_itself(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in SCHEDULED:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    assert [note.startswith(told) for note in notes_on_nodes()] == [True] * bool(told)


def test_a_node_of_torchrun_without_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2:8")
    with pytest.raises(
        ConfigError, match=r"`PET_NNODES` \(2:8\) says that this process belongs to"
    ):
        notes_on_nodes()


def test_when_a_launch_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts the start of a process in ticks, a hundredth of a second long."""
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    process = psutil.Process()
    program = launch_of(["--lr", "1"])
    assert program.started == pytest.approx(process.create_time(), abs=1.1)
    assert program.ends_itself
    # Called by another program, with flags of its own, it begins now.
    called = launch_of(["--lr", "2"])
    assert called.started == pytest.approx(time.time(), abs=0.5)
    monkeypatch.setenv("RANK", "0")
    assert not launch_of(["--lr", "1"]).ends_itself
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(module, "_start_of", lambda pid: float(pid))
    monkeypatch.setattr(module, "is_under_torchrun", lambda: True)
    of_agent = launch_of(["--lr", "1"])
    assert (of_agent.started, of_agent.ends_itself) == (os.getppid(), False)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MachineFault("The disk is gone."), 1, "The disk is gone."),
        (ConfigError("Wrong."), 2, "Wrong."),
        (OSError(errno.ENFILE, "Too many open files in system"), 1, "This machine has as many"),
        (RuntimeError("gloo/transport Connection closed"), EXIT_CODE_LOST_CONTACT, "lost its"),
        (RuntimeError("gloo/transport Timed out"), EXIT_CODE_NO_ANSWER, "waited in vain"),
        (SystemExit(3), 1, "Traceback"),
    ],
)
def test_the_message_and_the_code_of_a_rank_that_fails(
    error: BaseException,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    monkeypatch.setattr("megatron_ext.train.rank._SECONDS_FOR_RANK_0_OF_A_RUN", 0.2)
    monkeypatch.setenv("RANK", "3")
    start = time.monotonic()
    assert run_rank(lambda: _fail(error)) == code
    # Rank 0 goes first with an error that all ranks may raise.
    assert (time.monotonic() - start >= 0.2) == isinstance(error, MegatronExtError)
    assert capsys.readouterr().err.startswith(f"[rank 3] {said}")
    message = json.loads((tmp_path / "error").read_text())["message"]["message"]
    assert message.startswith(f"[rank 3] {said}")


def test_an_interruption_of_a_rank_is_told_to_torchrun_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    assert run_rank(lambda: _fail(KeyboardInterrupt())) == EXIT_CODE_INTERRUPTED
    assert capsys.readouterr().err == ""
    assert "interrupted" in (tmp_path / "error").read_text()


def test_a_launch_tells_its_code_once() -> None:
    told: list[int] = []
    assert launch(lambda: 3, nproc_per_node=1, device=CPU, tell=told.append) == 3
    assert launch(lambda: 4, nproc_per_node=2, device=CPU, tell=told.append) == 4
    assert launch(lambda: None, nproc_per_node=1, device=CPU, tell=told.append) == 0
    assert told == [3, 4, 0]


def test_the_only_rank_leaves_what_was_set_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    monkeypatch.delenv("RANK", raising=False)
    seen: list[str] = []

    def main() -> None:
        seen.extend(os.environ[name] for name in ("RANK", "LOCAL_WORLD_SIZE"))

    assert launch(main, nproc_per_node=1, device=CPU) == 0
    assert seen == ["0", "1"]
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "5")
    assert "RANK" not in os.environ


def test_one_rank_that_may_be_restarted_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Restarts(Supervision):
        max_restarts = 2

        def run(self, fork: Any, main_of: Any, *, timeout_minutes: float, exit_signal: Any) -> int:
            asked.append(timeout_minutes)
            return 9

    options: Any = {"nproc_per_node": 1, "device": CPU, "timeout_minutes": 4}
    assert launch(lambda: 3, supervision=Restarts(), **options) == 9
    assert asked == [4]


@pytest.mark.parametrize("exit_signal", [None, signal.SIGUSR1])
def test_ranks_on_gpus_are_started_by_torchrun(
    exit_signal: signal.Signals | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(
        "megatron_ext.train.torchrun.run_torchrun", lambda words: started.append(words) or 6
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    supervision = Supervision()
    supervision.max_restarts = 0
    watched = ExitSignal(exit_signal)
    options: Any = {"nproc_per_node": 4, "device": Device("cuda", "nccl"), "timeout_minutes": 2.5}
    options |= {"exit_signal": watched, "supervision": supervision}
    assert launch(lambda: 3, **options) == 6
    saves = ["--shutdown-timeout=150"] if exit_signal else []
    assert started == [
        ["--standalone", "--nproc-per-node=4", "--max-restarts=0", *saves, "train.py", "--lr", "1"]
    ]
    # A signal that has come already leaves nothing to start.
    watched.came = True
    assert launch(lambda: 3, **options) == 125
    assert len(started) == 1


@pytest.mark.parametrize("given", [None, "3"])
def test_forked_ranks_share_the_cores(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    before = torch.get_num_threads()

    def main() -> int:
        (tmp_path / str(_rank())).write_text(str(torch.get_num_threads()))
        return 0

    assert fork_ranks(main, 2) == 0
    threads = "3" if given is None else str(before)
    assert [path.read_text() for path in tmp_path.iterdir()] == [threads] * 2


def test_what_a_rank_shares_is_frozen_there_alone() -> None:
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        assert fork_ranks(lambda: int(gc.get_freeze_count() == 0), 1) == 0
        assert gc.get_freeze_count() == 0
    finally:
        if frozen:
            gc.freeze()


def test_the_environment_of_a_restart_comes_before_that_of_its_ranks(tmp_path: Path) -> None:
    def main() -> int:
        (tmp_path / str(_rank())).write_text(os.environ["LOCAL_WORLD_SIZE"])
        return 0

    forwarder = SignalForwarder()
    with _forked(main, 2, forwarder, {"LOCAL_WORLD_SIZE": "8"}):
        for pid in forwarder.children:
            os.waitpid(pid, 0)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["8"] * 2


@pytest.mark.parametrize(
    ("number", "code"), [(None, 7), (signal.SIGINT, EXIT_CODE_INTERRUPTED), (signal.SIGHUP, 129)]
)
def test_a_launch_that_is_asked_to_end_has_the_code_of_that_signal(
    number: signal.Signals | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def supervisor(
        world_size: int, forwarder: SignalForwarder, minutes: float, save: str | None
    ) -> Any:
        given.append((world_size, minutes, save))

        def wait() -> int:
            forwarder.stop_signal = number
            return 7

        return SimpleNamespace(wait=wait)

    supervision: Any = Supervision()
    supervision.supervisor = supervisor
    monkeypatch.setattr(forking, "_forked", lambda *_: nullcontext())
    how: Any = {"timeout_minutes": 3.0, "save": "here", "supervision": supervision}
    assert fork_ranks(lambda: 0, 2, **how) == code
    assert given == [(2, 3.0, "here")]
