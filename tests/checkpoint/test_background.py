"""Checkpoints that helper processes write are those that the ranks would write themselves."""

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_ext.checkpoint import background, helper, storage
from megatron_ext.checkpoint.background import BackgroundSaves, Helper
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.files import TRACKER, folder_of, published
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import choose
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.grid import Layout
from tests.checkpoint.tiny import Tiny, build, load, manager, newest_whole, one_of_two, save
from tests.ranks import ranks, run_on_ranks

STEPS, KILLS = 20, 20
MEGABYTE = 2**20


@contextlib.contextmanager
def background_manager(
    context: Any, root: Path, seconds: float = 60, **options: Any
) -> Iterator[tuple[CheckpointManager, BackgroundSaves]]:
    config = CheckpointConfig(save=str(root), load=str(root), async_save=True, **options)
    process = Helper()
    try:
        saves = BackgroundSaves(config, context, torch.device("cpu"), process, seconds=seconds)
        yield CheckpointManager(config, context, background=saves), saves
    finally:
        process.end()


def same_content(one: Path, other: Path) -> bool:
    """Return whether two checkpoints have the same files of tensors, state and counters."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    # The index names its folder, and the manifest has the index's checksum.
    own = [name for name in names if name not in (".metadata", "manifest.json", "common.pt")]
    assert sum(name.endswith(".distcp") for name in own) == 2
    commons = [torch.load(path / "common.pt", weights_only=False) for path in (one, other)]
    assert commons[0] == commons[1]
    index, theirs = (storage.MetadataReader(str(path)).read_metadata() for path in (one, other))
    assert index.state_dict_metadata == theirs.state_dict_metadata
    assert index.storage_data == theirs.storage_data
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in own)


@ranks(dp=2, timeout=120)
def test_files_are_those_of_a_save_that_waits(context: Any, tmp_path: Path) -> None:
    tiny = build(context, precision="bf16")
    waiting = manager(context, tmp_path / "waiting")
    with background_manager(context, tmp_path / "background") as (checkpoints, saves):
        for iteration in range(1, STEPS + 1):
            tiny.step()
            save(checkpoints, tiny, iteration, context)
            save(waiting, tiny, iteration, context)
            # The state changes while the files are written.
        saves.wait()
        assert saves.num_failed == 0 and not saves.last_has_failed
        outcomes = saves.ended()
        if context.rank == 0:
            assert [entry.iteration for entry in outcomes] == list(range(1, STEPS + 1))
            for iteration in range(1, STEPS + 1):
                folders = (folder_of(tmp_path / x, iteration) for x in ("waiting", "background"))
                assert same_content(*folders), iteration
    tiny.spoil()
    assert load(manager(context, tmp_path / "background"), tiny).iteration == STEPS


def memory_of(pids: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes of the copy that processes share, and the sum of what else they wrote to.

    Shares of pages (pss) would not do: they grow whenever another process that was forked from
    the same parent ends.
    """
    copies, rest = list[int](), 0
    for pid in pids:
        places = psutil.Process(pid).memory_maps()
        copies.append(sum(place.rss for place in places if "memfd:checkpoint" in place.path))
        rest += sum(place.anonymous for place in places if "memfd:checkpoint" not in place.path)
    return max(copies), rest


@ranks(dp=2, timeout=120)
def test_a_copy_of_the_rank_s_part_is_all_the_memory_it_takes(context: Any, tmp_path: Path) -> None:
    tiny = build(context, hidden=256, vocabulary=1024)
    tiny.step()
    with background_manager(context, tmp_path, keep_last=1) as (checkpoints, saves):
        pids = os.getpid(), saves._helper.pid
        rests, copies = [memory_of(pids)[1]], [0]
        for iteration in range(1, 4):
            save(checkpoints, tiny, iteration, context)
            while saves._running:
                copied, rest = memory_of(pids)
                copies.append(copied)
                rests.append(rest)
                saves.poll()
        saves.wait()
        torch.distributed.barrier()
        part = (folder_of(tmp_path, 3) / f"__{context.rank}_0.distcp").stat().st_size
        assert 20 * MEGABYTE < max(copies) < 1.05 * part
        assert max(rests) - rests[0] < 20 * MEGABYTE
        assert published(tmp_path) == [3]


def fails_once(flag: Path, error: OSError) -> Any:
    """Return an ``os.fsync`` that fails in the process which finds a file, and removes it."""
    sync = os.fsync

    def failing(descriptor: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            flag.unlink()
            raise error
        sync(descriptor)

    return failing


@ranks(dp=2, timeout=120)
def test_a_failed_save_is_known_to_all_ranks_and_the_next_one_succeeds(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, flag = build(context), tmp_path / f"fails{context.rank}"
    tiny.step()
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", fails_once(flag, error))
    with background_manager(context, tmp_path / "save") as (checkpoints, saves):
        for failing, iteration in ((1, 1), (0, 2), (None, 3)):
            if failing == context.rank:
                flag.touch()
            torch.distributed.barrier()
            save(checkpoints, tiny, iteration, context)
            saves.wait()
            assert saves.last_has_failed == (failing is not None)
        assert saves.num_failed == 2
        reasons = [entry.reason for entry in saves.ended()]
        if context.rank == 0:
            disk = f"the disk of {tmp_path}"
            assert f"rank 1 could not write its part: {disk}" in reasons[0]
            assert reasons[1].startswith(disk)
            assert reasons[2] == ""
            assert [path.name for path in sorted((tmp_path / "save").iterdir())] == [
                "iter_0000003", TRACKER
            ]  # fmt: skip


@pytest.mark.slow
@ranks(dp=2, timeout=120)
def test_a_helper_that_is_killed_or_hangs_is_replaced_and_its_save_is_not_lost(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, told = build(context), list[str]()
    tiny.step()
    with background_manager(context, tmp_path / "save") as (checkpoints, saves):
        monkeypatch.setattr(saves, "_say", told.append)
        for iteration, rank, number in ((1, 1, signal.SIGKILL), (2, 0, signal.SIGSTOP)):
            if context.rank == rank:
                os.kill(saves._helper.pid, number)
                saves._seconds = 0.5 if number == signal.SIGSTOP else 60
            save(checkpoints, tiny, iteration, context)
            while saves._running and saves._running[0].attempts == 1:
                saves.poll()
            saves._seconds = 60
            saves.wait()
        assert saves.num_failed == 0
        assert published(tmp_path / "save") == [1, 2]
    what = "The helper process that writes checkpoints was"
    fate = "silent for 0.5 seconds, and then ended by SIGKILL" if context.rank == 0 else ""
    assert told == [f"{what} {fate or 'ended by SIGKILL'}; another one takes over its work."]


@ranks(timeout=60)
def test_a_helper_that_was_killed_after_publication_completes_it(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build(context)
    tiny.step()
    save(manager(context, tmp_path), tiny, 1, context)
    save(manager(context, tmp_path), tiny, 2, context)
    (tmp_path / TRACKER).rename(tmp_path / f".{TRACKER}.tmp")
    config = CheckpointConfig(save=str(tmp_path), keep_last=1)
    job = helper.Job(1, 2, 0, 1, "none", str(tmp_path), 1.0, config)
    assert helper._do(job, None) == helper.PUBLISHED  # type: ignore[arg-type]
    assert (tmp_path / TRACKER).read_text() == "2" and published(tmp_path) == [1, 2]
    helper._tidy(job)
    assert published(tmp_path) == [2]


@ranks(timeout=60)
def test_a_published_checkpoint_never_fails_by_the_removal_of_old_ones(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, told = build(context), list[str]()

    def never(*_: Any) -> None:
        time.sleep(60)

    # The helper inherits it, and is ended for its silence; the others work.
    monkeypatch.setattr(helper.publish, "tidy", never)
    with background_manager(context, tmp_path / "save", keep_last=1) as (checkpoints, saves):
        monkeypatch.setattr(saves, "_say", told.append)
        monkeypatch.setattr(background, "ATTEMPTS", 1)
        save(checkpoints, tiny, 1, context)
        # On a busy machine the writing itself may take longer than the silence that is allowed.
        while published(tmp_path / "save") != [1]:
            saves.poll()
        saves._seconds = 0.2
        saves._running[0].job = dataclasses.replace(saves._running[0].job, seconds=0.2)
        while saves._running:
            saves.poll()
        (outcome,) = saves.ended()
        assert outcome.reason == "" and saves.num_failed == 0 and not saves.last_has_failed
    assert published(tmp_path / "save") == [1]
    assert told[0].endswith("it is replaced, but old checkpoints may be left.")


@ranks(timeout=60)
def test_a_full_disk_after_publication_is_told_as_such(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(helper.publish, "write_best", full)
    tiny = build(context)
    save(manager(context, tmp_path), tiny, 2, context)
    config = CheckpointConfig(save=str(tmp_path), keep_last=1)
    best = (BestCheckpoint(2, 1.0, True),)
    helper._tidy(helper.Job(1, 2, 0, 1, "none", str(tmp_path), 1.0, config, best))
    assert "The checkpoint of iteration 2 is saved, but" in caplog.text


@ranks(timeout=60)
def test_a_helper_that_was_killed_during_publication_publishes(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build(context)
    save(manager(context, tmp_path), tiny, 1, context)
    config = CheckpointConfig(save=str(tmp_path))
    job = helper.Job(1, 1, 0, 2, "none", str(tmp_path), 1.0, config)
    # The manifest is written, and only the result of rank 1 is left.
    os.rename(folder_of(tmp_path, 1), job.folder)
    (job.folder / "__1.result").touch()
    assert helper._do(job, None) == helper.PUBLISHED  # type: ignore[arg-type]
    assert newest_whole(tmp_path) == 1 and not [*folder_of(tmp_path, 1).glob("*.result")]
    # The manifest of another one is half written.
    os.rename(folder_of(tmp_path, 1), job.folder)
    os.truncate(job.folder / "manifest.json", 50)
    assert helper._listed(job.folder) is None
    assert not (job.folder / "manifest.json").exists()


@ranks(timeout=60)
def test_missing_results_end_the_wait_of_rank_0(context: Any, tmp_path: Path) -> None:
    tiny = build(context)
    with background_manager(context, tmp_path) as (checkpoints, saves):
        whole = saves._context
        saves._context = _with_ranks(whole, 2)
        saves._seconds = 0.3
        save(checkpoints, tiny, 1, context)
        saves._seconds = 60
        saves.wait()
        (outcome,) = saves.ended()
        assert outcome.reason.endswith("has nothing of rank 1 after 1 seconds")


def _with_ranks(context: Any, world_size: int) -> Any:
    class Larger:
        rank, pgs, layout = context.rank, context.pgs, Layout(world_size)

    return Larger


def train_for_ever(rank: int, root: Path, store: Path, start: int) -> None:
    """Save in the background at every step; leave the ids of the helpers in files."""
    context = one_of_two(rank, store)
    tiny: Tiny = build(context, layers=1)
    with background_manager(context, root, keep_last=2) as (checkpoints, saves):
        for iteration in range(start, start + 10_000):
            tiny.step()
            save(checkpoints, tiny, iteration, context)
            named = store.with_suffix(f".{rank}.new")
            named.write_text(str(saves._helper.pid))
            named.replace(store.with_suffix(f".{rank}"))


def check_loads(context: Any, root: Path, iteration: int) -> None:
    assert load(manager(context, root), build(context, layers=1)).iteration == iteration


@pytest.mark.slow
def test_kills_of_ranks_helpers_or_all_leave_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    root, generator = tmp_path / "save", random.Random(11)
    newest = 0
    for kill in range(KILLS):
        store, ranks_of = tmp_path / f"store{kill}", list[int]()
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    os.setpgid(0, ranks_of[0] if ranks_of else 0)
                    train_for_ever(rank, root, store, newest + 1)
                finally:
                    os._exit(1)
            os.setpgid(pid, ranks_of[0] if ranks_of else pid)
            ranks_of.append(pid)
        end = time.monotonic() + 30
        while time.monotonic() < end and (newest_whole(root) or 0) <= newest:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.4))
        kind = ("group", "rank", "helper")[kill % 3]
        before = newest_whole(root)
        if kind == "helper":
            victim = int(store.with_suffix(f".{generator.randrange(2)}").read_text())
            os.kill(victim, signal.SIGKILL)
            time.sleep(generator.uniform(0, 0.1))
        elif kind == "rank":
            os.kill(ranks_of[generator.randrange(2)], signal.SIGKILL)
            time.sleep(generator.uniform(0, 0.1))
        os.killpg(ranks_of[0], signal.SIGKILL)
        for pid in ranks_of:
            os.waitpid(pid, 0)
        chosen = choose(root, None)
        assert chosen is not None and before is not None and chosen >= before > newest
        assert chosen == newest_whole(root) == published(root)[-1]
        newest = chosen
    run_on_ranks(check_loads, Layout(1), {"root": root, "iteration": newest})


def test_flags_that_need_others_are_refused() -> None:
    def errors(**values: Any) -> list[str]:
        return list(CheckpointConfig(**values).errors(evaluates=True))

    assert errors(async_save=True) == ["`--async-save` needs `--save`; give a folder."]
    assert errors(save="x", async_save_buffer=2.0) == [
        "`--async-save-buffer` (2) needs `--async-save`; give both."
    ]
    assert not errors(save="x", async_save=True, async_save_buffer=2.0)


@ranks(timeout=60)
def test_a_larger_buffer_takes_a_second_copy_before_the_first_is_written(
    context: Any, tmp_path: Path
) -> None:
    tiny = build(context)
    for buffer, copies in ((None, 1), (1.0, 3)):
        root = tmp_path / str(buffer)
        with background_manager(context, root, async_save_buffer=buffer) as (checkpoints, saves):
            os.kill(saves._helper.pid, signal.SIGSTOP)
            for iteration in range(copies):
                save(checkpoints, tiny, iteration, context)
            assert len(saves._running) == copies
            os.kill(saves._helper.pid, signal.SIGCONT)
            save(checkpoints, tiny, copies, context)
            saves.wait()
            assert published(root) == list(range(copies + 1)) and not saves.num_failed


@ranks(timeout=60)
def test_a_save_that_cannot_begin_is_an_error_on_all_ranks(context: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with background_manager(context, tmp_path / "file") as (checkpoints, _):
        refused = r"iteration 1 could not be saved: `--save` \(.*/file\) cannot be written: "
        with pytest.raises(CheckpointError, match=refused):
            save(checkpoints, build(context), 1, context)
