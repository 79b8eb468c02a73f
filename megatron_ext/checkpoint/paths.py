"""Names of folders and of the tracker file, as Megatron-LM has them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_ext.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY_SUFFIX = ".tmp"
ANNOUNCEMENT = f".{TRACKER}{TEMPORARY_SUFFIX}"
_FOLDER = re.compile(r"iter_(\d{7,})(\.replaced)?$")


def folder_of(root: Path, iteration: int) -> Path:
    """``iter_0000100`` under the save folder."""
    return root / f"iter_{iteration:07d}"


def root_of(folder: Path) -> tuple[Path, int | None]:
    """A folder of checkpoints, and an iteration where the given one, ``RUN/iter_0000100``, is its.

    Args:
        folder: of one checkpoint or of many.
    """
    found = _FOLDER.fullmatch(folder.name)
    if found is None or found[2] or not folder.is_dir():
        return folder, None
    return folder.parent, int(found[1])


def published(root: Path) -> list[int]:
    """Iterations whose folders stand under their final name, ascending."""
    if not root.is_dir():
        return []
    found = (_FOLDER.match(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted({int(match.group(1)) for match in found if match})


def leftovers(root: Path) -> list[Path]:
    """Folders that an interrupted save or deletion left behind."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.glob(f"iter_*{TEMPORARY_SUFFIX}") if p.is_dir())


def read_tracker(root: Path) -> int | None:
    """The iteration that the tracker names, None without a tracker.

    Raises:
        CheckpointError: a tracker that holds something else than a number.
    """
    path = root / TRACKER
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if text.isdigit():
        return int(text)
    raise CheckpointError(
        f"{path} holds {text[:40]!r}, but must hold the number of an iteration; write one of "
        f"{published(root) or 'the saved iterations'} into it, or give `--ckpt-step`."
    )


def replaced_folder_of(root: Path, iteration: int) -> Path:
    """Where the former checkpoint of an iteration stands while a new one takes its place."""
    return root / f"iter_{iteration:07d}.replaced"


def standing_folder_of(root: Path, iteration: int) -> Path:
    """The folder to read: the final one, or the former one if a kill came between two renames."""
    final, replaced = folder_of(root, iteration), replaced_folder_of(root, iteration)
    return replaced if not final.exists() and replaced.is_dir() else final


def announce(root: Path, iteration: int) -> None:
    """Write durably which iteration is about to be published."""
    with (root / ANNOUNCEMENT).open("w", encoding="utf-8") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())


def announced(root: Path) -> int | None:
    """The iteration whose publication was interrupted between its folder and the tracker."""
    path = root / ANNOUNCEMENT
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not text.isdigit() or not folder_of(root, int(text)).is_dir():
        return None
    return int(text)


def finish_announced(root: Path) -> None:
    """Move the tracker, in one step, to what was announced."""
    os.replace(root / ANNOUNCEMENT, root / TRACKER)
    sync_folder(root)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
