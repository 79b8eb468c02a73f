"""The supervisor of restarts tells what became of processes, and ends runs that cannot go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ext.extras.resilience.fault_supervisor import Fault, RestartSupervisor
from megatron_ext.extras.resilience.restarts import History
from megatron_ext.extras.resilience.watch import Limits
from megatron_ext.extras.resilience.watcher import Watcher
from megatron_ext.train.exit_codes import (
    EXIT_CODE_NO_ANSWER,
    FOLDER_VARIABLE,
    code_of_nodes,
    is_worth_a_start,
    meaning_of,
)
from megatron_ext.train.exit_codes import main as exit_code_main
from megatron_ext.train.supervisor import SignalForwarder
from tests.training_runs import ROOT

ENDLESS = """
import os, sys, time
from pathlib import Path
from megatron_ext.device import Device
from megatron_ext.train.launch import launch
from megatron_ext.config.run import RunConfig
from megatron_ext.extras.resilience.supervision import Resilience
def main():
    path = Path(sys.argv[1]) / str(os.getpid())
    path.write_text(os.environ["MEGATRON_EXT_HOST_FOLDER"])
    time.sleep(0.05)
    os.kill(os.getpid(), 9) if os.environ["RANK"] == "1" else time.sleep(60)
flags = {"fault_tolerance": {"max_restarts": 10_000}, "parallel": {"world_size": 2}}
supervision = Resilience(RunConfig.from_dict(flags, ()))
supervision.prepare(lambda size: supervision.config)
cpu = Device("cpu", "gloo")
sys.exit(launch(main, nproc_per_node=2, device=cpu, supervision=supervision))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_signal_in_the_middle_of_restarts_ends_the_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], cwd=ROOT) as process:
        end = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 8:
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        code = process.wait(timeout=20)
    assert code == (128 + number if number == signal.SIGTERM else -number)
    end = time.monotonic() + 10
    while any(psutil.pid_exists(int(path.name)) for path in tmp_path.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.05)
    if number == signal.SIGTERM:
        (folder,) = {text for path in tmp_path.iterdir() if (text := path.read_text())}
        assert not Path(folder).exists()


def test_ranks_that_run_are_asked_whether_one_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, asked = Watcher(tmp_path, 1), list[tuple[Any, ...]]()
    monkeypatch.setattr(watcher, "tell_slow_ranks", lambda *given: asked.append(given))
    process = subprocess.Popen(["sleep", "0.5"])
    with SignalForwarder() as forwarder:
        forwarder.children[process.pid] = 0
        supervisor = RestartSupervisor(
            forwarder, 1.0, watcher=watcher, save="save", generation=0, check_request=lambda: None
        )
        assert supervisor.wait() == 0
    assert asked[0] == ("save", {0: process.pid})
    process.wait()


@pytest.mark.parametrize("watched", [True, False])
def test_a_rank_that_a_signal_keeps_stopped_is_a_fault_wherever_it_stands(
    watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Watcher(tmp_path, 1, Limits(boundless=60.0)) if watched else None
    if watcher is not None:  # what a watcher cannot tell must not end the run
        monkeypatch.setattr(watcher, "investigate", lambda *_, **__: 1 / 0)
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    with SignalForwarder() as forwarder:
        forwarder.children[process.pid] = 3
        save, nothing = str(tmp_path), lambda: None
        supervisor = RestartSupervisor(
            forwarder, 0.01, watcher=watcher, save=save, generation=0, check_request=nothing
        )
        assert supervisor.wait() == EXIT_CODE_NO_ANSWER
    assert supervisor.fault is not None
    assert (supervisor.fault.rank, supervisor.fault.cause) == (3, "hang")
    process.wait()


def test_only_a_fault_at_one_step_repeats_and_others_begin_anew() -> None:
    history = History(9)

    def comes_back(cause: str, step: int | None) -> bool:
        history.add(Fault(0, cause, 0.0, step))
        return history.comes_back

    known: list[tuple[str, int | None]] = [("SIGKILL", 3), ("SIGKILL", 3), ("SIGKILL", 3)]
    assert [comes_back(*fault) for fault in known] == [False, False, True]
    others: list[Any] = [("SIGKILL", 3), ("hang", 3), ("SIGKILL", 3), ("SIGKILL", 3)]
    assert [comes_back(*fault) for fault in others] == [True, False, False, False]
    unknown: list[Any] = [("SIGKILL", None)] * 4
    assert not any(comes_back(*fault) for fault in unknown)


def test_exit_codes_say_whether_a_scheduler_should_start_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [code for code in (0, 1, 2, 122, 123, 124, 130, 137, 143) if is_worth_a_start(code)] == [
        1,
        123,
        124,
        137,
        143,
    ]
    assert meaning_of(137) == "a rank was ended by SIGKILL"
    assert (exit_code_main(["143"]), exit_code_main(["2"]), exit_code_main([])) == (0, 1, 2)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("has saved first; worth another start")
    assert shown[1].endswith("must be corrected first; not worth another start")


@pytest.mark.parametrize(
    ("code", "left", "of_job"),
    [
        (1, [], 1),
        (143, [123], 143),
        (1, [124, 120, 123], 120),
        (137, [124], 137),
        (123, [124, 137], 137),
        (123, [124, 120, 2], 2),
        (124, [122, 120], 122),
        (2, [120], 2),
    ],
)
def test_the_cause_among_the_codes_of_nodes_decides(
    code: int, left: list[int], of_job: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A final code comes first, and one that only follows from another node's end comes last."""
    for node, node_code in enumerate(left):
        (tmp_path / f"node{node}").write_text(f"{node_code}\n", encoding="utf-8")
    assert code_of_nodes(code, tmp_path) == of_job
    assert code_of_nodes(code, None) == code
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert exit_code_main([str(code)]) == int(not is_worth_a_start(of_job))
