"""The files of a folder of checkpoints: Megatron-LM's names, its tracker, and manifests.

The tracker names the latest iteration. A manifest lists a checkpoint's files with sizes and
checksums, and is written when all these files are complete. An unreadable file raises a
CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a checkpoint that is being written."""
REMOVED_SUFFIX = ".removed"
"""Ends the name of an old checkpoint whose files are being removed."""
ANNOUNCEMENT = f".{TRACKER}{TEMPORARY_SUFFIX}"
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"iter_(\d{7,})(\.replaced)?$")
Files = dict[str, dict[str, Any]]
"""Size and digest of files by name."""


def folder_of(root: Path, iteration: int) -> Path:
    """Return the folder of an iteration, such as ``iter_0000100`` under the save folder."""
    return root / f"iter_{iteration:07d}"


def root_of(folder: Path) -> tuple[Path, int | None]:
    """Split ``RUN/iter_0000100`` into ``RUN`` and 100; return any other folder with None."""
    found = _FOLDER.fullmatch(folder.name)
    if found is None or found[2] or not folder.is_dir():
        return folder, None
    return folder.parent, int(found[1])


def published(root: Path) -> list[int]:
    """Return the iterations that have a finished or a ``.replaced`` folder, in ascending order."""
    if not root.is_dir():
        return []
    found = (_FOLDER.match(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted({int(match[1]) for match in found if match})


def read_tracker(root: Path) -> int | None:
    """Return the iteration that the tracker file names; None if there is no such file."""
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
    """Return the folder of an iteration's old checkpoint while a new one takes its place."""
    return root / f"iter_{iteration:07d}.replaced"


def standing_folder_of(root: Path, iteration: int) -> Path:
    """Return an iteration's folder, or the ``.replaced`` one if a kill left only that."""
    final, replaced = folder_of(root, iteration), replaced_folder_of(root, iteration)
    return replaced if not final.exists() and replaced.is_dir() else final


def announced(root: Path) -> int | None:
    """Return the iteration that was published but did not get into the tracker, or None."""
    path = root / ANNOUNCEMENT
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return int(text) if text.isdigit() and folder_of(root, int(text)).is_dir() else None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    make_durable(path)


def make_durable(path: Path) -> None:
    """Make a written file survive a power loss."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the BLAKE2b digest of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()}


def read_manifest(folder: Path) -> Files | None:
    """Read the manifest of a folder; return None without one (Megatron-LM writes none)."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        files: Files = json.loads(path.read_text(encoding="utf-8"))["files"]
        for name, known in files.items():
            int(known["bytes"]), str(known["blake2b"])
            if not is_plain_name(name):
                raise ValueError(f"it names {name}, which does not lie in this folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); load another checkpoint.") from error
    return files


def is_plain_name(name: str) -> bool:
    """Return whether a file name has no folder part, so that it cannot lead to another folder."""
    return Path(name).name == name


def size_fault(folder: Path, files: Files) -> str | None:
    """Describe the first listed file that is missing or of another size; return None if all fit."""
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != known["bytes"]:
            return f"{path} has {path.stat().st_size} bytes instead of {known['bytes']}"
    return None


def checksum_fault(folder: Path, files: Files, names: Iterable[str]) -> str | None:
    """Describe the first file in ``names`` that fails its checksum; return None if all match."""
    for name in names:
        if describe_file(folder / name)["blake2b"] != files[name]["blake2b"]:
            return f"{folder / name} does not match its checksum"
    return None
