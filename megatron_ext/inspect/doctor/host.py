"""The machine that the doctor examines, its findings, and the checks of cores, memory and limits.

All access to the machine goes through `ThisMachine`, which a test can replace. Programs and
imports run in separate processes, each with a time limit.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal

from megatron_ext.device.gpus import FP8, engine_recipes
from megatron_ext.device.host import SHARED, Host, this_host

Status = Literal["found", "missing", "low", "broken", "unknown", "not needed"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: ``low`` means too little, ``broken`` means present but unusable, and ``unknown``
            means that it cannot be checked here.
        detail: what the check observed.
        cost: what a run loses if the status is not ``found``.
        install: the command that installs or repairs what was checked.
        required: whether no run can start without it.
    """

    name: str
    status: Status
    version: str | None = None
    detail: str = ""
    cost: str = ""
    install: str = ""
    required: bool = False

    @property
    def stops_runs(self) -> bool:
        return self.required and self.status in ("missing", "broken")


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use.

    Attributes:
        index: number of the GPU among those in ``CUDA_VISIBLE_DEVICES``, from 0.
        capability: compute capability, such as (9, 0) for Hopper.
        memory: size of the GPU's memory in bytes.
        rates: the measured rates; None if they were not measured.
        note: why there are no rates.
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    rates: Rates | None = None
    note: str = ""

    @property
    def has_fp8(self) -> bool:
        """Return whether the GPU's tensor cores support fp8: Ada (8.9) and newer."""
        return self.capability >= FP8

    @property
    def fp8_recipes(self) -> dict[str, tuple[str, ...]]:
        """Return the GPU's ``--fp8-recipe`` values for each ``--transformer-impl``."""
        torch = ("delayed", "tensorwise", "rowwise") if self.has_fp8 else ()
        return {"torch": torch, "transformer_engine": engine_recipes(self.capability)}


@dataclass(frozen=True)
class Rates:
    """The measured rates of a GPU.

    ``bf16`` and ``fp8`` are floating-point operations per second in matrix products; ``fp8`` is
    None without fp8 units. ``copy`` is the bytes per second, read plus written, of a copy within
    the GPU's memory.
    """

    bf16: float
    fp8: float | None
    copy: float


@dataclass(frozen=True)
class Examination:
    """The results of all checks of a machine; ``unknown`` names what cannot be checked there."""

    findings: tuple[Finding, ...]
    host: Host
    gpus: tuple[Gpu, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def stops_runs(self) -> bool:
        return any(finding.stops_runs for finding in self.findings)

    def finding(self, name: str) -> Finding:
        return {finding.name: finding for finding in self.findings}[name]

    def to_dict(self) -> dict[str, Any]:
        content = dataclasses.asdict(self)
        for gpu, shown in zip(self.gpus, content["gpus"], strict=True):
            shown["fp8_recipes"] = gpu.fp8_recipes
        return content


GIB = 2**30
MIN_SHARED_MEMORY = 1 * GIB
MIN_OPEN_FILES = 4096
IMPORT_SECONDS = 120.0
PROGRAM_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and its output; the exit code is None if it ran out of time."""

    code: int | None
    output: str = ""
    errors: str = ""

    @property
    def reason(self) -> str:
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
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def requirements(self, distribution: str) -> list[str] | None:
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
        return _spec(module) is not None

    def program(self, *names: str) -> str | None:
        return next((path for name in names if (path := shutil.which(name))), None)

    def file(self, path: Path) -> bool:
        return path.is_file()

    def host(self) -> Host:
        return this_host()

    def run(self, command: Sequence[str], seconds: float = PROGRAM_SECONDS) -> Outcome:
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
    """Return the import spec of a top-level module; None if it is absent or its lookup fails."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def run_python(here: ThisMachine, code: str, seconds: float = IMPORT_SECONDS) -> Outcome:
    return here.run([sys.executable, "-W", "ignore", "-c", code], seconds)


def ask_python(
    here: ThisMachine, code: str, seconds: float = IMPORT_SECONDS
) -> dict[str, Any] | Outcome:
    """Run Python code in a separate process, and return the JSON of its last line of output.

    If the code fails, return how it ended instead.
    """
    outcome = run_python(here, code, seconds)
    if outcome.code != 0:
        return outcome
    lines = outcome.output.splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return Outcome(1, outcome.output, "it printed nothing that could be read")
    return answer


def host_findings(host: Host, num_gpus: int) -> list[Finding]:
    """Report cores, open files, shared memory and RDMA, with the cost to a run if too low."""
    detail = f"{host.cores:g} core(s), {host.memory / GIB:.1f} GiB of memory."
    cores = Finding("host", "found", None, detail)
    if host.cores < 2 * num_gpus:
        cost = (
            f"{num_gpus} ranks launch kernels from one core each, and their `--num-workers` need "
            "more: GPUs wait for the host."
        )
        cores = replace(cores, status="low", cost=cost)
    shown = "without a limit" if host.open_files is None else f"{host.open_files:,}"
    files = Finding("open files", "found", None, f"{shown} in a process (`ulimit -n`).")
    if host.open_files is not None and host.open_files < MIN_OPEN_FILES:
        cost = "Datasets of many shards, and loaders of many workers, run out of them."
        files = replace(files, status="low", cost=cost, install="ulimit -n 65536")
    findings = [cores, _shared_memory(host), files]
    return [*findings, _rdma(host)] if num_gpus else findings


def _shared_memory(host: Host) -> Finding:
    cost = (
        "Workers that load data hand batches over through it and die of SIGBUS when it is full; "
        "NCCL uses it between GPUs that do not reach each other."
    )
    elsewhere = f"mount -o remount,size=16G {SHARED}"
    install = f"docker run --ipc=host, or --shm-size=16g; elsewhere {elsewhere}"
    if host.shared_memory is None:
        return Finding(SHARED, "missing", None, "", cost, install)
    detail = f"It holds {host.shared_memory / GIB:.2f} GiB."
    if host.shared_memory < MIN_SHARED_MEMORY:
        return Finding(SHARED, "low", None, detail, cost, install)
    return Finding(SHARED, "found", None, detail)


def _rdma(host: Host) -> Finding:
    name = "RDMA network"
    if not host.rdma:
        cost = "Nothing on one machine; between machines NCCL's messages go through TCP sockets."
        return Finding(name, "missing", None, "No InfiniBand or RoCE card was found.", cost)
    detail = ", ".join(host.rdma) + "."
    if host.locked_memory is None:
        return Finding(name, "found", None, detail)
    detail += f" A process may lock {host.locked_memory / GIB:.2f} GiB (`ulimit -l`)."
    cost = "NCCL must lock what the cards read, and fails between machines when it may not."
    return Finding(name, "low", None, detail, cost, "ulimit -l unlimited")


STATUS_WORDS = {"found": "ok", "missing": "absent", "low": "LOW", "broken": "BROKEN"}
"""Words that are printed instead of some statuses."""


def report(examination: Examination) -> list[str]:
    width = max(len(finding.name) for finding in examination.findings)
    lines = [line for f in examination.findings for line in _finding(f, width)]
    for gpu in examination.gpus:
        lines += ["", *_gpu(gpu)]
    if examination.unknown:
        lines += ["", "Torch can use no GPU here, so this cannot be known:"]
        lines += [f"  - {text}" for text in examination.unknown]
    verdict = "Runs compute on the CPU, and their ranks talk over gloo."
    if examination.gpus:
        verdict = f"Runs compute on {len(examination.gpus)} GPU(s)."
    stopping = [finding.name for finding in examination.findings if finding.stops_runs]
    if stopping:
        verdict = f"No run can start: mend {', '.join(stopping)} first."
    return [*lines, "", verdict]


def _finding(finding: Finding, width: int) -> Iterator[str]:
    status = STATUS_WORDS.get(finding.status, finding.status)
    words = [status, finding.version or "", finding.detail]
    yield f"{finding.name:<{width}}  {' '.join(word for word in words if word)}"
    indent = " " * (width + 2)
    if finding.cost:
        yield f"{indent}what it costs: {finding.cost}"
    if finding.install:
        yield f"{indent}mend by: {finding.install}"


def _gpu(gpu: Gpu) -> Iterator[str]:
    capability = ".".join(map(str, gpu.capability))
    memory = f"{gpu.memory / GIB:.1f} GiB"
    yield f"GPU {gpu.index}: {gpu.name}, compute capability {capability}, {memory}"
    if gpu.capability < (8, 0):  # older than Ampere
        yield "  bf16: its matrix units do not take it; `--fp16` is what they take"
    shown = "; ".join(f"{impl}: {', '.join(names)}" for impl, names in gpu.fp8_recipes.items())
    if gpu.has_fp8:
        yield f"  fp8 recipes by --transformer-impl: {shown}"
    else:
        yield "  fp8: its matrix units do not take it"
    if gpu.rates is None:
        yield f"  rates: {gpu.note}"
        return
    yield f"  bf16 matrix product, measured: {gpu.rates.bf16 / 1e12:.0f} TFLOP/s"
    if gpu.rates.fp8 is not None:
        yield f"  fp8 matrix product, measured: {gpu.rates.fp8 / 1e12:.0f} TFLOP/s"
    yield f"  copy within its memory, read and written: {gpu.rates.copy / 1e12:.2f} TB/s"
