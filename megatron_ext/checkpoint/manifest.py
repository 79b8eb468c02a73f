"""The manifest of a checkpoint lists its files with sizes and checksums; Megatron-LM writes none.

It is written after the files that it lists. Of a checkpoint with thousands of shards it is a tree:
parts list the shards, and the manifest lists the parts, which have sizes and checksums like other
files. So no rank has to gather the whole list for a save, and in a load each rank reads only
the parts that list the files that it verifies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.files import (
    Files,
    describe_file,
    is_plain_name,
    summary_of,
    write_durably,
)
from megatron_ext.disk.reading import (
    UnreadableFile,
    is_count,
    kind_of,
    parse_json,
    read_bytes,
    read_json_object,
    shortened,
)
from megatron_ext.errors import CheckpointError

MANIFEST = "manifest.json"
MAX_LISTED = 1024
"""Most shards that a single file lists."""
VERSIONS = (1, 2, 3)
"""Versions of the manifest's format that are read.

In version 1 each entry has a ``blake2b`` checksum, and the entries of later releases a ``crc32``
beside it. A manifest with parts has version 3; the entry of a part has ``"part": true``.
"""


def write_manifest(folder: Path, listed: Files) -> list[str]:
    """Write the manifest of a checkpoint; the files ``listed`` must already be in ``folder``.

    More than `MAX_LISTED` shards are listed by parts, which are written first. ``listed`` may
    already hold parts instead of shards. Return the names of the written files in the order of
    writing.
    """
    shards = {name: entry for name, entry in listed.items() if is_shard(name)}
    parts: Files = {}
    if len(shards) > MAX_LISTED:
        parts = write_parts(folder, shards, 0)
        listed = parts | {name: listed[name] for name in listed.keys() - shards}
    version = 3 if any(map(is_part, listed.values())) else 2
    _write(folder / MANIFEST, version, listed)
    return [*parts, MANIFEST]


def write_parts(folder: Path, shards: Files, rank: int) -> Files:
    """Write parts of a manifest that list ``shards``; return the parts as files of a manifest.

    ``rank`` is the rank that writes them: each rank gives its parts other names.
    """
    names = sorted(shards)
    parts: Files = {}
    for number in range(0, len(names), MAX_LISTED):
        name = f"manifest_{rank}_{number // MAX_LISTED}.json"
        _write(folder / name, 3, {shard: shards[shard] for shard in names[number:][:MAX_LISTED]})
        parts[name] = {**describe_file(folder / name), "part": True}
    return parts


def _write(path: Path, version: int, listed: Files) -> None:
    content = {"version": version, "files": dict(sorted(listed.items()))}
    write_durably(path, json.dumps(content, indent=1))


def is_shard(name: str) -> bool:
    """Return whether a checkpoint's file belongs to a single rank, and holds that rank's shards."""
    return name.startswith("__")


def is_part(entry: dict[str, Any]) -> bool:
    """Return whether an entry of a manifest is a part of the manifest."""
    return "part" in entry


def read_manifest(folder: Path) -> Files | None:
    """Return all files that the manifest of a folder lists, its parts and what they list included.

    The result is None if there is no manifest, as in Megatron-LM's checkpoints.

    Raises:
        CheckpointError: the manifest or a part of it is damaged, or has another format version.
    """
    root = read_root(folder)
    if root is None:
        return None
    return with_parts(root, lambda name: read_part(folder, name, root[name]))


def read_root(folder: Path) -> Files | None:
    """Return what the manifest of a folder lists itself; None if there is no manifest.

    Errors are those of `read_manifest`.
    """
    path = folder / MANIFEST
    try:
        return manifest_of(read_json_object(path), path)
    except UnreadableFile as error:
        if error.missing:
            return None
        raise _damaged(path, error.reason) from error


def read_part(folder: Path, name: str, expected: dict[str, Any]) -> Files:
    """Return the files that a part of a manifest lists, after checking it like `part_of`."""
    path = folder / name
    try:
        content = read_bytes(path)
    except UnreadableFile as error:
        raise _damaged(path, error.reason) from error
    return part_of(content, expected, path)


def with_parts(root: Files, read: Callable[[str], Files]) -> Files:
    """Return the files in ``root`` and those that its parts list.

    ``read`` takes the name of a part, and returns the files that it lists.
    """
    listed = dict(root)
    for name, entry in root.items():
        if is_part(entry):
            listed |= read(name)
    return listed


def part_of(content: bytes, expected: dict[str, Any], place: Path | str) -> Files:
    """Return the files that a part of a manifest lists.

    Args:
        content: the content of the file.
        expected: the entry of the part in the manifest.
        place: path or address of the part, for error messages.

    Raises:
        CheckpointError: the part is damaged, or is not the one that ``expected`` describes.
    """
    if summary_of(content) != {name: expected.get(name) for name in ("bytes", "crc32")}:
        raise _damaged(place, "it does not match its checksum")
    try:
        parsed = parse_json(content, place)
    except UnreadableFile as error:
        raise _damaged(place, error.reason) from error
    if not isinstance(parsed, dict):
        raise _damaged(place, f"it holds {kind_of(parsed)} instead of an object")
    listed = manifest_of(parsed, place)
    for name, entry in listed.items():
        if is_part(entry):
            raise _damaged(place, f"it is a part, but lists the part {shortened(name)}")
    return listed


def manifest_of(content: dict[str, Any], place: Path | str) -> Files:
    """Return the files that a manifest, or a part of one, lists itself.

    Args:
        content: the parsed file.
        place: path or address of the file, for error messages.

    Raises:
        CheckpointError: the manifest is damaged, or has another format version.
    """
    version = content.get("version", 2)
    if version not in VERSIONS:
        *others, newest = VERSIONS
        raise CheckpointError(
            f"{place} has the version {shortened(version)}, but {', '.join(map(str, others))} and "
            f"{newest} are read here; load another checkpoint, or use the release that wrote it."
        )
    listed = content.get("files")
    if not isinstance(listed, dict):
        raise _damaged(place, f"`files` is {kind_of(listed)} instead of an object")
    for name, entry in listed.items():
        if not _is_entry(entry):
            raise _damaged(place, f"it gives no size and checksum of {shortened(name)}")
        if not is_plain_name(name):
            raise _damaged(place, f"it names {name[:200]}, which does not lie in this folder")
    return listed


def _damaged(place: Path | str, reason: str) -> CheckpointError:
    return CheckpointError(f"{place} is damaged ({reason}); load another checkpoint.")


def _is_entry(value: object) -> bool:
    """Return whether a value in a manifest is a size with a checksum, as in `Files`."""
    if not isinstance(value, dict) or not is_count(value.get("bytes")):
        return False
    has_checksum = "crc32" in value or isinstance(value.get("blake2b"), str)
    return has_checksum and is_count(value.get("crc32", 0)) and value.get("part", True) is True
