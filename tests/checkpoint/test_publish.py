"""Old checkpoints are removed while a save begins, in any order of the two."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint import publish
from megatron_ext.checkpoint.files import folder_of, published, replaced_folder_of
from megatron_ext.checkpoint.run_record import RUN_VARIABLE, own_checkpoints
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
