"""Publishes a checkpoint under its final name and removes old ones; only rank 0 does this.

The tracker is a file that names the iteration of the newest checkpoint.

A lock lets only one run at a time write to a folder of checkpoints. It is a POSIX lock, because
shared file systems support it and the kernel frees it however rank 0 ends. Unlike a lock of flock
or filelock, it is not inherited by processes that rank 0 forks, such as data loaders.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_ext import limits
from megatron_ext.checkpoint import files
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.files import folder_of, published
from megatron_ext.checkpoint.manifest import write_manifest
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.disk.writing import lock_path, open_descriptor, remove
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import on_first_rank
from megatron_ext.parallel.context import ParallelContext

logger = logging.getLogger(__name__)

BEST_TRACKER = "best_checkpointed_iteration.txt"
LOCK = ".lock"
_SECONDS_FOR_A_DYING_RUN = 2.0


def prepare(root: Path, iteration: int, in_flight: Collection[int] = ()) -> None:
    """Make an empty temporary folder for a checkpoint; remove partial ones that killed runs left.

    The folders of the iterations ``in_flight`` stay, since they are being written now.
    """
    root.mkdir(parents=True, exist_ok=True)
    kept = [temporary_folder_of(root, other) for other in in_flight]
    for left in root.glob(f"iter_*{files.TEMPORARY_SUFFIX}"):
        if left not in kept:
            remove(left)
    for expired_folder in root.glob(f"iter_*{files.REMOVED_SUFFIX}"):
        remove(expired_folder)
    for older in published(root):
        replaced = files.replaced_folder_of(root, older)
        if folder_of(root, older).is_dir():
            remove(replaced)
    temporary_folder_of(root, iteration).mkdir()


def temporary_folder_of(root: Path, iteration: int) -> Path:
    """Return the folder where the checkpoint of an iteration is written before it is published."""
    final = folder_of(root, iteration)
    return final.with_name(final.name + files.TEMPORARY_SUFFIX)


def publish(root: Path, iteration: int, listed: files.Files) -> None:
    """Give a written checkpoint its final name, so that loaders see it.

    The manifest is written first, then the folder is renamed, and the tracker is updated last. So
    if the run is killed at any moment, each folder with a final name is complete, and so is the
    checkpoint that the tracker names. An announcement file, written before the rename, lets a
    loader find a complete checkpoint that the tracker does not name yet.

    Args:
        listed: the files of the checkpoint, for the manifest; see `write_manifest`.
    """
    temporary = temporary_folder_of(root, iteration)
    final = folder_of(root, iteration)
    write_manifest(temporary, listed)
    files.sync_folder(temporary)
    files.write_durably(root / files.ANNOUNCEMENT, str(iteration))
    replaced = files.replaced_folder_of(root, iteration)
    # This also removes a link; its target stays.
    if os.path.lexists(final):
        # Until the new folder has its final name, loaders fall back to this one.
        os.rename(final, replaced)
    os.rename(temporary, final)
    files.sync_folder(root)
    complete(root, iteration)


def complete(root: Path, iteration: int) -> None:
    """Finish `publish` after the folder has got its final name; safe to repeat.

    Update the tracker, and remove an older checkpoint of the same iteration, if there was one.
    """
    if files.announced(root) == iteration:
        os.replace(root / files.ANNOUNCEMENT, root / files.TRACKER)
        files.sync_folder(root)
    replaced = files.replaced_folder_of(root, iteration)
    remove(replaced)


def tidy(
    root: Path,
    newest: int,
    config: CheckpointConfig,
    best: Sequence[BestCheckpoint],
    superseded: Collection[int],
) -> None:
    """Write the file that names the best checkpoint, and remove the checkpoints not to be kept.

    Args:
        newest: the iteration just published.
        config: holds the flags that say which checkpoints to keep.
        best: the checkpoints of ``--keep-best``, the best one first; they are kept.
        superseded: iterations of checkpoints that are no longer among the best.
    """
    if best:
        write_best(root, best[0])
    remove_old(root, newest, config, {entry.iteration for entry in best}, superseded)


def expired(
    older: list[int],
    *,
    retain: int | None,
    keep: int | None,
    best: Collection[int] = (),
    superseded: Collection[int] = (),
) -> list[int]:
    """Return the iterations of the checkpoints to remove after a new one, in ascending order.

    Args:
        older: iterations of all checkpoints except the new one, in ascending order.
        retain: ``--save-retain-interval``. A checkpoint whose iteration is a multiple of it is
            never removed; otherwise the one just before the new one is. None has no effect.
        keep: ``--keep-last``: this many newest ones stay, the new one included; None keeps all.
        best: iterations of the checkpoints of ``--keep-best``. They stay and do not count towards
            ``keep``.
        superseded: iterations to remove, since they are no longer among the best.
    """
    gone = set(superseded) & set(older)
    if retain is not None:
        gone |= set(older[-1:])
    if keep is not None:
        counted = [i for i in older if i not in best]
        gone |= set(counted[: max(0, len(counted) - (keep - 1))])
    return sorted(i for i in gone - set(best) if retain is None or i % retain)


def remove_old(
    root: Path,
    newest: int,
    config: CheckpointConfig,
    best: Collection[int],
    superseded: Collection[int],
) -> None:
    """Remove the checkpoints that `expired` returns, except symbolic links; log a failure."""
    older = [iteration for iteration in published(root) if iteration < newest]
    retain = config.save_retain_interval
    keep = config.keep_last
    for iteration in expired(older, retain=retain, keep=keep, best=best, superseded=superseded):
        folder = folder_of(root, iteration)
        if folder.is_symlink():
            continue
        # This must not look like a name of a save: the next save would take it for a half-written
        # one.
        aside = folder.with_name(folder.name + files.REMOVED_SUFFIX)
        try:
            # Renamed first, so that a kill during the removal leaves no partial checkpoint.
            remove(aside)
            os.rename(folder, aside)
            remove(aside)
        except OSError as error:
            logger.warning("The old checkpoint %s could not be removed: %s.", folder, error)


def write_best(root: Path, best: BestCheckpoint) -> None:
    """Write a checkpoint's iteration and loss to the file `BEST_TRACKER`.

    Write nothing if the folder of that checkpoint does not exist.
    """
    path = root / BEST_TRACKER
    if not folder_of(root, best.iteration).is_dir():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    files.write_durably(temporary, f"{best.iteration} {best.loss!r}\n")
    os.replace(temporary, path)
    files.sync_folder(root)


@contextmanager
def hold_save_folder(save: str | None, context: ParallelContext) -> Iterator[None]:
    """Keep other runs from writing to ``--save`` in this context; all ranks call this together.

    Other runs may still load. If another run is writing there, every rank raises a CheckpointError.
    """
    if save is None:
        yield
        return
    lock = on_first_rank(lambda: _lock(Path(save)), f"`--save` ({save}) is not locked")
    try:
        yield
    finally:
        if context.rank == 0 and lock is not None:
            os.close(lock)


def check_save_folder(save: str | None) -> None:
    """Raise a CheckpointError if ``--save`` is in use by another run, or not writable.

    This needs no process group.
    """
    lock = None if save is None else _lock(Path(save))
    if lock is not None:
        os.close(lock)


def _lock(save: Path) -> int | None:
    """Lock the folder; return the lock file's descriptor, None if its file system has no locks.

    Closing the descriptor releases the lock.
    Raise a CheckpointError if another run holds the lock, or if the folder is not writable.
    """
    try:
        save.mkdir(parents=True, exist_ok=True)
        descriptor = open_descriptor(lock_path(save / LOCK), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError.about(
            "--save",
            save,
            f"cannot be written ({limits.cause(error, save)})",
            "give a folder that can",
        ) from error
    patience = time.monotonic() + _SECONDS_FOR_A_DYING_RUN
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() < patience:
                time.sleep(0.1)
                continue
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another run"
            os.close(descriptor)
            raise CheckpointError.about(
                "--save",
                save,
                f"is being written by {holder}",
                "wait for it, end it, or give another `--save`",
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s), so start no second run on it.", save, error)
            os.close(descriptor)
            return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor
