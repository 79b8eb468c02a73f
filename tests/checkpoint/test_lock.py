"""Two runs do not write to one folder; a killed one does not keep the next from starting."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.lock import LOCK, _lock, hold_save_folder
from megatron_ext.errors import CheckpointError
from megatron_ext.text.task import GPT
from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.train.reporting.start import STARTED
from tests.ranks import ranks
from tests.training_runs import TINY, mock_data


def _holder(folder: Path) -> tuple[int, int]:
    """Start a process that holds the lock, and another that it has forked, as data loaders are."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _lock(folder)
            loader = os.fork()
            if loader:
                os.write(writing, f"{loader}\n".encode())
            time.sleep(60)
        finally:
            os._exit(1)
    loader = int(os.read(reading, 100))
    os.close(reading), os.close(writing)
    return pid, loader


def test_a_folder_is_free_as_soon_as_its_run_is_killed(tmp_path: Path) -> None:
    """Check it although a process that the run forked lives on."""
    pid, loader = _holder(tmp_path)
    with pytest.raises(CheckpointError, match=rf"being written by process {pid} on \S+; wait for"):
        _lock(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    started = time.monotonic()
    held = _lock(tmp_path)
    assert held is not None
    assert time.monotonic() - started < 1
    os.close(held)
    os.kill(loader, signal.SIGKILL)


def test_a_second_run_is_refused_before_any_rank_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid, loader = _holder(tmp_path)
    flags = [*TINY, *mock_data(), "--nproc-per-node", "2", "--train-iters", "1"]
    assert main(GPT, [*flags, "--save", str(tmp_path)]) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr()
    assert f"error: `--save` ({tmp_path}) is being written by process {pid} on " in shown.err
    assert STARTED not in shown.out
    os.kill(pid, signal.SIGKILL)
    os.kill(loader, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert main(GPT, [*flags, "--save", str(tmp_path)]) == 0


@ranks(dp=2)
def test_every_rank_learns_of_another_run(context: Any, tmp_path: Path) -> None:
    pid = loader = 0
    if context.rank == 1:
        pid, loader = _holder(tmp_path)
    torch.distributed.barrier()
    refused = pytest.raises(CheckpointError, match=r"`--save` \(.*\) is being written by process")
    with refused, hold_save_folder(str(tmp_path), context):
        pass
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.kill(loader, signal.SIGKILL)
        os.waitpid(pid, 0)
    torch.distributed.barrier()
    for _ in range(2):
        with hold_save_folder(str(tmp_path), context):
            assert (tmp_path / LOCK).is_file()
    torch.distributed.barrier()
    refused = pytest.raises(CheckpointError, match=r"`--save` \(.*/x\) cannot be written \(Not")
    with refused, hold_save_folder(str(tmp_path / LOCK / "x"), context):
        pass
