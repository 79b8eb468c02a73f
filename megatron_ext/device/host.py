"""The host of a process: cores, memory, shared memory, process limits and RDMA cards."""

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
    """The resources of the host or container that one process may use.

    Attributes:
        cores: number of cores; a fraction if a container limits the processor time.
        memory: bytes of main memory.
        shared_memory: bytes of ``/dev/shm``, None if it does not exist.
        open_files: number of files that may be open at a time; None without limit.
        locked_memory: bytes that may be locked against swapping; None without limit.
        rdma: names of the RDMA network cards.
    """

    cores: float
    memory: int
    shared_memory: int | None
    open_files: int | None
    locked_memory: int | None
    rdma: tuple[str, ...]


def this_host() -> Host:
    """Return the resources that the operating system grants this process."""
    return Host(
        cores=_cores(),
        memory=min(psutil.virtual_memory().total, _number(CGROUP / "memory.max") or 2**63),
        shared_memory=shutil.disk_usage(SHARED).total if Path(SHARED).is_dir() else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        rdma=tuple(sorted(card.name for card in RDMA.iterdir())) if RDMA.is_dir() else (),
    )


def _cores() -> float:
    """Return the number of cores that the process affinity and the container's quota allow."""
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
