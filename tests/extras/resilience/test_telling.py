"""Faults of runs that are not started again are told, and end the run as they would untold."""

import dataclasses
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.device import Device
from megatron_ext.disk.events import read_events
from megatron_ext.extras.resilience.postmortem import REPORT
from megatron_ext.extras.resilience.process import MemoryKills
from megatron_ext.text.task import GPT
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.launch import launch
from megatron_ext.train.main import main
from tests.training_runs import SMALL, without

HANGS_IN, DIES_IN = 4, 6
SECONDS = 6.5
"""Length of a hang, which is more than the floor of 5 s."""


class Struck(Callback):
    """Lets rank 1 sleep in a forward pass, and die in one of a later step."""

    def on_train_start(self) -> None:
        if self.run.context.rank == 1:
            self.run.context.recorder.listeners.append(self._listen)

    def _listen(self, name: str, iteration: int, detail: Any) -> None:
        if name == "F" and detail != "end" and detail.microbatch == 0:
            if iteration == HANGS_IN:
                time.sleep(SECONDS)
            if iteration == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_hang_that_ends_by_itself_is_told_and_so_is_a_later_death(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = dataclasses.replace(GPT, callbacks=(Struck,))
    words = [*without(SMALL, "--train-iters", "--eval-iters"), "--eval-iters", "0"]
    words += ["--train-iters", "9", "--nproc-per-node", "2", "--save", str(tmp_path)]
    assert main(task, words) == 128 + signal.SIGKILL
    shown = [line for line in capfd.readouterr().err.splitlines() if "rank" in line.lower()]
    shown = [line for line in shown if "arning" not in line and "lost its connection" not in line]
    told, goes_on, death = shown
    assert told.startswith(
        "Rank 1 stopped first: it waits for no other rank, in step 4, phase forw"
    )
    assert told.endswith(f"`--distributed-timeout-minutes` (10) at most; post-mortem: "
                         f"{tmp_path / 'postmortem_1'}")  # fmt: skip
    assert "test_telling.py" in told and "in _listen" in told
    assert goes_on.startswith("[rank 1] goes on, after ")
    assert SECONDS <= float(goes_on.split()[-2]) < SECONDS + 3
    assert death == "[rank 1] was ended by SIGKILL"
    faults = [event for event in read_events(tmp_path) if event["kind"] == "fault"]
    assert [(f["rank"], f["cause"], f["iteration"], f["postmortem"]) for f in faults] == [
        (1, "hang", HANGS_IN, "postmortem_1"),
        (1, "SIGKILL", DIES_IN, "postmortem_2"),
    ]
    assert 5.0 < faults[0]["seen_after"] < SECONDS and faults[1]["seen_after"] < 0.2
    first, second = ((tmp_path / f"postmortem_{n}" / REPORT).read_text() for n in (1, 2))
    assert first.startswith("Rank 1 stopped first: it waits for no other rank, in step 4, ")
    assert "rank 0 waits for rank 1: all_reduce" in first
    assert second.startswith("Rank 1 stopped first: it was ended by SIGKILL, in step 6, ")


def _end(how: int | Exception | signal.Signals) -> int:
    """Let rank 1 end in some way while rank 0 would go on for a minute."""
    if os.environ["RANK"] == "0":
        time.sleep(60 if how else 0)
    if isinstance(how, Exception):
        raise how
    if isinstance(how, signal.Signals):
        os.kill(os.getpid(), how)
    return int(how)  # type: ignore[call-overload, no-any-return]


def launched(how: int | Exception | signal.Signals, save: Path | None) -> int:
    folder = None if save is None else str(save)
    return launch(partial(_end, how), nproc_per_node=2, device=Device("cpu", "gloo"), save=folder)


def test_what_is_no_fault_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for how in (0, 2):
        assert launched(how, tmp_path) == how
    assert not list(tmp_path.iterdir()) and capfd.readouterr().err == ""


def test_a_folder_gets_one_more_line_and_no_folder_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launched(signal.SIGKILL, None) == 137
    assert capfd.readouterr().err == "[rank 1] was ended by SIGKILL\n"
    assert launched(RuntimeError("out of luck"), tmp_path) == 1
    shown = capfd.readouterr().err
    assert shown.startswith("[rank 1] Traceback")
    assert shown.endswith(f"out of luck\n\npost-mortem: {tmp_path / 'postmortem_1'}\n")
    (fault,) = read_events(tmp_path)
    assert (fault["rank"], fault["cause"], fault["generation"]) == (1, "exception", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux counts its kills")
def test_a_kill_by_the_kernel_for_memory_is_told_as_that(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryKills, "happened", lambda self: True)
    assert launched(signal.SIGKILL, tmp_path) == 137
    told = "the kernel has killed rank 1 for want of memory; post-mortem: "
    assert capfd.readouterr().err.splitlines()[1].startswith(told)
    assert read_events(tmp_path)[0]["cause"] == "memory"
    report = (tmp_path / "postmortem_1" / REPORT).read_text()
    assert "was killed by the kernel for want of memory" in report
