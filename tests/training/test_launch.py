"""Ranks that fail, hang or are killed end all the others, with their reason shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.device import Device
from megatron_ext.errors import ConfigError
from megatron_ext.training.launch import fork_ranks, launch, run_rank

CPU = Device("cpu", "gloo")


def _rank() -> int:
    return int(os.environ["RANK"])


def test_all_ranks_run_with_their_environment(tmp_path: Path) -> None:
    def main() -> int:
        assert os.environ["WORLD_SIZE"] == "3"
        (tmp_path / os.environ["RANK"]).touch()
        return 0

    assert launch(main, nproc_per_node=3, device=CPU) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_users_error_is_a_sentence_and_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        if _rank() == 1:
            raise ConfigError("`--flag` (1) must be 2; use 2.")
        time.sleep(60)
        return 0

    start = time.monotonic()
    assert fork_ranks(main, 3) == 2
    assert time.monotonic() - start < 10
    assert capfd.readouterr().err == "[rank 1] `--flag` (1) must be 2; use 2.\n"


def test_a_crash_shows_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        if _rank() == 0:
            raise RuntimeError("out of luck")
        time.sleep(60)
        return 0

    assert fork_ranks(main, 2) == 1
    shown = capfd.readouterr().err
    assert "[rank 0] Traceback" in shown
    assert "out of luck" in shown


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


def test_a_killed_rank_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        if _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return 0

    assert fork_ranks(main, 2) == 128 + signal.SIGKILL
    assert "[rank 1] was ended by SIGKILL" in capfd.readouterr().err


def test_under_torchrun_main_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    here = os.getpid()
    seen: list[int] = []
    assert launch(lambda: seen.append(os.getpid()), nproc_per_node=4, device=CPU) == 0
    assert seen == [here]


def test_exit_codes_of_a_rank() -> None:
    assert run_rank(lambda: None) == 0
    assert run_rank(lambda: 5) == 5
    assert run_rank(lambda: sys.exit(0)) == 0


SCRIPT = """
import os, sys, time
from megatron_ext.device import Device
from megatron_ext.training.launch import fork_ranks
def main():
    open(sys.argv[1] + "/" + str(os.getpid()), "w").close()
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
sys.exit(fork_ranks(main, 2))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_no_orphans(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)])
    end = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.3)
    process.send_signal(number)
    process.wait(timeout=20)
    for path in tmp_path.iterdir():
        _wait_until_gone(int(path.name))


def _wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"rank {pid} outlived its launcher")
