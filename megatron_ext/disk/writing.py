"""Writes files into existing folders, such as a save folder that another user has made.

Another user may have put a link, a pipe or a device at the path of a file. None is written to: a
file that is written whole replaces it, and appending to it is an error. So no link leads a write
elsewhere, and no write waits for the reader of a pipe. Folders named by the user may be links.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, overload

from megatron_ext import limits
from megatron_ext.errors import FlagError

StrPath = str | os.PathLike[str]
_DESCRIPTOR = re.compile(r"/proc/(self|[0-9]+)/fd/[0-9]+")
_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR


class NotRegular(OSError):
    """A link, pipe, device or folder is at the path of a file to be opened."""

    def __init__(self, path: StrPath, kind: str) -> None:
        reason = f"{os.fspath(path)} is {kind}, which is not written to; remove it"
        super().__init__(errno.EPERM, reason)


def open_descriptor(path: StrPath, flags: int, permissions: int = 0o666) -> int:
    """Open a regular file like ``os.open``, without following a link; return its descriptor.

    Raises:
        NotRegular: at the path is something else, or, if ``flags`` ask to write, a file with
            several names (hard links).
        OSError: the file cannot be opened.
    """
    # An open descriptor of a process, such as nameless shared memory, only looks like a link.
    is_open_already = _DESCRIPTOR.fullmatch(os.fspath(path)) is not None
    safe = (0 if is_open_already else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # The file must not be truncated before it is known to be regular.
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | safe, permissions)
    except OSError as error:
        if error.errno == errno.ELOOP or os.path.islink(path):
            raise NotRegular(path, "a symbolic link") from None
        if error.errno == errno.ENXIO:
            raise NotRegular(path, "a pipe, a device or a socket") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            is_folder = stat.S_ISDIR(status.st_mode)
            raise NotRegular(path, "a folder" if is_folder else "a pipe, a device or a socket")
        if flags & _ACCESS != os.O_RDONLY and status.st_nlink > 1:
            raise NotRegular(path, "a hard link to a file with another name")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@overload
def open_new(path: StrPath, mode: Literal["w"] = "w", **options: Any) -> TextIO: ...


@overload
def open_new(path: StrPath, mode: Literal["wb"], **options: Any) -> BinaryIO: ...


def open_new(path: StrPath, mode: str = "w", **options: Any) -> IO[Any]:
    """Open a new file like ``open``, in place of any file or link at ``path``."""
    descriptor = open_descriptor(cleared(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    return _as_file(descriptor, mode, options)


@overload
def open_to_append(path: StrPath, mode: Literal["a"] = "a", **options: Any) -> TextIO: ...


@overload
def open_to_append(path: StrPath, mode: Literal["ab"], **options: Any) -> BinaryIO: ...


def open_to_append(path: StrPath, mode: str = "a", **options: Any) -> IO[Any]:
    """Open a regular file like ``open`` with mode ``a`` or ``ab``, without following a link.

    A file with several names (hard links) is first replaced by a copy. The errors are those of
    `open_descriptor`.
    """
    with suppress(FileNotFoundError):
        about = os.lstat(path)
        if stat.S_ISREG(about.st_mode) and about.st_nlink > 1:
            copy = cleared(f"{os.fspath(path)}.copy")
            shutil.copyfile(path, copy)
            os.replace(copy, path)
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return _as_file(descriptor, mode, options)


def _as_file(descriptor: int, mode: str, options: dict[str, Any]) -> IO[Any]:
    try:
        if "b" not in mode:
            options = {"encoding": "utf-8", **options}
        return os.fdopen(descriptor, mode, **options)
    except BaseException:
        os.close(descriptor)
        raise


def write_text(path: StrPath, text: str, errors: str = "strict") -> None:
    """Write a new UTF-8 file in place of any file or link at ``path``.

    ``errors`` is ``open``'s argument: what to do with characters that cannot be encoded.
    """
    with open_new(path, errors=errors) as file:
        file.write(text)


def write_bytes(path: StrPath, content: bytes) -> None:
    """Write a new file in place of any file or link at ``path``."""
    with open_new(path, "wb") as file:
        file.write(content)


def cleared(path: StrPath) -> Path:
    """Remove any file or link at a path, so that a library can write there; return the path."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return Path(path)


def remove(path: StrPath) -> None:
    """Remove a file, a link (not its target) or a whole folder; do nothing if there is none."""
    while os.path.lexists(path):
        # Another process may be removing the same folder, and may remove some files first.
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path)
            else:
                os.unlink(path)


def own_folder(path: StrPath, permissions: int = 0o777) -> Path:
    """Create a folder inside an existing folder, unless it exists; return its path.

    A link, pipe or device at ``path`` is replaced. A new folder gets the mode bits ``permissions``.

    Raises:
        FileExistsError: there is a file of that name.
    """
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            return Path(path)
        if not stat.S_ISREG(mode):
            os.unlink(path)
    try:
        os.mkdir(path, permissions)
    except FileExistsError:
        # Another process may have created it meanwhile.
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise
    return Path(path)


def is_regular(path: StrPath) -> bool:
    """Return whether the path is a regular file and not a link."""
    with suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def lock_path(path: StrPath) -> str:
    """Make ``path`` safe to use as a lock file of filelock, and return it.

    filelock would empty the target of a link, so a link or pipe at the path is removed. So is a
    file with several names (hard links), as in a folder copied by ``cp -al``.

    Raises:
        BlockingIOError: the file has several names, and a running process has locked it. It is not
            removed, because a new file of this name would not be locked.
    """
    if os.path.lexists(path):
        if not is_regular(path):
            os.unlink(path)
        elif os.lstat(path).st_nlink > 1:
            if _is_locked(path):
                reason = f"a run that goes on has locked {os.fspath(path)}"
                raise BlockingIOError(errno.EAGAIN, reason)
            os.unlink(path)
    return os.fspath(path)


def _is_locked(path: StrPath) -> bool:
    """Return whether another process has locked a file, by flock or by fcntl."""
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # The file system has no locks.
        return False
    finally:
        os.close(descriptor)
    return False


def why_not_writable(folder: Path) -> str | None:
    """Return why files cannot be written to a folder, which may not exist yet; None if they can.

    This writes a temporary file, since permissions do not reveal a read-only mount or a full disk.
    """
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    try:
        with tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return limits.cause(error, nearest)
    return None


def write_error(flag: str, given: str, *, is_file: bool = False) -> str | None:
    """Return a sentence that says why the path given by ``flag`` cannot be written; None if it can.

    Args:
        flag: name of the flag.
        given: value of the flag, a path.
        is_file: whether the path is a file; otherwise it is a folder.
    """
    reason = why_not_writable(Path(given).parent if is_file else Path(given))
    if reason is None:
        return None
    kind = "file" if is_file else "folder"
    return FlagError(flag, given, f"cannot be written ({reason})", f"give a {kind} that can")
