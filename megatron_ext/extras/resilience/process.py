"""The operating system's view of a rank: whether it lives, its memory, and out-of-memory kills."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ProcessState:
    """The state of a process.

    Attributes:
        alive: False once the process has ended, even if its parent has not reaped it yet.
        stopped: whether a signal such as SIGSTOP has stopped it.
        cpu_seconds: processor time of all its threads.
        resident: bytes that it occupies in main memory.
    """

    alive: bool = True
    stopped: bool = False
    cpu_seconds: float = 0.0
    resident: int = 0


GONE = ProcessState(alive=False)


def process_states(pids: Iterable[int]) -> dict[int, ProcessState]:
    """Return the states of processes, by process id."""
    return {pid: _state(pid) for pid in pids}


def _state(pid: int) -> ProcessState:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            status = process.status()
            times = process.cpu_times()
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return GONE
            stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            return ProcessState(True, stopped, times.user + times.system, process.memory_info().rss)
    except psutil.NoSuchProcess:
        return GONE
    except psutil.Error:
        return ProcessState()


class MemoryKills:
    """Detects processes that the kernel has killed for lack of memory.

    It compares the counters ``oom_kill`` of this process's control groups (version 1 and 2), or the
    machine's counter if the groups have none, with their values at the previous call. ``root`` is
    "/" except in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._counts()

    def happened(self) -> bool:
        """Return whether the kernel has killed a process for lack of memory since the last call.

        The first call covers the time since this object was created.
        """
        before, self._before = self._before, self._counts()
        return any(count > before.get(path, 0) for path, count in self._before.items())

    def _counts(self) -> dict[Path, int]:
        counts = dict[Path, int]()
        for path in self._paths():
            if counts and path.name == "vmstat":
                break  # it includes processes outside these groups
            with suppress(OSError, ValueError):
                for line in path.read_text(encoding="ascii").splitlines():
                    name, _, count = line.partition(" ")
                    if name == "oom_kill":
                        counts[path] = int(count)
        return counts

    def _paths(self) -> list[Path]:
        """Return files that may hold an out-of-memory counter: the groups', then the machine's."""
        groups = self._root / "sys/fs/cgroup"
        paths = [groups / "memory.events", groups / "memory/memory.oom_control"]
        with suppress(OSError):
            own = (self._root / "proc/self/cgroup").read_text(encoding="ascii")
            for line in own.splitlines():
                _, controllers, name = line.split(":", 2)
                if not controllers:
                    paths.append(groups / name.lstrip("/") / "memory.events")
                elif "memory" in controllers.split(","):
                    paths.append(groups / "memory" / name.lstrip("/") / "memory.oom_control")
        return [*paths, self._root / "proc/vmstat"]


def gibibytes(size: int) -> str:
    """Return a size in bytes as text in GiB."""
    return f"{size / 2**30:.2f} GiB"
