"""Files in tar files, which are read in place."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any


@dataclass(frozen=True)
class Member:
    """The bytes of one file in a tar file that is not packed.

    Attributes:
        modified: the file's own time, which stays when more files are appended.
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
        """Return the file for reading, which needs no closing."""
        return _Span(self)


class _Span(io.RawIOBase):
    """A member as a file. Each read opens the archive, so that clips hold no open files."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._member.size}
        self._place = max(0, base[whence] + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._member.size - self._place)
        view = memoryview(buffer)[:left]
        with open(self._member.archive, "rb", buffering=0) as archive:
            archive.seek(self._member.start + self._place)
            count = archive.readinto(view) or 0
        self._place += count
        return count


ClipFile = Path | Member
"""The file of a clip: one of its own, or a folder, or one in a tar file."""


def readable(file: ClipFile) -> Path | io.RawIOBase:
    """Return what a library opens to read a file."""
    return file.opened() if isinstance(file, Member) else file
