"""Says in plain words which limit of the operating system caused an error, and the limit's value.

The limits are open files, address space, processes and threads, shared memory, and disk space.
Libraries report them in different ways, some with an error number and some only with a text. This
module uses only the standard library, so that it also works if an import has failed.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SHARED_MEMORY = "/dev/shm"
_PIDS = "/sys/fs/cgroup/pids.max"
_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
_TEXTS = (
    ("unable to allocate shared memory", "shared memory"),
    ("out of shared memory", "shared memory"),
    ("insufficient shared memory", "shared memory"),
    ("too many open files in system", "files of the system"),
    ("too many open files", "open files"),
    ("can't start new thread", "processes"),
    ("thread creation failed", "processes"),
    ("resource temporarily unavailable", "processes"),
    ("can't allocate memory", "address space"),
    ("cannot allocate memory", "address space"),
    ("failed to map segment from shared object", "address space"),
    ("std::bad_alloc", "address space"),
    ("no space left on device", "disk"),
    ("disk quota exceeded", "disk quota"),
    ("file too large", "file size"),
)
"""Parts of error messages, in lower case, each with the name of the limit that such a message is
about. If several match, the first decides.
"""
_KINDS = {
    errno.EMFILE: "open files",
    errno.ENFILE: "files of the system",
    errno.ENOMEM: "address space",
    errno.ENOSPC: "disk",
    errno.EDQUOT: "disk quota",
    errno.EFBIG: "file size",
}
_SHORT_WRITE = re.compile(r"inline_container\.cc|\d+ requested and \d+ written")
"""Matches messages of torch's and numpy's writers about a file that was written only in part."""
_FULL = 1 << 20
"""Free bytes below which a disk is taken for full after a failed write."""
_PLENTY = 1 << 30
"""If an error names no disk, a disk with more free bytes than this was probably not full."""


def sentence(error: BaseException) -> str | None:
    """Return a sentence on the limit that caused an error; None if no limit did."""
    fault = limit_fault(error)
    return None if fault is None else f"{fault[:1].upper()}{fault[1:]}."


def cause(
    error: BaseException, folder: str | os.PathLike[str] | None = None, needed: int | None = None
) -> str:
    """Return the reason of an error as a clause, for use in a message.

    The reason is the limit of the operating system that caused the error, with its value. If no
    limit did, it is the first line of the error's own message. ``folder`` and ``needed`` are as in
    `limit_fault`.
    """
    fault = limit_fault(error, folder, needed)
    if fault is not None:
        return fault
    lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")


def limit_fault(
    error: BaseException, folder: str | os.PathLike[str] | None = None, needed: int | None = None
) -> str | None:
    """Return a clause on the limit of the operating system that caused an error; None if none did.

    The errors in the chain of causes (``__cause__``, ``__context__``) are examined too.

    Args:
        folder: where something was to be written; by default taken from the error or the command
            line.
        needed: how many bytes were to be written there, to be shown in the clause.
    """
    for part in _chain(error):
        kind = _kind(part)
        if kind is None and _SHORT_WRITE.search(str(part)):
            kind = _kind_of_short_write(folder)
        if kind is not None:
            described = _described(kind, part, folder, needed)
            if described is not None:
                return described
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that led to ``error``, the earliest first, and then ``error`` itself."""
    before = error.__cause__ or error.__context__
    if before is not None and before is not error:
        yield from _chain(before)
    yield error


def _kind(error: BaseException) -> str | None:
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (named := _NUMBER.search(text)):
        # Errors of worker processes, or of libraries in other languages, have nothing but the text.
        number = int(named[1] or named[2])
    if number in _KINDS:
        return _KINDS[number]
    if isinstance(error, MemoryError):
        return "address space"
    is_read = isinstance(error, BlockingIOError) and not _comes_from_fork(error.__traceback__)
    if is_read or not isinstance(error, OSError | RuntimeError | ImportError):
        return None
    lowered = text.lower()
    return next((kind for part, kind in _TEXTS if part in lowered), None)


def _comes_from_fork(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised while a process or thread was being started."""
    names = set[str]()
    while traceback is not None:
        names |= {traceback.tb_frame.f_code.co_name, *traceback.tb_frame.f_code.co_names}
        traceback = traceback.tb_next
    return bool(names & {"fork", "fork_exec", "_fork_exec", "start_new_thread", "start", "Popen"})


def _kind_of_short_write(folder: str | os.PathLike[str] | None) -> str | None:
    if _soft(resource.RLIMIT_FSIZE) is not None:
        return "file size"
    fullest = _fullest(folder)
    is_full = fullest is not None and shutil.disk_usage(fullest).free < _FULL
    return "disk" if is_full else None


def _described(
    kind: str, error: BaseException, folder: str | os.PathLike[str] | None, needed: int | None
) -> str | None:
    if kind == "open files":
        return (
            f"this process may have {_number(resource.RLIMIT_NOFILE)} open files (RLIMIT_NOFILE), "
            "which are all in use; raise the limit with `ulimit -n 65536`"
        )
    if kind == "files of the system":
        return (
            "this machine has as many open files as it may have (fs.file-max); raise it with "
            "`sysctl -w fs.file-max=2097152`, or end other programs"
        )
    if kind == "processes":
        return _processes()
    if kind == "address space":
        limit = _soft(resource.RLIMIT_AS)
        if limit is None:
            return None  # the machine's memory is full, which no limit explains
        return (
            f"this process may have an address space of {_size(limit)} (RLIMIT_AS), which is "
            "too little; raise the limit with `ulimit -v unlimited`"
        )
    if kind == "shared memory":
        return shared_memory_fault()
    if kind == "file size":
        limit = _soft(resource.RLIMIT_FSIZE)
        if limit is None:
            return None
        return (
            f"a file may have {_size(limit)} (RLIMIT_FSIZE), which is too little; raise the limit "
            "with `ulimit -f unlimited`"
        )
    named = getattr(error, "filename", None)
    place = named if isinstance(named, str) else folder
    if kind == "disk quota":
        where = "" if place is None else f" on the disk of {place}"
        return f"the disk quota of this user{where} is used up; free some space there"
    return disk_fault(place, needed)


def _processes() -> str:
    """Return a clause on the limit of processes and threads: the user's or the container's.

    The clause names the lower one. But if the user is the superuser, to whom the user's limit does
    not apply, it names the container's limit if there is one.
    """
    limit = _soft(resource.RLIMIT_NPROC)
    group = None
    with suppress(OSError, ValueError):
        group = int(Path(_PIDS).read_text(encoding="ascii"))
    if group is not None and (limit is None or os.getuid() == 0 or group < limit):
        return (
            f"this container may have {group} processes and threads (pids.max), which are all in "
            "use; give it more, such as with `docker run --pids-limit -1`"
        )
    return (
        f"this user may have {_number(resource.RLIMIT_NPROC)} processes and threads "
        "(RLIMIT_NPROC), which are all in use; raise the limit with `ulimit -u 65536`, or give "
        "fewer ranks and `--num-workers`"
    )


def shared_memory_fault() -> str:
    """Return a clause that says that shared memory is full, its free and total size, and advice."""
    space = ""
    with suppress(OSError):
        usage = shutil.disk_usage(SHARED_MEMORY)
        space = f": {_size(usage.free)} of {_size(usage.total)} are free"
    return (
        f"the shared memory {SHARED_MEMORY} is full{space}; make it larger, such as with "
        f"`docker run --shm-size 16g` or `mount -o remount,size=16g {SHARED_MEMORY}`, or give "
        "`--num-workers 0`"
    )


def disk_fault(place: str | os.PathLike[str] | None, needed: int | None = None) -> str:
    """Return a clause that says which disk is full, with the free and the ``needed`` bytes.

    If ``place``, the path to be written, is None, report the disk with the least free space that
    the program may use (`_fullest`). If even that disk has free space (`_PLENTY`), report shared
    memory if it is full; otherwise say that the disk has free space by now.
    """
    folder = _fullest(place)
    if folder is None:
        return "the disk is full; free some space"
    usage = shutil.disk_usage(folder)
    if place is None and usage.free >= _PLENTY:
        # Semaphores and queues are in shared memory, and their errors name no file.
        with suppress(OSError):
            if shutil.disk_usage(SHARED_MEMORY).free < _FULL:
                return shared_memory_fault()
        return (
            f"a disk is full, but {folder} (mounted at {mount_of(folder)}) has "
            f"{_size(usage.free)} free by now; free some space where this program writes"
        )
    wants = "" if needed is None else f", and {_size(needed)} are needed"
    inodes = os.statvfs(folder)
    if inodes.f_files and not inodes.f_favail:
        return (
            f"the disk of {folder} (mounted at {mount_of(folder)}) has no room for one more file "
            f"(all {inodes.f_files} inodes are in use); remove some files there"
        )
    return (
        f"the disk of {folder} (mounted at {mount_of(folder)}) is full: {_size(usage.free)} of "
        f"{_size(usage.total)} are free{wants}; free some space there"
    )


def mount_of(path: Path) -> Path:
    """Return the mount point of the file system that holds a path."""
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return path


def _fullest(place: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder ``place``, or its nearest parent that exists; None if none can be read.

    If ``place`` is None, take the one whose disk has the least free space among the paths on the
    command line, the working folder and the folder for temporary files.
    """
    if place is not None:
        return _existing(place)
    words = [word.partition("=")[2] or word for word in sys.argv[1:]]
    named = [Path(word) for word in words if os.sep in word or os.path.exists(word)]
    folders = [_existing(path) for path in [*named, Path(), Path(tempfile.gettempdir())]]
    existing = [folder for folder in folders if folder is not None]
    return min(existing, key=lambda folder: shutil.disk_usage(folder).free, default=None)


def _existing(place: str | os.PathLike[str]) -> Path | None:
    """Return the path or its nearest existing parent; None if none can be examined."""
    with suppress(OSError):
        folder = Path(place).absolute()
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        shutil.disk_usage(folder)
        return folder
    return None


def _soft(kind: int) -> int | None:
    """Return this process's soft limit of a resource (``resource.RLIMIT_…``); None if unlimited."""
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _number(kind: int) -> str:
    limit = _soft(kind)
    return "no more" if limit is None else str(limit)


def _size(num_bytes: int) -> str:
    """Return a number of bytes in a suitable unit."""
    size = float(num_bytes)
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size = size / 1024
        units = units[1:]
    return f"{num_bytes} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
