"""Publishes a checkpoint under its final name and removes old ones; only rank 0 does this.

The checkpoints of the lowest validation loss may be kept besides, and a file names the best.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.files import (
    TEMPORARY_SUFFIX,
    announce,
    finish_announced,
    folder_of,
    leftovers,
    published,
    replaced_folder_of,
    sync_folder,
    write_durably,
    write_manifest,
)

logger = logging.getLogger(__name__)

BEST_TRACKER = "best_checkpointed_iteration.txt"


def prepare(root: Path, iteration: int) -> None:
    """Make the empty folder to write to, and clear what earlier kills left.

    Raises:
        OSError: the save folder cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in leftovers(root):
        shutil.rmtree(left)
    for older in published(root):
        replaced = replaced_folder_of(root, older)
        if folder_of(root, older).is_dir() and replaced.is_dir():
            shutil.rmtree(replaced)
    temporary_folder_of(root, iteration).mkdir()


def temporary_folder_of(root: Path, iteration: int) -> Path:
    """Return where the files of an iteration are written before they are published."""
    final = folder_of(root, iteration)
    return final.with_name(final.name + TEMPORARY_SUFFIX)


def publish(root: Path, iteration: int, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest, give the folder its name, and move the tracker last.

    The order survives a kill at any moment: a folder under its final name is whole; the tracker
    names a whole folder; between the two, the announcement tells a loader what is newer.
    """
    temporary, final = temporary_folder_of(root, iteration), folder_of(root, iteration)
    write_manifest(temporary, files)
    sync_folder(temporary)
    announce(root, iteration)
    replaced = replaced_folder_of(root, iteration)
    if final.exists():
        # Loaders fall back to this name until the new folder stands.
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync_folder(root)
    finish_announced(root)
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
    """Return which older checkpoints are removed after a new one was published.

    Args:
        older: iterations before the new one, ascending.
        retain: ``--save-retain-interval``. As in Megatron-LM, the checkpoint before the new one
            is removed unless its iteration is a multiple of this.
        keep: ``--keep-last``. So many stay, the new one included; multiples of ``retain`` stay
            as well.
        best: ``--keep-best``. These stay besides, and do not count for ``keep``.
        superseded: these were saved only for being among the best, and no longer are. They are
            removed, but for multiples of ``retain``.
    """
    gone: set[int] = set()
    if retain is not None and older and older[-1] % retain:
        gone.add(older[-1])
    if keep is not None:
        counted = [i for i in older if i not in best]
        beyond = counted[: max(0, len(counted) - (keep - 1))]
        gone |= {i for i in beyond if retain is None or i % retain}
    gone |= {i for i in older if i in superseded and (retain is None or i % retain)}
    return sorted(gone - set(best))


def remove_old(
    root: Path,
    newest: int,
    *,
    retain: int | None,
    keep: int | None,
    best: Collection[int] = (),
    superseded: Collection[int] = (),
) -> None:
    """Remove the checkpoints that the flags do not keep; see `expired`.

    A symbolic link is left alone. A folder that cannot be removed is reported, and does not end
    the run: the new checkpoint is safe.
    """
    older = [iteration for iteration in published(root) if iteration < newest]
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
    """A checkpoint among those of the lowest validation loss.

    Attributes:
        loss: validation loss.
        regular: whether it would have been saved for another reason too.
    """

    iteration: int
    loss: float
    regular: bool


def with_candidate(
    best: Sequence[BestCheckpoint], new: BestCheckpoint, keep: int
) -> tuple[list[BestCheckpoint], list[BestCheckpoint]]:
    """Return the ``keep`` best, lowest loss first, and the former ones no longer among them.

    Where losses are equal, the earlier checkpoint stays.
    """
    others = [entry for entry in best if entry.iteration != new.iteration]
    ranked = sorted([*others, new], key=lambda entry: entry.loss)
    return ranked[:keep], [entry for entry in ranked[keep:] if entry is not new]


def write_best(root: Path, best: BestCheckpoint) -> None:
    """Write the iteration and the loss of the best checkpoint in one step.

    A run that goes on in another folder than it was loaded from leaves the file alone until it has
    a best checkpoint there.

    Raises:
        OSError: the file cannot be written.
    """
    path = root / BEST_TRACKER
    if not folder_of(root, best.iteration).is_dir():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    write_durably(temporary, f"{best.iteration} {best.loss!r}\n")
    os.replace(temporary, path)
    sync_folder(root)
