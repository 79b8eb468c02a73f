"""Names, reads and checks the files in a folder of checkpoints, as Megatron-LM names them.

The tracker file names the latest iteration. A CheckpointError is raised for a file that cannot be
read.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_ext.disk.iterations import iteration_of, name_of
from megatron_ext.disk.reading import (
    UnreadableFile,
    open_regular,
)
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY_SUFFIX = ".tmp"
"""Suffix of the folder of a checkpoint that is being written."""
REMOVED_SUFFIX = ".removed"
"""Suffix of the folder of an old checkpoint whose files are being removed."""
REPLACED_SUFFIX = ".replaced"
"""Suffix of the folder of an old checkpoint whose place a new one is taking."""
ANNOUNCEMENT = f".{TRACKER}{TEMPORARY_SUFFIX}"
_NUMBER = re.compile(r"[0-9]{1,15}")
_MAX_NUMBER_BYTES = 1000
_BLOCK_BYTES = 1 << 20
"""Bytes of a file that are read at a time; more would not stay in a processor's cache."""
Files = dict[str, dict[str, Any]]
"""File name -> ``{"bytes": size in bytes, "crc32": checksum}``; see also `manifest.VERSIONS`."""


def folder_of(root: Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint, such as ``iter_0000100`` under ``root``."""
    return root / name_of(iteration)


def root_of(folder: Path) -> tuple[Path, int | None]:
    """Split a checkpoint's path ``RUN/iter_0000100`` into the folder ``RUN`` and the iteration 100.

    For any other path, return the path itself and None.
    """
    iteration = iteration_of(folder.name)
    if iteration is None or not folder.is_dir():
        return folder, None
    return folder.parent, iteration


def published(root: Path) -> list[int]:
    """Return the iterations that have a finished checkpoint, in ascending order.

    An old checkpoint that a new one of the same iteration is replacing (``.replaced``) counts, too.
    """
    if not root.is_dir():
        return []
    iterations = (iteration_in(entry) for entry in root.iterdir() if entry.is_dir())
    return sorted({iteration for iteration in iterations if iteration is not None})


def read_tracker(root: Path) -> int | None:
    """Return the iteration that the tracker file names; None if there is no such file."""
    path = root / TRACKER
    text = short_text(path)
    if text is None:
        return None
    if _NUMBER.fullmatch(text):
        return int(text)
    raise CheckpointError(
        f"{path} holds {text[:40]!r}, but must hold the number of an iteration; write one of "
        f"{published(root) or 'the saved iterations'} into it, or give `--ckpt-step`."
    )


def replaced_folder_of(root: Path, iteration: int) -> Path:
    """Return the folder of an iteration's old checkpoint while a new one takes its place."""
    return root / f"{name_of(iteration)}{REPLACED_SUFFIX}"


def iteration_in(folder: Path) -> int | None:
    """Return the iteration of the checkpoint in a folder; None if its name is of another kind.

    The folder may be that of an old checkpoint whose place a new one is taking.
    """
    return iteration_of(folder.name.removesuffix(REPLACED_SUFFIX))


def standing_folder_of(root: Path, iteration: int) -> Path:
    """Return the folder that holds an iteration's checkpoint.

    Usually this is `folder_of`, even if it does not exist. But a run that was killed while it
    replaced an old checkpoint may have left only the old one. Then this is the ``.replaced`` folder
    that holds the old one.
    """
    final = folder_of(root, iteration)
    replaced = replaced_folder_of(root, iteration)
    return replaced if not final.exists() and replaced.is_dir() else final


def announced(root: Path) -> int | None:
    """Return the iteration that the announcement file names.

    The result is None if there is no such file, or no checkpoint of that iteration. `publish`
    writes the announcement before the tracker. If a run is killed between the two writes, the
    announcement names a newer checkpoint than the tracker.
    """
    text = short_text(root / ANNOUNCEMENT) or ""
    is_number = _NUMBER.fullmatch(text) is not None
    return int(text) if is_number and folder_of(root, int(text)).is_dir() else None


def short_text(path: Path) -> str | None:
    """Return the text of a small file without surrounding spaces; None if there is no file."""
    try:
        with open_regular(path) as file:
            return file.read(_MAX_NUMBER_BYTES).decode("utf-8", errors="replace").strip()
    except UnreadableFile as error:
        if error.missing:
            return None
        raise CheckpointError(
            f"{path} cannot be read ({error.reason}); remove it, or load another folder."
        ) from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write ``text`` to a new file that replaces ``path``, and flush it to disk.

    The file survives a power loss.
    """
    write_text(path, text)
    make_durable(path)


def make_durable(path: Path) -> None:
    """Flush a written file to disk, so that it survives a power loss."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


class Checksum:
    """The size and the checksum of a file, computed from its content piece by piece."""

    def __init__(self) -> None:
        self._size = 0
        self._crc = 0

    def add(self, data: bytes | memoryview) -> None:
        """Add the next piece of the file."""
        self._size += memoryview(data).nbytes
        self._crc = zlib.crc32(data, self._crc)

    def entry(self) -> dict[str, Any]:
        """Return the file's entry in `Files`."""
        return {"bytes": self._size, "crc32": self._crc}


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and the checksum of a file, as in `Files`."""
    checksum = Checksum()
    for block in _blocks(path):
        checksum.add(block)
    return checksum.entry()


def summary_of(content: bytes) -> dict[str, Any]:
    """Return the size and the checksum of a file with this content, as in `Files`."""
    checksum = Checksum()
    checksum.add(content)
    return checksum.entry()


def digest_of(path: Path) -> str:
    """Return a digest of a file's content, which no other content has."""
    digest = hashlib.blake2b(digest_size=16)
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


_SAMPLES = 64
_SAMPLE_BYTES = 4096


def digest_of_weights(source: Path) -> str:
    """Return a digest that identifies the weights in a folder or file without reading all of them.

    It covers the size of each file, its beginning, which holds names and shapes, and parts of it.
    """
    if source.is_file():
        paths = [source]
    else:
        paths = sorted(source.glob("*.safetensors")) or sorted(source.glob("*.bin"))
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name if source.is_dir() else ''} {size};".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(number * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def is_unchanged(path: Path, expected: dict[str, Any]) -> bool:
    """Return whether a file has the size and the checksum of its entry in `Files`.

    If the entry has both checksums, only the faster one is computed.
    """
    if "crc32" in expected:
        found = describe_file(path)
        return all(expected[name] == value for name, value in found.items())
    has_size = path.stat().st_size == expected["bytes"]
    return bool(has_size and digest_of(path) == expected["blake2b"])


def _blocks(path: Path) -> Iterator[memoryview]:
    """Yield the content of a file in pieces; each is valid until the next one is asked for."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        # The kernel then reads further ahead of a file that is not in the page cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while size := file.readinto(buffer):
            yield buffer[:size]


def is_plain_name(name: str) -> bool:
    """Return whether a file name has no folder part, so that it cannot lead to another folder."""
    return Path(name).name == name


def size_fault(folder: Path, files: Files) -> str | None:
    """Describe the first listed file that is missing or of another size; return None if all fit."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{path} has {path.stat().st_size} bytes instead of {expected['bytes']}"
    return None


def checksum_fault(folder: Path, files: Files, names: Iterable[str]) -> str | None:
    """Describe the first file in ``names`` that fails its checksum; return None if all match."""
    for name in names:
        if not is_unchanged(folder / name, files[name]):
            return f"{folder / name} does not match its checksum"
    return None
