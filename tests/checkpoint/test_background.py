"""Checkpoints that helper processes write are those that the ranks would write themselves."""

import contextlib
import dataclasses
import os
import pickle
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from megatron_ext.checkpoint import background, helper, storage, writing
from megatron_ext.checkpoint.background import BackgroundSaves, Helper
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.files import TRACKER, folder_of, published
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.prepared import PreparedSave, RankPlan
from megatron_ext.checkpoint.snapshot import SnapshotFile
from megatron_ext.checkpoint.stored import choose
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.grid import Layout
from tests.checkpoint.tiny import Tiny, build, load, manager, newest_whole, one_of_two, save
from tests.ranks import ranks, run_on_ranks

STEPS, KILLS = 8, 20
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


class Clock:
    """A clock that a test sets, in place of a module's `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000, "it waits for ever"


class Scripted:
    """A helper without a process, whose messages a test writes; None stands for its death."""

    def __init__(self) -> None:
        self.sent = list[int]()
        self.messages: list[helper.Report] | None = []
        self.restarts = 0

    def send(self, job: helper.Job) -> None:
        self.sent.append(job.number)

    def reports(self) -> list[helper.Report] | None:
        found, self.messages = self.messages, []
        return found

    def restart(self) -> str:
        self.restarts += 1
        return "SIGKILL"


class Scene:
    """Saves of one of two ranks, with a scripted helper and a clock."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.clock, self.helper, self.told = Clock(), Scripted(), list[str]()
        monkeypatch.setattr(background, "time", self.clock)
        context: Any = SimpleNamespace(rank=rank, pgs=SimpleNamespace(dp_cp=None), layout=Layout(2))
        config = CheckpointConfig(save=str(root), async_save=True)
        worker: Any = self.helper
        self.saves = BackgroundSaves(config, context, torch.device("cpu"), worker, seconds=10)
        monkeypatch.setattr(self.saves, "_say", self.told.append)

    def submit(self, *iterations: int) -> None:
        for iteration in iterations:
            slot = SnapshotFile(Path(f"slot{iteration}"))
            self.saves._submit(iteration, slot, (), ())

    def at(self, now: float, *stages: tuple[int, str], dies: bool = False) -> None:
        """Poll at a time, when the helper has reached stages of jobs or has died."""
        self.clock.now = now
        self.helper.messages = None if dies else [helper.Report(*stage) for stage in stages]
        self.saves.poll()


WHAT = "The helper process that writes checkpoints was ended by SIGKILL"


def test_each_new_helper_gets_all_jobs_and_the_third_death_ends_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.submit(5, 6)
    assert scene.helper.sent == [1, 2]
    for death in range(3):
        scene.at(death, dies=True)
    assert scene.helper.restarts == 3 and scene.helper.sent == [1, 2, 1, 2, 1, 2, 2]
    takes_over = f"{WHAT}; another one takes over its work."
    given_up = f"{WHAT}; it is replaced, but its checkpoint is given up."
    assert scene.told == [takes_over, takes_over, given_up]
    (outcome,) = scene.saves.ended()
    assert (outcome.iteration, outcome.seconds) == (5, 2.0)
    assert outcome.reason == f"{WHAT}, as 2 before it"
    assert scene.saves.num_failed == 1 and scene.saves.last_has_failed
    # The other job has tries of its own, and counts from now on.
    scene.at(11.5)
    assert scene.helper.restarts == 3
    for death in (11.6, 11.7):
        scene.at(death, dies=True)
    assert [entry.job.iteration for entry in scene.saves._running] == [6]
    scene.at(12, (2, helper.WRITTEN), (2, helper.PUBLISHED))
    scene.at(12.5, dies=True)
    (outcome,) = scene.saves.ended()
    assert (outcome.iteration, outcome.seconds, outcome.reason) == (6, 12.5, "")
    assert scene.saves.num_failed == 1 and not scene.saves.last_has_failed
    assert scene.told[-1] == f"{WHAT}; it is replaced, but old checkpoints may be left."


def test_other_ranks_tell_rank_0_why_they_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, rank=1)
    scene.submit(5)
    folder = scene.saves._running[0].job.folder
    folder.mkdir()
    for death in range(3):
        scene.at(death, dies=True)
    assert not scene.saves._running and scene.saves.ended() == []
    job = dataclasses.replace(helper.Job(1, 5, 0, 2, "", str(tmp_path), 1.0, CheckpointConfig()))
    assert job.folder == folder
    (folder / "__0.result").touch()
    with pytest.raises(CheckpointError, match=f"rank 1 could not write its part: {WHAT}$"):
        helper._results(job)


def test_only_silence_without_a_written_byte_ends_a_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.submit(5, 6)
    folder = scene.saves._running[0].job.folder
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(bytes(8))
    scene.at(10)
    scene.at(11)  # It has written since the start.
    scene.at(21)
    assert scene.helper.restarts == 0
    scene.at(21.5)
    assert scene.helper.restarts == 1
    assert scene.told[0].startswith(
        f"{WHAT[:-16]}silent for 10 seconds, and then ended by SIGKILL;"
    )
    # Rank 0 waits for the others, as long as their helpers may be replaced.
    scene.at(25, (1, helper.WRITTEN))
    scene.at(25 + 10 + 30)
    assert scene.helper.restarts == 1
    scene.at(25 + 10 + 30.5)
    assert scene.helper.restarts == 2
    assert "silent for 40 seconds" in scene.told[1]
    # The time of the next job begins when the one before has ended.
    scene.at(100, (1, helper.TIDIED))
    scene.at(110)
    assert scene.helper.restarts == 2
    scene.at(110.5)
    assert scene.helper.restarts == 3


def test_a_new_save_has_not_failed_yet_and_strange_messages_count_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.submit(5)
    scene.at(3, (7, helper.FAILED), (1, helper.FAILED, "the disk is full"))
    assert scene.saves.last_has_failed and scene.saves.num_failed == 1
    assert [entry.reason for entry in scene.saves.ended()] == ["the disk is full"]
    assert scene.saves.ended() == []
    scene.submit(6)
    assert not scene.saves.last_has_failed
    with monkeypatch.context() as patch:
        patch.setattr(scene.saves, "_worst", lambda own: own)
        scene.saves.last_has_failed = True  # An earlier of two saves at once has failed.
        assert scene.saves.look_at_newest() == (True, False)
        scene.saves.last_has_failed = False
    scene.at(4, (2, helper.WRITTEN), (2, helper.PUBLISHED))
    assert scene.saves._running
    scene.at(5, (2, helper.TIDIED))
    assert not scene.saves._running and not scene.saves.last_has_failed


def test_other_ranks_are_done_when_their_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, rank=1)
    scene.submit(5)
    scene.at(1, (1, helper.WRITTEN))
    assert not scene.saves._running and len(scene.saves._free) == 1


@pytest.mark.parametrize(
    ("buffer", "num_bytes", "slots"),
    [(None, 10, 1), (1.0, 2**29, 2), (1.0, 2**29 + 1, 1), (0.5, 2**30, 1), (2.0, 2**30, 2)],
)
def test_the_buffer_holds_as_many_copies_as_fit(
    buffer: float | None, num_bytes: int, slots: int, tmp_path: Path, monkeypatch: Any
) -> None:
    saves = Scene(tmp_path, monkeypatch).saves
    saves._config = dataclasses.replace(saves._config, async_save_buffer=buffer)
    taken = [saves._free_slot(num_bytes) for _ in range(slots)]
    assert None not in taken and saves._free_slot(num_bytes) is None
    saves._free.append(taken[0])  # type: ignore[arg-type]
    assert saves._free_slot(num_bytes) is taken[0]


def test_a_copy_that_fails_gives_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Scene(tmp_path, monkeypatch).saves

    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("there is no room")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotFile, "write", full)
        prepared = PreparedSave(RankPlan(SavePlan([]), None), [torch.ones(3)], {})
        assert saves._copy(1, prepared, b"") == (None, "there is no room")
    slot, fault = saves._copy(1, prepared, b"")
    assert slot is not None and fault == ""


def test_a_copy_is_made_anew_in_the_same_memory_if_another_rank_needs_a_new_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Scene(tmp_path, monkeypatch, rank=1).saves
    old, new = (
        PreparedSave(RankPlan(SavePlan([]), None), [torch.full((3,), value)], {})
        for value in (1.0, 2.0)
    )
    own, agreed = list[int](), [background.UNKNOWN, background.KNOWN]

    def worst(verdict: int) -> int:
        own.append(verdict)
        return agreed.pop(0)

    plans = SimpleNamespace(prepare_alike=lambda _: old, prepare=lambda _: new)
    monkeypatch.setattr(saves, "_preparer", plans)
    monkeypatch.setattr(saves, "_worst", worst)
    saves.begin(5, dict, {}, {}, (), ())
    assert own == [background.KNOWN, background.KNOWN]
    (running,) = saves._running
    assert saves._num_slots == 1 and saves._free == []
    snapshot = SnapshotFile(Path(running.job.snapshot)).read()
    assert snapshot is not None and torch.equal(snapshot.state()[1][0], new.values[0])


def test_the_size_of_a_prepared_save_is_in_bytes() -> None:
    values = [torch.ones(3), torch.ones(5, dtype=torch.bfloat16), b"object"]
    assert PreparedSave(RankPlan(SavePlan([]), None), values, {}).num_bytes == 3 * 4 + 5 * 2


def test_a_helper_that_ends_by_itself_names_its_exit_code() -> None:
    process = Helper()
    process.connection.close()  # An idle helper ends when its rank closes the connection.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.end() == "exit code 0"
    process = Helper()
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGKILL)
    assert process.end() == "SIGKILL"


def test_the_death_of_a_helper_is_seen_after_its_last_message() -> None:
    process = Helper()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.reports() is None
    process.end()


@ranks(dp=2, timeout=120)
def test_a_save_that_cannot_begin_on_one_rank_leaves_memory_for_the_next(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build(context, layers=1)
    tiny.step()

    def refuse(*_: Any) -> None:
        raise OSError(13, "Permission denied")

    with background_manager(context, tmp_path) as (checkpoints, saves):
        save(checkpoints, tiny, 1, context)
        saves.wait()
        with monkeypatch.context() as patch:
            patch.setattr(background.publish, "prepare", refuse)
            for _ in range(2):
                with pytest.raises(CheckpointError, match="Permission denied"):
                    save(checkpoints, tiny, 2, context)
        # Saving one iteration again waits for the first save of it.
        for _ in range(2):
            save(checkpoints, tiny, 2, context)
        saves.wait()
        assert saves.look_at_newest() == (False, False) and saves.num_failed == 0
        torch.distributed.barrier()
        assert published(tmp_path) == [1, 2]
        # Only rank 0 knows how the newest save has ended, and tells the others.
        saves.last_has_failed = context.rank == 1
        assert saves.look_at_newest() == (False, False)
        saves.last_has_failed = context.rank == 0
        assert saves.look_at_newest() == (False, True)


def test_results_are_those_of_the_ranks_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = helper.Job(1, 5, 0, 12, "", str(tmp_path), 1.0, CheckpointConfig())
    job.folder.mkdir()
    for rank in range(12):
        (job.folder / f"__{rank}.result").write_bytes(pickle.dumps((rank, {})))
    assert [written for written, _ in helper._results(job)] == list(range(12))
    (job.folder / "__4.result").rename(tmp_path / "kept")
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(helper, "time", clock)
        with pytest.raises(CheckpointError, match="has nothing of rank 4 after 10 seconds"):
            helper._results(dataclasses.replace(job, seconds=10))
    assert 20 < clock.now < 21  # The time begins anew as long as files grow.
    (tmp_path / "kept").rename(job.folder / "__4.result")
    (job.folder / "__11.failed").touch()
    (job.folder / "__11.result").unlink()
    with pytest.raises(CheckpointError, match="rank 11 could not write .*: it could not even say"):
        helper._results(job)


def test_results_of_ranks_are_no_part_of_the_published_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = helper.Job(1, 5, 0, 12, "", str(tmp_path), 1.0, CheckpointConfig())
    job.folder.mkdir()
    for name in ("__0.result", "__1.result", "__11.result", "__0_0.distcp", "common.pt"):
        (job.folder / name).touch()
    published_with = list[list[str]]()
    monkeypatch.setattr(
        helper.publish,
        "publish",
        lambda *_: published_with.append(sorted(path.name for path in job.folder.iterdir())),
    )
    helper._publish(job, {})
    assert published_with == [["__0_0.distcp", "common.pt"]]


def test_a_failure_is_told_on_a_full_disk_and_rank_0_removes_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = helper.Job(1, 5, 1, 2, "", str(tmp_path), 1.0, CheckpointConfig())
    helper._give_up(job, "why")  # The folder of a checkpoint that rank 0 has given up.
    assert not job.folder.exists()
    job.folder.mkdir()
    helper._give_up(job, "why")
    assert (job.folder / "__1.failed").read_text() == "why"

    def replace(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    helper.tell_failure(job.folder, 2, "why")
    monkeypatch.undo()
    assert (job.folder / "__2.failed").read_text() == ""
    helper._give_up(dataclasses.replace(job, rank=0), "why")
    assert not job.folder.exists()


def test_a_checkpoint_that_is_written_again_is_not_published_yet(tmp_path: Path) -> None:
    job = helper.Job(1, 5, 0, 2, "", str(tmp_path), 1.0, CheckpointConfig())
    assert not helper.is_published(job)
    folder_of(tmp_path, 5).mkdir()
    assert helper.is_published(job)
    job.folder.mkdir()
    assert not helper.is_published(job)


def test_a_helper_waits_for_the_folder_that_rank_0_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that machines share shows a new folder a little later."""
    job = helper.Job(1, 5, 1, 2, "", str(tmp_path), 1.0, CheckpointConfig())
    clock, written = Clock(), list[Any]()

    def write_shards(folder: Path, plan: Any, values: Any, **_: Any) -> Any:
        assert folder.is_dir()
        written.append(plan)
        return "record", {}

    monkeypatch.setattr(helper, "time", clock)
    monkeypatch.setattr(writing, "write_shards", write_shards)
    plan: Any = SimpleNamespace(items=[])
    with pytest.raises(CheckpointError, match=r"iter_0000005.tmp has disappeared"):
        helper._write_shards(job, plan, [])
    assert 5 < clock.now < 5.1 and not written

    def appear(seconds: float) -> None:
        clock.now += seconds
        job.folder.mkdir(exist_ok=True)

    monkeypatch.setattr(clock, "sleep", appear)
    helper._write_shards(job, plan, [])
    helper._write_shards(job, plan, [])  # What an earlier helper has written stays.
    assert len(written) == 1
    result = pickle.loads((job.folder / "__1.result").read_bytes())
    assert result == ("record", {}) and [*job.folder.glob("*.part")] == []


def test_empty_tensors_are_written_as_they_are() -> None:
    empty = torch.empty(0, 3, dtype=torch.bfloat16)
    found = writing.compact(empty)
    assert (found.shape, found.dtype) == (empty.shape, empty.dtype)
    part = torch.arange(10.0)[2:5]
    assert torch.equal(writing.compact(part), part)
    assert writing.compact(part).untyped_storage().nbytes() == 12


def test_a_job_for_a_dead_helper_is_no_error() -> None:
    process = Helper()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    job = helper.Job(1, 5, 0, 1, "", "", 1.0, CheckpointConfig())
    for _ in range(2):
        process.send(job)
    assert process.reports() is None
    assert process.end() == "SIGKILL"
    assert process.end() == "an unknown cause"
