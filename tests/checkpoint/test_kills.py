"""Kills and full disks while a run saves, and two runs that save to one folder."""

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint import publish
from megatron_ext.checkpoint.files import TRACKER, published
from megatron_ext.checkpoint.publish import LOCK, _lock, hold_save_folder
from megatron_ext.checkpoint.stored import choose
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.task import GPT
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.train.reporting.start import STARTED
from tests.checkpoint.tiny import build, load, manager, newest_whole, one_of_two, save
from tests.ranks import ranks, run_on_ranks
from tests.training_runs import TINY, mock_data

KILLS = 20


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for the lock of another run, which here lives on, or has died already."""
    monkeypatch.setattr(publish, "_SECONDS_FOR_A_DYING_RUN", 0.3)


def save_for_ever(rank: int, root: Path, store: Path, start: int) -> None:
    context = one_of_two(rank, store)
    tiny = build(context, layers=1)
    tiny.step()
    checkpoints = manager(context, root, keep_last=2)
    for iteration in range(start, start + 10_000):
        save(checkpoints, tiny, iteration, context)


def check_loads(context: Any, root: Path, iteration: int) -> None:
    assert load(manager(context, root), build(context, layers=1)).iteration == iteration


def test_kills_while_saving_leave_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    root, generator = tmp_path / "save", random.Random(7)
    newest = 0
    for kill in range(KILLS):
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    save_for_ever(rank, root, tmp_path / f"store{kill}", newest + 1)
                finally:
                    os._exit(1)
            children.append(pid)
        end = time.monotonic() + 30
        while time.monotonic() < end and (newest_whole(root) or 0) <= newest:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.4))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        chosen = choose(root, None)
        assert chosen is not None and chosen > newest
        assert chosen == newest_whole(root) == published(root)[-1]
        newest = chosen
    run_on_ranks(check_loads, Layout(1), {"root": root, "iteration": newest})


@ranks(dp=2, timeout=40)
def test_a_full_disk_ends_every_rank_with_a_sentence(context: Any, tmp_path: Path) -> None:
    tiny = build(context)
    tiny.step()
    checkpoints = manager(context, tmp_path)
    save(checkpoints, tiny, 1, context)
    if context.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        save(checkpoints, tiny, 2, context)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert time.monotonic() - started < 10
    assert "The checkpoint of iteration 2 could not be saved" in str(caught.value)
    assert "by rank 1" in str(caught.value)
    if context.rank == 0:
        assert not (tmp_path / "iter_0000002.tmp").exists()
    assert (tmp_path / TRACKER).read_text() == "1"
    assert load(checkpoints, tiny).iteration == 1


@ranks(dp=2, timeout=40)
def test_a_folder_that_cannot_be_made_is_refused(context: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match=r"`--save` \(.*/file/x\) cannot be written"):
        save(manager(context, tmp_path / "file" / "x"), build(context), 1, context)


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
    pid, loader = _holder(tmp_path)
    with pytest.raises(CheckpointError, match=rf"being written by process {pid} on \S+; wait for"):
        _lock(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    started = time.monotonic()
    held = _lock(tmp_path)
    assert time.monotonic() - started < 1
    os.close(held)
    os.kill(loader, signal.SIGKILL)


def test_a_second_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
