"""The machine that is examined, and the limits of its host.

`ThisMachine` holds every question that the doctor asks, so that a test can put a made-up machine in
its place. No answer can end or stall this process: programs and imports run as processes of their
own, each with a time limit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from megatron_ext.device.host import SHARED, Host, this_host
from megatron_ext.inspect.doctor.findings import Finding

GIB = 2**30
MIN_SHARED_MEMORY = 1 * GIB
MIN_OPEN_FILES = 4096
IMPORT_SECONDS = 120.0
PROGRAM_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        code: its exit code, negative for a signal; None where it ran out of time.
        output, errors: what it wrote to standard output and standard error.
    """

    code: int | None
    output: str = ""
    errors: str = ""

    @property
    def reason(self) -> str:
        """Return in a few words why the program failed."""
        if self.code is None:
            return "it ran out of time"
        if self.code < 0:
            return f"it was ended by signal {-self.code}"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"it left with exit code {self.code}"


class ThisMachine:
    """The machine that this process runs on, and its Python environment."""

    environ: Mapping[str, str] = os.environ

    def version(self, distribution: str) -> str | None:
        """Return the version of an installed distribution, None where there is none."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def requirements(self, distribution: str) -> list[str] | None:
        """Return what a distribution requires, None where it is not installed."""
        try:
            return importlib.metadata.requires(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            return None

    def folder(self, module: str) -> Path | None:
        """Return the folder of a top-level package, found without importing it."""
        spec = _spec(module)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]) if places else None

    def has_module(self, module: str) -> bool:
        """Return whether a top-level module exists, without importing it."""
        return _spec(module) is not None

    def program(self, *names: str) -> str | None:
        """Return the path of the first program that exists."""
        return next((path for name in names if (path := shutil.which(name))), None)

    def file(self, path: Path) -> bool:
        """Return whether a file exists."""
        return path.is_file()

    def host(self) -> Host:
        """Return what a process may take of the host."""
        return this_host()

    def run(self, command: Sequence[str], seconds: float = PROGRAM_SECONDS) -> Outcome:
        """Run a program to its end, or to the time limit."""
        try:
            done = subprocess.run(
                list(command), capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(None)
        except OSError as error:
            return Outcome(127, errors=str(error))
        return Outcome(done.returncode, done.stdout, done.stderr)


def _spec(module: str) -> ModuleSpec | None:
    """Find a top-level module; a name that something shadows oddly counts as absent."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def run_python(here: ThisMachine, code: str, seconds: float = IMPORT_SECONDS) -> Outcome:
    """Run a few lines in a Python process of their own."""
    return here.run([sys.executable, "-W", "ignore", "-c", code], seconds)


def ask_python(
    here: ThisMachine, code: str, seconds: float = IMPORT_SECONDS
) -> dict[str, Any] | Outcome:
    """Return what a few lines print as JSON on their last line, or how they failed."""
    outcome = run_python(here, code, seconds)
    if outcome.code != 0:
        return outcome
    lines = outcome.output.splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return Outcome(1, outcome.output, "it printed nothing that could be read")
    return found


def host_findings(host: Host, num_gpus: int) -> list[Finding]:
    """Report what stands in the way of a run's ranks, loaders and messages.

    Args:
        host: the limits of a process.
        num_gpus: GPUs that torch can use, each of which gets a rank.
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
    if host.shared_memory < MIN_SHARED_MEMORY:
        return Finding(SHARED, "low", None, detail, cost, install)
    return Finding(SHARED, "found", None, detail)


def _open_files(host: Host) -> Finding:
    name = "open files"
    if host.open_files is None or host.open_files >= MIN_OPEN_FILES:
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
