"""Real faults in this process: a signal, a full disk, a flipped bit, a lost socket and others.

Only `inject` calls these functions. Each takes a `Target`, notes through ``target.note`` what it is
about to do, and then does it. The note comes first, since some of them do not return.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import psutil
import torch

from megatron_ext.layers.chunks import own_elements

_MIB = 1 << 20
_SPARE_MEMORY = 64 * _MIB
"""Bytes of address space left to a process whose memory is exhausted."""
_LARGEST_FILE = 64 << 10
"""Size in bytes beyond which no file can grow while a full disk is simulated."""
_SECONDS_FOR_A_SAVE = 2.0
"""The most seconds for which `damage_checkpoint` waits for a save to end."""
_TCP_INFO_BYTES_ACKED = 120
"""Offset of ``tcpi_bytes_acked`` in Linux's tcp_info; ``tcpi_bytes_received`` follows."""


class InjectedFault(RuntimeError):
    """The error that the fault "exception" raises."""


@dataclass
class Target:
    """A rank that a fault strikes, with everything that the fault needs.

    Attributes:
        note: records the fault; takes a text that says exactly what it strikes.
        random: draws what the fault strikes, such as the parameter whose bit is flipped.
        save: the folder of the run's checkpoints, if any.
        host: the run's folder of memory checkpoints on this machine, if any.
        chunks: the model chunks of this rank.
        fsync_fails: the byte that makes ``os.fsync`` fail once when it is 1, shared with forked
            processes.
        undo: functions that end the fault's effect; they are called some steps later.
    """

    note: Callable[[str], None]
    random: Random
    save: Path | None = None
    host: Path | None = None
    chunks: Sequence[torch.nn.Module] = ()
    fsync_fails: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1))
    undo: list[Callable[[], None]] = field(default_factory=list)


def kill(target: Target) -> None:
    """Kill this process by SIGKILL."""
    target.note("SIGKILL")
    os.kill(os.getpid(), signal.SIGKILL)


def stop(target: Target) -> None:
    """Stop this process by SIGSTOP, so that it hangs until it is killed."""
    target.note("SIGSTOP")
    os.kill(os.getpid(), signal.SIGSTOP)


def crash(target: Target) -> None:
    """Read from memory address 0, so that the kernel kills this process with SIGSEGV."""
    target.note("a read of address 0")
    ctypes.string_at(0)


def fail(target: Target) -> None:
    """Raise an `InjectedFault`."""
    target.note("an exception")
    raise InjectedFault("this exception was injected")


def exhaust_memory(target: Target) -> None:
    """Allocate memory up to a limit set for this process (RLIMIT_AS), so that torch raises."""
    limit = psutil.Process().memory_info().vms + _SPARE_MEMORY
    target.note(f"allocation beyond a limit of {limit >> 20} MiB")
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    blocks = []
    while True:
        blocks.append(torch.ones(4 * _MIB, dtype=torch.uint8))


def exhaust_group_memory(target: Target) -> None:
    """Allocate memory until the kernel kills this process at the limit of its control group."""
    limit = memory_limit()
    if limit is None or not has_small_memory_limit():
        raise InjectedFault("this process has no control group with a small limit of memory")
    target.note(f"allocation beyond the control group's {limit >> 20} MiB")
    blocks = []
    while True:
        blocks.append(torch.ones(4 * _MIB, dtype=torch.uint8))


def has_small_memory_limit() -> bool:
    """Return whether a control group allows this process at most half of the machine's memory."""
    limit = memory_limit()
    return limit is not None and limit <= psutil.virtual_memory().total // 2


def memory_limit() -> int | None:
    """Return the memory limit in bytes of this process's control group; None without one."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup/memory")
        name = "memory.limit_in_bytes"
        if number == "0":
            root = Path("/sys/fs/cgroup")
            name = "memory.max"
        elif "memory" not in controllers.split(","):
            continue
        file = root / path.lstrip("/") / name
        if file.is_file() and (text := file.read_text(encoding="utf-8").strip()).isdigit():
            return int(text)
    return None


def fill_disk(target: Target) -> None:
    """Simulate a full disk for some steps, for this process and its children.

    The kernel then refuses to let files grow beyond a limit (RLIMIT_FSIZE), with the error EFBIG
    instead of ENOSPC.
    """
    limited = [psutil.Process(), *psutil.Process().children(recursive=True)]
    target.note(f"files of at most {_LARGEST_FILE >> 10} KiB in {len(limited)} processes")
    for process in limited:
        with suppress(psutil.Error):
            before = process.rlimit(resource.RLIMIT_FSIZE)
            target.undo.append(partial(_give_back, process, before))
            process.rlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, before[1]))


def _give_back(process: psutil.Process, limits: tuple[int, int]) -> None:
    with suppress(psutil.Error):
        process.rlimit(resource.RLIMIT_FSIZE, limits)


def fail_fsync(target: Target) -> None:
    """Make the next ``os.fsync`` of this process, or of one that it has forked, raise EIO."""
    target.note("the next fsync")
    target.fsync_fails[0] = 1


def watch_fsync() -> mmap.mmap:
    """Replace ``os.fsync`` by a function that raises EIO once when the returned byte is set to 1.

    Processes that are forked later share the byte.
    """
    real = os.fsync
    fails = mmap.mmap(-1, 1)

    def fsync(descriptor: int) -> None:
        if fails[0]:
            fails[0] = 0
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    return fails


def damage_checkpoint(target: Target) -> None:
    """Change a byte in the newest checkpoint, delete all snapshots, and kill the rank by SIGKILL.

    The snapshots are deleted because a run that still has them does not read the checkpoint. First
    wait for a save that is under way, which would give the run a newer checkpoint.
    """
    until = time.monotonic() + _SECONDS_FOR_A_SAVE
    while target.save is not None and any(target.save.glob("iter_???????.*")):
        if time.monotonic() > until:
            break  # an earlier fault has left this half save
        time.sleep(0.005)
    folders = sorted(target.save.glob("iter_???????")) if target.save is not None else []
    if not folders:
        raise InjectedFault("there is no checkpoint to damage")
    victim = max(folders[-1].glob("*.distcp"), key=lambda path: path.stat().st_size)
    target.note(f"a byte of {victim.parent.name}/{victim.name}")
    if target.host is not None:
        shutil.rmtree(target.host / "snapshots", ignore_errors=True)
    with victim.open("r+b") as file:
        middle = victim.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 0xFF]))
    os.kill(os.getpid(), signal.SIGKILL)


def spoil_gradient(target: Target) -> None:
    """Make one element of one parameter's gradient NaN."""
    named = [(name, _gradient(p)) for name, p in _parameters(target) if p.requires_grad]
    name, gradient = target.random.choice([(n, g) for n, g in named if g is not None and g.numel()])
    index = target.random.randrange(gradient.numel())
    target.note(f"element {index} of the gradient of {name}")
    gradient.view(-1)[index] = float("nan")


def flip_bit(target: Target) -> None:
    """Flip one bit of one parameter."""
    kept = [(name, own_elements(parameter)) for name, parameter in _parameters(target)]
    name, parameter = target.random.choice([x for x in kept if x[1].numel()])
    numbers = parameter.view(-1).view(torch.uint8)
    index = target.random.randrange(numbers.numel())
    bit = target.random.randrange(8)
    target.note(f"bit {bit} of byte {index} of {name}")
    numbers[index] ^= 1 << bit


def _parameters(target: Target) -> list[tuple[str, torch.nn.Parameter]]:
    parameters = [pair for chunk in target.chunks for pair in chunk.named_parameters()]
    if not parameters:
        raise InjectedFault("the model has not been built yet")
    return parameters


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def cut_connection(target: Target) -> None:
    """Shut down this process's TCP connection that has carried the most bytes.

    A rank that was forked has no TCP connections except gloo's.
    """
    busiest = max(_connections(), key=lambda pair: pair[0], default=None)
    if busiest is None:
        raise InjectedFault("this process has no TCP connection")
    _, descriptor = busiest
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        target.note(f"the connection to {connection.getpeername()}")
        connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[int, int]]:
    """Yield the bytes carried by each TCP connection of this process, and its descriptor."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                carried = struct.unpack_from("QQ", info, _TCP_INFO_BYTES_ACKED)
                yield sum(carried), int(entry)


STRIKES: dict[str, Callable[[Target], None]] = {
    "SIGKILL": kill,
    "SIGSTOP": stop,
    "SIGSEGV": crash,
    "exception": fail,
    "memory": exhaust_memory,
    "memory kill": exhaust_group_memory,
    "full disk": fill_disk,
    "failed fsync": fail_fsync,
    "corrupt checkpoint": damage_checkpoint,
    "NaN gradient": spoil_gradient,
    "bit flip": flip_bit,
    "lost socket": cut_connection,
}
"""The function for each kind of fault, except "slow rank", which `inject` implements itself."""
FROM_ANY_THREAD = {"SIGKILL", "SIGSTOP", "SIGSEGV", "memory kill", "lost socket"}
"""Faults that a timer may inject at once; other delayed faults wait for the next event."""
