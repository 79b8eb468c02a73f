"""Old checkpoints are removed while a save begins, in any order of the two."""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint import publish
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.files import (
    ANNOUNCEMENT,
    TRACKER,
    announced,
    folder_of,
    published,
    read_tracker,
    replaced_folder_of,
    standing_folder_of,
)
from megatron_ext.checkpoint.publish import BEST_TRACKER
from megatron_ext.checkpoint.run_record import (
    RECORD,
    RUN_VARIABLE,
    goes_on,
    own_checkpoints,
    run_id,
)
from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.output import CheckpointConfig

FILES = 6


def checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(FILES):
        (folder / f"part{number}").write_bytes(bytes(10))


def after_files(monkeypatch: pytest.MonkeyPatch, count: int, meanwhile: Callable[[], Any]) -> None:
    """Call ``meanwhile`` once, in the middle of a removal, before its file number ``count``."""
    unlink, seen = os.unlink, [0]

    def counting(*args: Any, **options: Any) -> None:
        seen[0] += 1
        if seen[0] == count:
            meanwhile()
        unlink(*args, **options)

    monkeypatch.setattr(os, "unlink", counting)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("count", [1, 2, FILES])
@pytest.mark.parametrize("begins_first", [True, False])
def test_a_save_that_begins_and_the_removal_of_old_ones_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, count: int, begins_first: bool
) -> None:
    for iteration in (2, 4, 6, 8):
        checkpoint(folder_of(tmp_path, iteration))
    # The removal that a killed run has left unfinished.
    checkpoint(tmp_path / "iter_0000001.removed")
    config = CheckpointConfig(keep_last=3)

    def begin() -> None:
        publish.prepare(tmp_path, 10, [8])

    def remove() -> None:
        publish.remove_old(tmp_path, 8, config, (), ())

    first, second = (begin, remove) if begins_first else (remove, begin)
    after_files(monkeypatch, count, second)
    first()
    assert caplog.text == "" and published(tmp_path) == [4, 6, 8]
    assert (tmp_path / "iter_0000010.tmp").is_dir()
    monkeypatch.undo()
    publish.prepare(tmp_path, 12, [10])
    assert [name for name in folders(tmp_path) if not name[-1].isdecimal()] == [
        "iter_0000010.tmp", "iter_0000012.tmp"
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, FILES])
def test_a_replaced_checkpoint_may_be_removed_by_two_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    checkpoint(folder_of(tmp_path, 2))
    checkpoint(replaced_folder_of(tmp_path, 2))
    after_files(monkeypatch, count, lambda: publish.prepare(tmp_path, 4, [2]))
    publish.complete(tmp_path, 2)
    assert folders(tmp_path) == ["iter_0000002", "iter_0000004.tmp"]


def test_what_cannot_be_removed_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "iter_0000002.tmp")

    def refuse(_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(PermissionError):
        publish.prepare(tmp_path, 4)


def test_a_restart_knows_its_own_checkpoints_also_those_saved_over_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "a")
    for iteration in (2, 4):
        checkpoint(folder_of(tmp_path, iteration))
    assert own_checkpoints(tmp_path, again=False) == []
    assert own_checkpoints(tmp_path, again=True) == []
    checkpoint(folder_of(tmp_path, 3))
    assert own_checkpoints(tmp_path, again=True) == [3]
    shutil.rmtree(folder_of(tmp_path, 2))
    checkpoint(folder_of(tmp_path, 2))
    os.utime(folder_of(tmp_path, 2), ns=(1, 1))
    assert own_checkpoints(tmp_path, again=True) == [3, 2]
    # Another run finds all of them there at its first start, also if it is told of a restart.
    monkeypatch.setenv(RUN_VARIABLE, "b")
    assert own_checkpoints(tmp_path, again=True) == []


def test_the_only_whole_checkpoint_of_an_iteration_is_kept(tmp_path: Path) -> None:
    """A kill between the two renames of a publication leaves the old one under ``.replaced``."""
    checkpoint(replaced_folder_of(tmp_path, 2))
    checkpoint(folder_of(tmp_path, 4))
    checkpoint(replaced_folder_of(tmp_path, 4))
    assert published(tmp_path) == [2, 4]
    assert standing_folder_of(tmp_path, 2) == replaced_folder_of(tmp_path, 2)
    assert standing_folder_of(tmp_path, 4) == folder_of(tmp_path, 4)
    assert standing_folder_of(tmp_path, 6) == folder_of(tmp_path, 6)
    publish.prepare(tmp_path, 6)
    assert folders(tmp_path) == ["iter_0000002.replaced", "iter_0000004", "iter_0000006.tmp"]


def test_only_older_checkpoints_are_removed_and_links_stay(tmp_path: Path) -> None:
    """A run that goes on from the middle leaves the checkpoints of later steps."""
    for iteration in (2, 4, 6, 8):
        checkpoint(folder_of(tmp_path, iteration))
    checkpoint(tmp_path / "elsewhere")
    folder_of(tmp_path, 1).symlink_to(tmp_path / "elsewhere")
    publish.remove_old(tmp_path, 6, CheckpointConfig(keep_last=1), {4}, ())
    assert published(tmp_path) == [1, 4, 6, 8]
    assert len(list(folder_of(tmp_path, 1).iterdir())) == FILES
    # A kill has left a part of an earlier checkpoint of this step.
    checkpoint(tmp_path / "iter_0000004.removed")
    publish.remove_old(tmp_path, 8, CheckpointConfig(save_retain_interval=3), (), {4})
    assert published(tmp_path) == [1, 6, 8]
    assert not (tmp_path / "iter_0000004.removed").exists()


def test_a_new_save_leaves_only_what_other_saves_are_writing(tmp_path: Path) -> None:
    for name in ("iter_0000003.tmp", "iter_0000005.tmp", "iter_0000002.removed"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000005.tmp" / "__0_0.distcp").touch()
    publish.prepare(tmp_path, 7, [5])
    assert folders(tmp_path) == ["iter_0000005.tmp", "iter_0000007.tmp"]
    assert (tmp_path / "iter_0000005.tmp" / "__0_0.distcp").exists()
    publish.prepare(tmp_path, 5)
    assert folders(tmp_path) == ["iter_0000005.tmp"]
    assert not any((tmp_path / "iter_0000005.tmp").iterdir())


def test_the_newest_announcement_is_that_of_a_folder_with_its_final_name(tmp_path: Path) -> None:
    announcement, tracker = tmp_path / ANNOUNCEMENT, tmp_path / TRACKER
    assert announced(tmp_path) is None
    announcement.write_text("4")
    tracker.write_text("2")
    assert announced(tmp_path) is None
    checkpoint(folder_of(tmp_path, 4))
    assert announced(tmp_path) == 4
    # A helper that completes the publication of another iteration leaves it.
    publish.complete(tmp_path, 2)
    assert tracker.read_text() == "2" and announcement.exists()
    publish.complete(tmp_path, 4)
    assert tracker.read_text() == "4" and not announcement.exists()
    publish.complete(tmp_path, 4)
    assert read_tracker(tmp_path) == 4


def test_what_is_renamed_is_on_the_disk_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss the tracker names a folder, and the folder has all its files."""
    done = list[str]()
    sync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(f"sync {path.relative_to(tmp_path)}")
        sync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append(f"rename {Path(target).name}")
        rename(source, target)

    def replaced(source: Path, target: Path) -> None:
        done.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    for first in (True, False):
        done.clear()
        checkpoint(publish.temporary_folder_of(tmp_path, 5))
        publish.publish(tmp_path, 5, {})
        kept = [step for step in done if not step.startswith("replace manifest.json")]
        # How a text file gets its content is the business of `disk.writing`.
        kept = [step for step in kept if step != f"replace {ANNOUNCEMENT}"]
        assert list(dict.fromkeys(kept)) == [
            "sync iter_0000005.tmp/manifest.json",
            "sync iter_0000005.tmp",
            f"sync {ANNOUNCEMENT}",
            *([] if first else ["rename iter_0000005.replaced"]),
            "rename iter_0000005",
            "sync .",
            f"replace {TRACKER}",
        ]
        assert kept[-1] == "sync ."
    assert folders(tmp_path) == ["iter_0000005", TRACKER]
    done.clear()
    publish.write_best(tmp_path, BestCheckpoint(5, 0.1, regular=True))
    named = [step for step in done if step.startswith("sync") or BEST_TRACKER in step]
    assert named[-2:] == [f"replace {BEST_TRACKER}", "sync ."] and "tmp" in named[0]


def test_the_best_checkpoint_is_named_with_its_exact_loss(tmp_path: Path) -> None:
    best = [BestCheckpoint(4, 0.1 + 0.2, regular=False), BestCheckpoint(2, 1.0, regular=True)]
    for iteration in (2, 4, 6):
        checkpoint(folder_of(tmp_path, iteration))
    publish.tidy(tmp_path, 6, CheckpointConfig(keep_last=1), best, ())
    assert (tmp_path / BEST_TRACKER).read_text() == "4 0.30000000000000004\n"
    assert published(tmp_path) == [2, 4, 6]
    publish.write_best(tmp_path, BestCheckpoint(8, 0.1, regular=False))
    assert (tmp_path / BEST_TRACKER).read_text() == "4 0.30000000000000004\n"


@pytest.mark.parametrize(
    ("retain", "keep", "superseded", "gone"),
    [
        (None, 2, set(), [2, 4, 6]),
        (None, 9, set(), []),
        (4, 2, set(), [2, 6]),
        (None, None, {4, 7, 10}, [4]),
        (3, None, set(), [8]),
        (3, None, {2, 6}, [2, 8]),
    ],
)
def test_what_goes_by_two_rules_at_once(
    retain: int | None, keep: int | None, superseded: set[int], gone: list[int]
) -> None:
    found = publish.expired([2, 4, 6, 8], retain=retain, keep=keep, superseded=superseded)
    assert found == gone


def test_a_lock_is_let_go_and_names_its_present_holder_alone(tmp_path: Path) -> None:
    """Locks of one process do not exclude each other, so another process looks."""
    context: Any = SimpleNamespace(rank=0)

    def taken_elsewhere() -> bool:
        pid = os.fork()
        if pid == 0:
            try:
                descriptor = os.open(tmp_path / publish.LOCK, os.O_RDWR)
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1

    (tmp_path / publish.LOCK).write_text("process 123456789 on a machine with a very long name\n")
    publish.check_save_folder(str(tmp_path))
    assert not taken_elsewhere()
    held = publish._lock(tmp_path)
    assert held is not None and taken_elsewhere()
    text = (tmp_path / publish.LOCK).read_text()
    assert text == f"process {os.getpid()} on {socket.gethostname()}\n"
    os.close(held)
    publish.check_save_folder(None)

    def once(work: Callable[[], Any], _what: str) -> Any:
        return work()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "on_first_rank", once)
        with publish.hold_save_folder(str(tmp_path), context):
            assert taken_elsewhere()
        assert not taken_elsewhere()


def test_a_run_that_is_just_dying_is_waited_for(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            publish._lock(tmp_path)
            os.write(writing, b"x")
            time.sleep(0.3)
        finally:
            os._exit(0)
    os.read(reading, 1)
    held = publish._lock(tmp_path)
    assert held is not None
    os.close(held)
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)


def test_the_launchers_name_of_a_run_comes_before_torchruns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elastic = FaultToleranceConfig(elastic_min_nodes=1)
    plain = FaultToleranceConfig()
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert run_id() == "none"
    assert not goes_on(elastic, 0) and not goes_on(plain, 0) and goes_on(plain, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchruns")
    assert run_id() == "torchruns" and goes_on(elastic, 0) and not goes_on(plain, 0)
    monkeypatch.setenv(RUN_VARIABLE, "launchers")
    assert run_id() == "launchers"


def test_a_record_of_another_form_counts_all_checkpoints_as_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "a")
    checkpoint(folder_of(tmp_path, 2))
    (tmp_path / RECORD).write_text('{"run": "a", "checkpoints": [1, 2]}')
    assert own_checkpoints(tmp_path, again=True) == [2]
