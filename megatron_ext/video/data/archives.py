"""Finds clips in tar files of WebDataset's layout; the clips are read in place, without unpacking.

The members of a sample have the same name and different suffixes: `0001.mp4`, `0001.txt`,
`0001.json`.
"""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_ext.disk.reading import MAX_LINE_BYTES, UnreadableFile, parse_json, shortened
from megatron_ext.video.data.members import Member
from megatron_ext.video.data.pictures import IMAGE_SUFFIXES

SUFFIX = ".tar"
CLIP_SUFFIXES = IMAGE_SUFFIXES | {
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif", ".ts", ".mpg", ".mpeg", ".ogv", ".flv",
    ".wmv", ".asf", ".3gp", ".3g2", ".mts", ".m2ts", ".m2v", ".vob", ".ogg", ".h264", ".hevc",
    ".avif", ".heic", ".heif", ".mjpeg",
}  # fmt: skip
"""The suffixes by which members of a tar file are taken for clips."""
_MOST_LINKS = 8
"""The longest chain of links to a file; a longer chain is taken for a cycle."""


def samples_in(archive: Path) -> Iterator[tuple[Member | None, dict[str, Any], list[str]]]:
    """Yield (clip, row, suffixes of unused members) for each sample in a tar file.

    The clip tells where its file lies in the archive; it is None if the sample has no clip file.
    The row has the entries of the sample's `.json`, with the content of its `.txt` as the entry
    `text`. The members of a sample may be anywhere in the archive, since `tar` writes the files of
    a folder in no particular order.

    Raises:
        UnreadableFile: ``archive`` is not a whole, uncompressed tar file, or a `.json` or `.txt` in
            it cannot be read.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            members = {member.name: member for member in tar}
            samples: dict[str, list[tuple[str, tarfile.TarInfo]]] = {}
            for name, member in members.items():
                file = _file_of(member, members)
                if file is not None:
                    samples.setdefault(_stem(name), []).append((name, file))
            for of_sample in samples.values():
                yield _sample(tar, archive, of_sample)
    except (tarfile.TarError, EOFError) as error:
        raise UnreadableFile(
            archive, f"it is no whole tar file ({error}); one packed with gzip must be unpacked"
        ) from None


def _file_of(
    member: tarfile.TarInfo, members: Mapping[str, tarfile.TarInfo]
) -> tarfile.TarInfo | None:
    """Return the file that ``member`` is, or to which it leads as a link.

    ``members`` has all members of the archive by name. Return None for a member that is neither a
    file nor such a link, for example a folder, or a link that leads to no file in the archive.
    """
    for _ in range(_MOST_LINKS):
        if member.isfile():
            return member
        name = member.linkname
        if member.issym():
            name = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), name))
        if not (member.issym() or member.islnk()) or name not in members:
            return None
        member = members[name]
    return None


def _stem(name: str) -> str:
    """Return the name of a member's sample: its path up to the first dot of the file name."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.partition('.')[0]}"


def _sample(
    tar: tarfile.TarFile, archive: Path, members: list[tuple[str, tarfile.TarInfo]]
) -> tuple[Member | None, dict[str, Any], list[str]]:
    """Return (clip, row, suffixes of unused members) of one sample, as `samples_in` yields them.

    ``members`` has (name, file) for each member of the sample. For a link, the name is that of the
    link, and the file is the one to which it leads.
    """
    clip: Member | None = None
    row: dict[str, Any] = {}
    text = ""
    unused = []
    for name, member in members:
        ending = PurePosixPath(name).suffix.lower()
        if ending in CLIP_SUFFIXES and clip is None:
            place = (member.offset_data, member.size, float(member.mtime))
            clip = Member(os.fspath(archive), name, *place)
        elif ending == ".txt" and not text:
            content = _content(tar, archive, member)
            try:
                text = content.decode("utf-8-sig").strip()
            except UnicodeDecodeError:
                raise UnreadableFile(archive, f"{name} is not UTF-8") from None
        elif ending == ".json" and not row:
            row = parse_json(_content(tar, archive, member), archive, not_finite=True)
            if not isinstance(row, dict):
                raise UnreadableFile(archive, f"{name} holds {shortened(row)}, no object")
        else:
            unused.append(ending or name)
    if clip is None:
        unused = [PurePosixPath(name).suffix.lower() or name for name, _ in members]
    # The .txt takes precedence over the .json as the caption, as it does for clips in a folder.
    return clip, {**row, "text": text} if text else row, unused


def _content(tar: tarfile.TarFile, archive: Path, member: tarfile.TarInfo) -> bytes:
    if member.size > MAX_LINE_BYTES:
        raise UnreadableFile(archive, f"{member.name} has more than {MAX_LINE_BYTES:,} bytes")
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()
