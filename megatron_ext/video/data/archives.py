"""Clips that lie in tar files, as WebDataset writes them, and are read in place.

The members of a sample have one name and different endings: `0001.mp4`, `0001.txt`, `0001.json`.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_ext.disk.reading import MAX_LINE_BYTES, UnreadableFile, parse_json, shortened
from megatron_ext.video.data.members import Member
from megatron_ext.video.data.pictures import IMAGE_SUFFIXES

SUFFIX = ".tar"
CLIP_SUFFIXES = IMAGE_SUFFIXES | {
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif", ".ts", ".mpg", ".mpeg", ".ogv", ".flv",
}  # fmt: skip
"""Endings of the members that are clips; others are no clips."""


def samples_in(archive: Path) -> Iterator[tuple[Member, dict[str, Any], list[str]]]:
    """Yield the clip of each sample, its row, and the names of its members that are not used.

    The row has the values of the `.json`, and as `text` the content of the `.txt`. Samples without
    a clip are left out.

    Raises:
        UnreadableFile: it is no tar file, is packed, or a `.json` holds no object.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            members: list[tarfile.TarInfo] = []
            for member in tar:
                if not member.isfile():
                    continue
                if members and _stem(members[0].name) != _stem(member.name):
                    yield from _sample(tar, archive, members)
                    members = []
                members.append(member)
            if members:
                yield from _sample(tar, archive, members)
    except (tarfile.TarError, EOFError) as error:
        raise UnreadableFile(
            archive, f"it is no whole tar file ({error}); one packed with gzip must be unpacked"
        ) from None


def _stem(name: str) -> str:
    """Return the name of a sample: the path up to the first dot of the last part."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.partition('.')[0]}"


def _sample(
    tar: tarfile.TarFile, archive: Path, members: list[tarfile.TarInfo]
) -> Iterator[tuple[Member, dict[str, Any], list[str]]]:
    clip: Member | None = None
    row: dict[str, Any] = {}
    text = ""
    unused = []
    for member in members:
        ending = PurePosixPath(member.name).suffix.lower()
        if ending in CLIP_SUFFIXES and clip is None:
            place = (member.offset_data, member.size, float(member.mtime))
            clip = Member(os.fspath(archive), member.name, *place)
        elif ending == ".txt" and not text:
            content = _content(tar, archive, member)
            try:
                text = content.decode("utf-8").strip()
            except UnicodeDecodeError:
                raise UnreadableFile(archive, f"{member.name} is not UTF-8") from None
        elif ending == ".json" and not row:
            row = parse_json(_content(tar, archive, member), archive, not_finite=True)
            if not isinstance(row, dict):
                raise UnreadableFile(archive, f"{member.name} holds {shortened(row)}, no object")
        else:
            unused.append(ending)
    if clip is not None:
        # What stands in the .txt is the caption, as for clips in a folder.
        yield clip, {**row, "text": text} if text else row, unused


def _content(tar: tarfile.TarFile, archive: Path, member: tarfile.TarInfo) -> bytes:
    if member.size > MAX_LINE_BYTES:
        raise UnreadableFile(archive, f"{member.name} has more than {MAX_LINE_BYTES:,} bytes")
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()
