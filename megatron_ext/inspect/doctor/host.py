"""The host: cores, memory, shared memory, limits of a process, network cards for RDMA.

What the examination looks at, in one place, so that a test can put a made-up machine there.

Nothing that could end or stall this process happens in it: programs and imports run apart, each
with a time limit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from megatron_ext.inspect.doctor.findings import Finding

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


IMPORT_SECONDS = 120.0
PROGRAM_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        code: its exit code, negative for a signal; None where it ran out of time.
        output: what it wrote.
        errors: what it wrote to standard error.
    """

    code: int | None
    output: str = ""
    errors: str = ""

    @property
    def reason(self) -> str:
        """Why it failed, in a few words."""
        if self.code is None:
            return "it ran out of time"
        if self.code < 0:
            return f"it was ended by signal {-self.code}"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"it left with exit code {self.code}"


class Surroundings(Protocol):
    """A machine and the Python environment on it."""

    environ: Mapping[str, str]

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution, None where there is none."""

    def requirements(self, distribution: str) -> list[str] | None:
        """What a distribution requires, None where it is not installed."""

    def folder(self, module: str) -> Path | None:
        """Where a top-level package lies, found without importing it."""

    def has_module(self, module: str) -> bool:
        """Whether a top-level module exists, found without importing it."""

    def program(self, *names: str) -> str | None:
        """Path of the first program that exists."""

    def file(self, path: Path) -> bool:
        """Whether a file exists."""

    def host(self) -> Host:
        """What a process may take."""

    def run(self, command: Sequence[str], seconds: float = PROGRAM_SECONDS) -> Outcome:
        """Run a program to its end."""


class ThisMachine:
    """The machine that this process runs on."""

    environ: Mapping[str, str] = os.environ

    def version(self, distribution: str) -> str | None:
        """See `Surroundings.version`."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def requirements(self, distribution: str) -> list[str] | None:
        """See `Surroundings.requirements`."""
        try:
            return importlib.metadata.requires(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            return None

    def folder(self, module: str) -> Path | None:
        """See `Surroundings.folder`."""
        spec = _spec(module)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]) if places else None

    def has_module(self, module: str) -> bool:
        """See `Surroundings.has_module`."""
        return _spec(module) is not None

    def program(self, *names: str) -> str | None:
        """See `Surroundings.program`."""
        return next((path for name in names if (path := shutil.which(name))), None)

    def file(self, path: Path) -> bool:
        """See `Surroundings.file`."""
        return path.is_file()

    def host(self) -> Host:
        """See `Surroundings.host`."""
        return this_host()

    def run(self, command: Sequence[str], seconds: float = PROGRAM_SECONDS) -> Outcome:
        """See `Surroundings.run`."""
        try:
            done = subprocess.run(
                list(command), capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(None)
        except OSError as error:
            return Outcome(127, errors=str(error))
        return Outcome(done.returncode, done.stdout, done.stderr)


def _spec(module: str) -> Any:
    """Where a top-level module is; a name that shadows it oddly counts as absent."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def run_python(here: Surroundings, code: str, seconds: float = IMPORT_SECONDS) -> Outcome:
    """Run a few lines in a Python of their own."""
    return here.run([sys.executable, "-W", "ignore", "-c", code], seconds)


def ask_python(
    here: Surroundings, code: str, seconds: float = IMPORT_SECONDS
) -> dict[str, Any] | Outcome:
    """What a few lines print as JSON on their last line, or how they failed."""
    outcome = run_python(here, code, seconds)
    if outcome.code != 0:
        return outcome
    lines = outcome.output.splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return Outcome(1, outcome.output, "it printed nothing that could be read")
    return found
