"""Turns a bus error into a sentence that names the file, instead of the end of the process.

The kernel sends SIGBUS for a page of a mapped file that it cannot provide: the file was cut since
it was mapped, its file system in memory is full, or its disk does not answer. Libraries guess at
the cause, and only ever at shared memory. The handler here looks up the file that lies at the
address, puts zeros in its place so that the interrupted instruction can end, and lets Python raise
the error at once, so that it takes the way of any other: from a worker process to its rank, and
from a rank to the launcher.

Python runs its handlers after the interrupted instruction, which would never end. So the kernel
calls this one directly, through `ctypes`. On other systems than Linux nothing happens.
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

_SIGINFO = 4  # SA_SIGINFO: the handler gets the address.
_CODE_AT = 8
_ADDRESS_AT = 16
"""Offsets in bytes in the kernel's description of a signal: of its origin, which is at most 0 where
a process has sent it, and of the address."""
_DELETED = " (deleted)"
_LATER = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGINT
"""The signal that lets Python raise the error after the interrupted instruction."""

mapped_sizes: dict[str, int] = {}
"""By path, the size in bytes that a mapped file had when it was checked."""
_inodes: dict[str, tuple[int, int]] = {}
"""By path, the process that checked it and the number of the very file then; another one may have
taken its name since."""
_fault: list[MegatronExtError] = []
"""The newest fault, until Python raises it."""


class _Action(ctypes.Structure):
    """The C library's ``struct sigaction`` on Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_before = _Action()
"""The handler of SIGBUS before this one."""


def remember_size(path: str | os.PathLike[str], size: int) -> None:
    """Note the size that a file has while it is mapped, to tell it if the file is cut later."""
    real = os.path.realpath(path)
    with suppress(OSError):
        _inodes[real] = os.getpid(), os.stat(real).st_ino
        mapped_sizes[real] = size


def cut_file(number: int | None = None) -> DataError | None:
    """Return what is wrong with a mapped file of this process that is shorter than it was.

    Up to the end of its last page such a file reads as zeros, without a signal. A file that another
    one has replaced stays whole in memory. None means that all are whole.

    Args:
        number: look at one file alone, in turn for rising numbers; by default at all.
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
    """Return a sentence on a file that has become shorter since a run has opened it."""
    return (
        f"{os.fspath(path)} was cut while it was in use: it has {size} bytes, but had {had} when "
        "it was opened; copy or make it again, and leave it alone while a run uses it."
    )


@dataclass(frozen=True)
class _Mapped:
    """A part of a file in this process's memory, from ``begin`` to ``end`` in bytes."""

    begin: int
    end: int
    offset: int
    writable: bool
    path: str


def _mapped_at(address: int) -> _Mapped | None:
    """Return the file that lies at an address of this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            words = line.rstrip("\n").split(maxsplit=5)
            begin, end = (int(word, 16) for word in words[0].split("-"))
            if begin <= address < end:
                path = words[5] if len(words) == 6 else ""
                return _Mapped(begin, end, int(words[2], 16), "w" in words[1], path)
    return None


def _fault_at(mapped: _Mapped, address: int) -> MegatronExtError:
    """Return what is wrong with the file that lies at an address, as an error."""
    path = mapped.path.removesuffix(_DELETED)
    place = mapped.offset + address - mapped.begin
    in_memory = path.startswith((SHARED_MEMORY, "/memfd:"))
    size: int | None = None
    with suppress(OSError):
        # The link leads to the very file, also where another one has its name by now.
        size = os.stat(f"/proc/self/map_files/{mapped.begin:x}-{mapped.end:x}").st_size
    if size is None and mapped.path == path:
        with suppress(OSError):
            size = os.stat(path).st_size
    if size is not None and size <= place:
        # A mapping ends with the page that its file ended in.
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
    """Handle SIGBUS; where its address lies in no file, leave it to the handler before."""
    is_sent = ctypes.c_int.from_address(information + _CODE_AT).value <= 0
    try:
        address = 0 if is_sent else ctypes.c_uint64.from_address(information + _ADDRESS_AT).value
        mapped = _mapped_at(address)
        if mapped is not None and mapped.path:
            fault = _fault_at(mapped, address)
            if _put_zeros(address, mapped):
                _fault.append(fault)
                # It waits until this handler has ended.
                signal.pthread_kill(threading.get_ident(), _LATER)
                return
    except Exception as error:
        with suppress(OSError):
            os.write(2, f"the cause of SIGBUS is unknown: {error!r}\n".encode())
    # The instruction is tried again and ends the process.
    ctypes.CDLL(None).sigaction(signal.SIGBUS, ctypes.byref(_before), None)
    if is_sent:
        os.kill(os.getpid(), signal.SIGBUS)


def _put_zeros(address: int, mapped: _Mapped) -> bool:
    """Put memory with zeros in the place of a mapped file, from an address to its end."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    access = mmap.PROT_READ | (mmap.PROT_WRITE if mapped.writable else 0)
    fixed = 0x10  # MAP_FIXED
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed | 0x4000  # MAP_NORESERVE
    return bool(library.mmap(begin, mapped.end - begin, access, kind, -1, 0) == begin)


def _raise(_number: int, frame: FrameType | None) -> None:
    """Raise the newest fault in the main thread, a moment after it happened."""
    while frame is not None:
        if frame.f_code is _on_bus_error.__code__:
            # Another thread's fault; this thread still handles one of its own.
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
"""Kept, since the kernel calls it as long as the process lives."""


def tell_bus_errors() -> None:
    """Let a bus error of this process raise a DataError or a MachineFault that names the file.

    Call this in the main thread, after whatever else handles SIGBUS.
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
    """Return a DataLoader's ``worker_init_fn``: each worker ends with this process, and tells bus
    errors, which torch takes for a lack of shared memory.
    """
    return partial(_set_up_worker, loader_ends_with_parent())


def _set_up_worker(end_with_parent: Callable[[int], None], worker: int) -> None:
    end_with_parent(worker)
    tell_bus_errors()
