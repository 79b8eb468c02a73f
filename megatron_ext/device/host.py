"""The host of a process: cores, memory, shared memory, limits of a process, RDMA cards."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
SHARED = "/dev/shm"
RDMA = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Host:
    """The limits of what one process may take of its host or container; None without a limit.

    Attributes:
        cores: number of cores; a fraction where a container limits the processor time.
        shared_memory: bytes that ``/dev/shm`` holds, None where there is none.
        locked_memory: bytes that may be kept from being swapped.
        rdma: names of network cards that write into other hosts' memory.
    """

    cores: float
    memory: int
    shared_memory: int | None
    open_files: int | None
    locked_memory: int | None
    rdma: tuple[str, ...]


def this_host() -> Host:
    """Ask the operating system what this process may take."""
    return Host(
        cores=_cores(),
        memory=min(psutil.virtual_memory().total, _number(CGROUP / "memory.max") or 2**63),
        shared_memory=shutil.disk_usage(SHARED).total if Path(SHARED).is_dir() else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        rdma=tuple(sorted(card.name for card in RDMA.iterdir())) if RDMA.is_dir() else (),
    )


def _cores() -> float:
    """Return the cores that this process may run on, or its container's share of time."""
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _words(CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        return min(float(mask or 1), int(quota[0]) / int(quota[1]))
    return float(mask or 1)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
