"""The host: cores, memory, shared memory, limits of a process, network cards for RDMA."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_ext.doctor.findings import Finding

GIB = 2**30
SHARED_MEMORY_WANTED = 1 * GIB
OPEN_FILES_WANTED = 4096
CGROUP = Path("/sys/fs/cgroup")
SHARED = "/dev/shm"
RDMA = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Host:
    """What a process may take of the host.

    Attributes:
        cores: that it may run on; a part of one counts, where a container limits it.
        memory: bytes, of the container where it has a limit.
        shared_memory: bytes that ``/dev/shm`` holds, None where there is none.
        open_files: at once in a process, None without a limit.
        locked_memory: bytes that it may keep from being swapped, None without a limit.
        rdma: names of network cards that write into other hosts' memory.
    """

    cores: float
    memory: int
    shared_memory: int | None
    open_files: int | None
    locked_memory: int | None
    rdma: tuple[str, ...]


def this_host() -> Host:
    """Ask the operating system."""
    return Host(
        cores=_cores(),
        memory=min(psutil.virtual_memory().total, _number(CGROUP / "memory.max") or 2**63),
        shared_memory=shutil.disk_usage(SHARED).total if Path(SHARED).is_dir() else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        rdma=tuple(sorted(card.name for card in RDMA.iterdir())) if RDMA.is_dir() else (),
    )


def _cores() -> float:
    """Those of the process's mask, or the share of time that a container gives it."""
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


def host_findings(host: Host, num_gpus: int) -> list[Finding]:
    """What stands in the way of a run's ranks, loaders and messages.

    Args:
        host: the host.
        num_gpus: that torch can use, each of which gets a rank.
    """
    found = [_processor(host, num_gpus), _shared_memory(host), _open_files(host)]
    return [*found, *_rdma(host)] if num_gpus else found


def _processor(host: Host, num_gpus: int) -> Finding:
    detail = f"{host.cores:g} core(s), {host.memory / GIB:.1f} GiB of memory."
    if host.cores >= 2 * num_gpus:
        return Finding("host", "found", None, detail)
    cost = (
        f"{num_gpus} ranks launch kernels from one core each, and their `--num-workers` need more: "
        "GPUs wait for the host."
    )
    return Finding("host", "low", None, detail, cost)


def _shared_memory(host: Host) -> Finding:
    cost = (
        "Workers that load data hand batches over through it and die of SIGBUS when it is full; "
        "NCCL uses it between GPUs that do not reach each other."
    )
    install = "docker run --ipc=host, or --shm-size=16g; elsewhere mount -o remount,size=16G "
    install += SHARED
    if host.shared_memory is None:
        return Finding(SHARED, "missing", None, "", cost, install)
    detail = f"It holds {host.shared_memory / GIB:.2f} GiB."
    if host.shared_memory < SHARED_MEMORY_WANTED:
        return Finding(SHARED, "low", None, detail, cost, install)
    return Finding(SHARED, "found", None, detail)


def _open_files(host: Host) -> Finding:
    name = "open files"
    if host.open_files is None or host.open_files >= OPEN_FILES_WANTED:
        shown = "without a limit" if host.open_files is None else f"{host.open_files:,}"
        return Finding(name, "found", None, f"{shown} in a process (`ulimit -n`).")
    detail = f"{host.open_files:,} in a process (`ulimit -n`)."
    cost = "Datasets of many shards, and loaders of many workers, run out of them."
    return Finding(name, "low", None, detail, cost, "ulimit -n 65536")


def _rdma(host: Host) -> list[Finding]:
    name = "RDMA network"
    if not host.rdma:
        cost = "Nothing on one machine; between machines NCCL's messages go through TCP sockets."
        return [Finding(name, "missing", None, "No InfiniBand or RoCE card was found.", cost)]
    detail = ", ".join(host.rdma) + "."
    if host.locked_memory is None:
        return [Finding(name, "found", None, detail)]
    detail += f" A process may lock {host.locked_memory / GIB:.2f} GiB (`ulimit -l`)."
    cost = "NCCL must lock what the cards read, and fails between machines when it may not."
    return [Finding(name, "low", None, detail, cost, "ulimit -l unlimited")]
