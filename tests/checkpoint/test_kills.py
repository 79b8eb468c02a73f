"""Tests of kills and full disks while a run saves."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.files import TRACKER, published
from megatron_ext.checkpoint.stored import choose, newest_whole
from megatron_ext.device import select
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import init_groups, seed_everything
from megatron_ext.parallel.grid import Layout
from tests.checkpoint.tiny import build, load, manager, save
from tests.ranks import ranks, run_on_ranks

KILLS = 20


def save_for_ever(rank: int, root: Path, store: Path, start: int) -> None:
    """Save on one of two ranks without pause, until it is killed."""
    torch.set_num_threads(1)
    device = select()
    device.activate(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    context = init_groups(Layout(2), device, init_method=f"file://{store}")
    seed_everything(context, 1234)
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
