"""Turns a bus error, which would otherwise kill the process, into an error that names the file.

The kernel sends SIGBUS when it cannot provide a page of a mapped file: the file was truncated after
it was mapped, its in-memory file system is full, or its disk does not answer. Libraries such as
torch always blame shared memory. The handler here looks up the file at the address, maps zeros
over it so that the interrupted instruction can finish, and makes Python raise the error at once.
From there the error travels like any other: from a worker process to its rank, and from a rank to
the launcher.

Python runs its own handlers only after the interrupted instruction, which would never finish. So
the kernel calls this handler directly, through `ctypes`. On systems other than Linux nothing
happens.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_ext.disk.host_folder import host_folder
from megatron_ext.errors import DataError, MachineFault, MegatronExtError, loader_ends_with_parent
from megatron_ext.limits import SHARED_MEMORY, shared_memory_fault

_SIGINFO = 4  # SA_SIGINFO: pass the address to the handler
_CODE_AT = 8
_ADDRESS_AT = 16
"""Byte offsets in the kernel's ``siginfo_t``. At `_CODE_AT` is the code for what sent the signal (0
or less if a process did), and at `_ADDRESS_AT` the memory address that could not be accessed.
"""
_DELETED = " (deleted)"
_LATER = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGINT
"""A spare signal that the handler of SIGBUS sends to make Python call `_raise` (unused on systems
other than Linux).
"""

mapped_sizes: dict[str, int] = {}
"""Path of each mapped file -> its size in bytes when `remember_size` was called."""
_inodes: dict[str, tuple[int, int]] = {}
"""Each path in `mapped_sizes` -> (id of the process that recorded the size, the file's inode then).
A different inode now means that another file has replaced the mapped one.
"""
_fault: list[MegatronExtError] = []
"""Errors for bus errors that Python has not raised yet; `_raise` raises only the last one."""


class _Action(ctypes.Structure):
    """The C library's ``struct sigaction`` on Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_before = _Action()
"""The handler of SIGBUS that `tell_bus_errors` replaced; it gets all other bus errors."""


def remember_size(path: str | os.PathLike[str], size: int) -> None:
    """Record the size of a file that this process maps, so that a later truncation is noticed."""
    real = os.path.realpath(path)
    with suppress(OSError):
        _inodes[real] = os.getpid(), os.stat(real).st_ino
        mapped_sizes[real] = size


def cut_file(number: int | None = None) -> DataError | None:
    """Return an error if a file that this process maps has been truncated; None if all are whole.

    This finds truncations that raise no SIGBUS: up to the end of its last page, a truncated file
    reads as zeros. A file that was replaced by another one of the same name is not reported, since
    the old content stays readable.

    Args:
        number: check only file ``number`` modulo the number of files, so that successive numbers
            check all in turn; None checks all at once.
    """
    paths = list(mapped_sizes)
    if number is not None and paths:
        paths = [paths[number % len(paths)]]
    host = host_folder()
    for path in paths:
        if host is not None and Path(path).is_relative_to(host):
            continue
        with suppress(OSError):
            status = os.stat(path)
            is_same = (os.getpid(), status.st_ino) == _inodes[path]
            if is_same and status.st_size < mapped_sizes[path]:
                return DataError(cut_in_use(path, status.st_size, mapped_sizes.pop(path)))
    return None


def cut_in_use(path: str | os.PathLike[str], size: int, had: int | str) -> str:
    """Return the error message for a file that was truncated while a run used it.

    Args:
        size: present size of the file in bytes.
        had: size in bytes when the file was opened, or a text such as "more than 4096".
    """
    return (
        f"{os.fspath(path)} was cut while it was in use: it has {size} bytes, but had {had} when "
        "it was opened; copy or make it again, and leave it alone while a run uses it."
    )


@dataclass(frozen=True)
class _Mapped:
    """A mapping of a file into this process's memory, from address ``begin`` to ``end``.

    ``offset`` is the position in the file, in bytes, of what is at ``begin``.
    """

    begin: int
    end: int
    offset: int
    writable: bool
    path: str


def _mapped_at(address: int) -> _Mapped | None:
    """Return the file mapped at an address of this process; None if there is none."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            words = line.rstrip("\n").split(maxsplit=5)
            begin, end = (int(word, 16) for word in words[0].split("-"))
            if begin <= address < end:
                path = words[5] if len(words) == 6 else ""
                return _Mapped(begin, end, int(words[2], 16), "w" in words[1], path)
    return None


def _fault_at(mapped: _Mapped, address: int) -> MegatronExtError:
    """Return the error for a mapped file whose content at ``address`` cannot be provided.

    The file has been truncated, its in-memory file system is full, or its disk does not answer.
    """
    path = mapped.path.removesuffix(_DELETED)
    place = mapped.offset + address - mapped.begin
    in_memory = path.startswith((SHARED_MEMORY, "/memfd:"))
    size: int | None = None
    with suppress(OSError):
        # The link leads to the mapped file itself, even if another file has its name by now.
        size = os.stat(f"/proc/self/map_files/{mapped.begin:x}-{mapped.end:x}").st_size
    if size is None and mapped.path == path:
        with suppress(OSError):
            size = os.stat(path).st_size
    if size is not None and size <= place:
        # A mapping extends to the end of the page in which its file ended.
        least = mapped.offset + mapped.end - mapped.begin - mmap.PAGESIZE
        had = mapped_sizes.get(os.path.realpath(path), f"more than {least}")
        host = host_folder()
        is_of_run = host is not None and Path(path).is_relative_to(host)
        kind = MachineFault if is_of_run else DataError
        return kind(cut_in_use(path, size, had))
    if in_memory:
        said = shared_memory_fault()
        return MachineFault(f"{said[:1].upper()}{said[1:]}.")
    return MachineFault(
        f"{path} could not be read at byte {place}, since its disk or file server gives no answer "
        "(SIGBUS); check it, and start again."
    )


def _on_bus_error(_number: int, information: int, _context: int) -> None:
    """Handle SIGBUS: note an error that names the file, and let the interrupted instruction finish.

    If no file is mapped at the address, pass the signal to the previous handler. ``information`` is
    the address of the kernel's ``siginfo_t``.
    """
    is_sent = ctypes.c_int.from_address(information + _CODE_AT).value <= 0
    try:
        address = 0 if is_sent else ctypes.c_uint64.from_address(information + _ADDRESS_AT).value
        mapped = _mapped_at(address)
        if mapped is not None and mapped.path:
            fault = _fault_at(mapped, address)
            if _put_zeros(address, mapped):
                _fault.append(fault)
                # Python handles the signal after this handler has returned.
                signal.pthread_kill(threading.get_ident(), _LATER)
                return
    except Exception as error:
        with suppress(OSError):
            os.write(2, f"the cause of SIGBUS is unknown: {error!r}\n".encode())
    # The instruction runs again and now kills the process.
    ctypes.CDLL(None).sigaction(signal.SIGBUS, ctypes.byref(_before), None)
    if is_sent:
        os.kill(os.getpid(), signal.SIGBUS)


def _put_zeros(address: int, mapped: _Mapped) -> bool:
    """Map zeros in place of a file, from the page of ``address`` to the end of the mapping.

    Return whether that worked.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    access = mmap.PROT_READ | (mmap.PROT_WRITE if mapped.writable else 0)
    fixed = 0x10  # MAP_FIXED
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed | 0x4000  # MAP_NORESERVE
    return bool(library.mmap(begin, mapped.end - begin, access, kind, -1, 0) == begin)


def _raise(_number: int, frame: FrameType | None) -> None:
    """Raise the newest error that `_on_bus_error` has noted.

    This is Python's handler of the signal that `_on_bus_error` sends after a fault. Python runs it
    in the main thread; if that thread is itself inside `_on_bus_error`, the signal is sent again.
    """
    while frame is not None:
        if frame.f_code is _on_bus_error.__code__:
            # The fault is another thread's. This thread may still be handling one of its own.
            signal.pthread_kill(threading.get_ident(), _LATER)
            return
        frame = frame.f_back
    if _fault:
        fault = _fault[-1]
        _fault.clear()
        raise fault


_HANDLER: Any = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
    _on_bus_error
)
"""`_on_bus_error` as a C function; a global, so that it exists as long as the process."""


def tell_bus_errors() -> None:
    """Make a bus error of this process raise a DataError or a MachineFault that names the file.

    Call this in the main thread, after any other handler of SIGBUS has been installed.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    own = _Action()
    previous = _Action()
    own.handler = ctypes.cast(_HANDLER, ctypes.c_void_p).value
    own.flags = _SIGINFO
    library.sigaction(signal.SIGBUS, None, ctypes.byref(previous))
    if previous.handler != own.handler:
        ctypes.pointer(_before)[0] = previous
    bit = _LATER - 1
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    own.mask[bit // bits] = 1 << bit % bits
    signal.signal(_LATER, _raise)
    library.sigaction(signal.SIGBUS, ctypes.byref(own), None)


def worker_setup() -> Callable[[int], None]:
    """Return a function that a DataLoader can call in each worker process as ``worker_init_fn``.

    The function makes the worker exit when this process exits. It also turns a bus error in the
    worker into an error that names the file; torch would blame shared memory.
    """
    return partial(_set_up_worker, loader_ends_with_parent())


def _set_up_worker(end_with_parent: Callable[[int], None], worker: int) -> None:
    end_with_parent(worker)
    tell_bus_errors()
