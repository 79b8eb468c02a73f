"""The list of a checkpoint's files with sizes and checksums, written when all are whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError

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
