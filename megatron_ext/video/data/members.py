"""Reads files within tar files, without unpacking them."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any


@dataclass(frozen=True)
class Member:
    """The position of one file within an uncompressed tar file, from which it is read directly.

    Attributes:
        archive, name: path of the tar file, and the file's path inside it.
        start, size: first byte and number of bytes of the file in the archive.
        modified: modification time of the file itself, which does not change when other files are
            appended to the archive.
    """

    archive: str
    name: str
    start: int
    size: int
    modified: float

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def __str__(self) -> str:
        return f"{self.archive}/{self.name}"

    def opened(self) -> io.RawIOBase:
        """Return a file object for reading; it holds no open file, so it need not be closed."""
        return _MemberFile(self)


class _MemberFile(io.RawIOBase):
    """A file object of a member of an archive.

    It opens the archive for each read, so that no file stays open.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._member.size}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._member.size - self._position)
        view = memoryview(buffer)[:left]
        with open(self._member.archive, "rb", buffering=0) as archive:
            archive.seek(self._member.start + self._position)
            count = archive.readinto(view) or 0
        self._position += count
        return count


ClipFile = Path | Member
"""The place of a clip: the path of a file or of a folder of frames, or a file in a tar file."""


def readable(file: ClipFile) -> Path | io.RawIOBase:
    """Return what PyAV and Pillow can open: the path, or a file object for a file in a tar file."""
    return file.opened() if isinstance(file, Member) else file
