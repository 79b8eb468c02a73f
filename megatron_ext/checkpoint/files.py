"""Names of folders and of the tracker file, as Megatron-LM has them.

The list of a checkpoint's files with sizes and checksums, written when all are whole.

One run at a time writes to a folder of checkpoints.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import together
from megatron_ext.parallel.context import ParallelContext

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


MANIFEST = "manifest.json"
_VERSION = 1


def make_durable(path: Path) -> None:
    """Let a written file survive a power loss."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and BLAKE2b digest of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()}


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of a folder and make it durable."""
    path = folder / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump({"version": _VERSION, "files": dict(sorted(files.items()))}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, dict[str, Any]] | None:
    """The files of a checkpoint; None without a manifest (Megatron-LM writes none).

    Raises:
        CheckpointError: a manifest that cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        files: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["files"]
        for name, known in files.items():
            int(known["bytes"]), str(known["blake2b"])
            if not is_plain_name(name):
                raise ValueError(f"it names {name}, which does not lie in this folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); load another checkpoint.") from error
    return files


def is_plain_name(name: str) -> bool:
    """Whether a file that another file names lies beside it, rather than wherever a path leads."""
    return Path(name).name == name


def size_fault(folder: Path, files: dict[str, dict[str, Any]]) -> str | None:
    """What is wrong with the presence and sizes of the files, None if nothing is."""
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != known["bytes"]:
            return f"{path} has {path.stat().st_size} bytes instead of {known['bytes']}"
    return None


def checksum_fault(
    folder: Path, files: dict[str, dict[str, Any]], names: Iterable[str]
) -> str | None:
    """What is wrong with the content of some files, None if nothing is."""
    for name in names:
        if describe_file(folder / name)["blake2b"] != files[name]["blake2b"]:
            return f"{folder / name} does not match its checksum"
    return None


NAME = ".lock"
_SECONDS_FOR_A_DYING_RUN = 2.0

logger = logging.getLogger(__name__)


@contextmanager
def hold_save_folder(save: str | None, context: ParallelContext) -> Iterator[None]:
    """Keep other runs from writing to ``--save``; all ranks call this together.

    Others may load from it. The lock is one of POSIX, which the kernel frees when rank 0 ends,
    however it ends; which shared file systems know; and which processes that rank 0 forks, such as
    loaders of data, do not keep when it is gone, as they would a lock of flock or filelock.

    Raises:
        CheckpointError: on every rank, where another run holds the folder, or it cannot be written.
    """
    if save is None:
        yield
        return
    held = together(
        lambda: _lock(Path(save)) if context.rank == 0 else None, f"`--save` ({save}) is not locked"
    )[0]
    try:
        yield
    finally:
        if context.rank == 0 and held is not None:
            os.close(held)


def check_save_folder(save: str | None) -> None:
    """Look whether another run writes to ``--save``, before any rank starts; rank 0 may call this.

    Raises:
        CheckpointError: another run holds the folder, or it cannot be written.
    """
    held = None if save is None else _lock(Path(save))
    if held is not None:
        os.close(held)


def _lock(save: Path) -> int | None:
    """Return the open lock file; None where the file system knows no locks.

    Raises:
        CheckpointError: another run holds it, or the folder cannot be written.
    """
    try:
        save.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(save / NAME, os.O_RDWR | os.O_CREAT, 0o644)
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
