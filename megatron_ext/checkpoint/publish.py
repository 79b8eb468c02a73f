"""Publishes a checkpoint under its final name and removes old ones; only rank 0 does this.

A lock lets one run at a time write to a folder of checkpoints. It is a POSIX lock, which the kernel
frees when rank 0 ends, however it ends, and which shared file systems know. Processes that rank 0
forks, such as loaders of data, do not keep it, as they would keep a lock of flock or filelock.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint import files
from megatron_ext.checkpoint.files import folder_of, published
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import on_first_rank
from megatron_ext.parallel.context import ParallelContext

logger = logging.getLogger(__name__)

BEST_TRACKER = "best_checkpointed_iteration.txt"
LOCK = ".lock"
_VERSION = 1
"""The format of manifests."""
_SECONDS_FOR_A_DYING_RUN = 2.0


def prepare(root: Path, iteration: int) -> None:
    """Make the empty folder to write to, and clear what earlier kills left."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"iter_*{files.TEMPORARY_SUFFIX}"):
        if left.is_dir():
            shutil.rmtree(left)
    for older in published(root):
        replaced = files.replaced_folder_of(root, older)
        if folder_of(root, older).is_dir() and replaced.is_dir():
            shutil.rmtree(replaced)
    temporary_folder_of(root, iteration).mkdir()


def temporary_folder_of(root: Path, iteration: int) -> Path:
    """Return where the files of an iteration are written before they are published."""
    final = folder_of(root, iteration)
    return final.with_name(final.name + files.TEMPORARY_SUFFIX)


def publish(root: Path, iteration: int, listed: files.Files) -> None:
    """Write the manifest, give the folder its name, and move the tracker last.

    The order survives a kill at any moment: a folder under its final name is whole; the tracker
    names a whole folder; between the two, the announcement tells a loader what is newer.
    """
    temporary, final = temporary_folder_of(root, iteration), folder_of(root, iteration)
    content = {"version": _VERSION, "files": dict(sorted(listed.items()))}
    files.write_durably(temporary / files.MANIFEST, json.dumps(content, indent=1))
    files.sync_folder(temporary)
    files.write_durably(root / files.ANNOUNCEMENT, str(iteration))
    replaced = files.replaced_folder_of(root, iteration)
    if final.exists():
        # Loaders fall back to this name until the new folder stands.
        os.rename(final, replaced)
    os.rename(temporary, final)
    files.sync_folder(root)
    os.replace(root / files.ANNOUNCEMENT, root / files.TRACKER)
    files.sync_folder(root)
    if replaced.exists():
        shutil.rmtree(replaced)


def expired(
    older: list[int],
    *,
    retain: int | None,
    keep: int | None,
    best: Collection[int] = (),
    superseded: Collection[int] = (),
) -> list[int]:
    """Return which older checkpoints, in ascending order, go after a new one was published.

    Args:
        retain: ``--save-retain-interval``. Multiples stay; as in Megatron-LM, the checkpoint before
            the new one is removed if it is none.
        keep: ``--keep-last``. So many stay, the new one included.
        best: ``--keep-best``. These stay besides, and do not count for ``keep``.
        superseded: these were saved only for being among the best, and no longer are.
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
    """Remove `expired` checkpoints but for symbolic links; a failure is only reported."""
    older = [iteration for iteration in published(root) if iteration < newest]
    retain, keep = config.save_retain_interval, config.keep_last
    for iteration in expired(older, retain=retain, keep=keep, best=best, superseded=superseded):
        folder = folder_of(root, iteration)
        if folder.is_symlink():
            continue
        aside = temporary_folder_of(root, iteration)
        try:
            # Renamed first, so that a kill in the middle leaves no partial checkpoint.
            os.rename(folder, aside)
            shutil.rmtree(aside)
        except OSError as error:
            logger.warning("The old checkpoint %s could not be removed: %s.", folder, error)


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint with one of the lowest validation losses.

    Attributes:
        regular: it was saved for another reason too.
    """

    iteration: int
    loss: float
    regular: bool


def with_candidate(
    best: Sequence[BestCheckpoint], new: BestCheckpoint, keep: int
) -> tuple[list[BestCheckpoint], list[BestCheckpoint]]:
    """Return the ``keep`` best, lowest loss and earliest first, and those that are so no longer."""
    others = [entry for entry in best if entry.iteration != new.iteration]
    ranked = sorted([*others, new], key=lambda entry: entry.loss)
    return ranked[:keep], [entry for entry in ranked[keep:] if entry is not new]


def write_best(root: Path, best: BestCheckpoint) -> None:
    """Write the iteration and the loss of the best checkpoint in one step, where it lies here."""
    path = root / BEST_TRACKER
    if not folder_of(root, best.iteration).is_dir():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    files.write_durably(temporary, f"{best.iteration} {best.loss!r}\n")
    os.replace(temporary, path)
    files.sync_folder(root)


@contextmanager
def hold_save_folder(save: str | None, context: ParallelContext) -> Iterator[None]:
    """Keep other runs from writing to ``--save``, not from loading; all ranks call this together.

    Where another run holds the folder, every rank raises a CheckpointError.
    """
    if save is None:
        yield
        return
    held = on_first_rank(lambda: _lock(Path(save)), f"`--save` ({save}) is not locked")
    try:
        yield
    finally:
        if context.rank == 0 and held is not None:
            os.close(held)


def check_save_folder(save: str | None) -> None:
    """Check, before any rank starts, that no other run writes to ``--save``."""
    held = None if save is None else _lock(Path(save))
    if held is not None:
        os.close(held)


def _lock(save: Path) -> int | None:
    """Lock the folder and return the open lock file; None where the file system knows no locks."""
    try:
        save.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(save / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"`--save` ({save}) cannot be written ({error.strerror}); give a folder that can."
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
            raise CheckpointError(
                f"`--save` ({save}) is being written by {holder}; wait for it, end it, or give "
                "another `--save`."
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s), so start no second run on it.", save, error)
            os.close(descriptor)
            return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor
