"""The result of an examination: one finding for each thing looked at, and the lines to print."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ext.device.host import Host
from megatron_ext.device.rates import FP8, engine_recipes

Status = Literal["found", "missing", "low", "broken", "unknown", "not needed"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: the thing, as its makers write it.
        status: ``low`` is present but too little; ``broken`` is present but cannot be used;
            ``unknown`` could not be looked at here.
        version: as the thing itself or its metadata says, None where it is not known.
        detail: a sentence on what was seen, or nothing.
        cost: a sentence on what a run loses by its absence; empty where it is found.
        install: the command that mends it; empty where nothing is to be done.
        required: no run starts without it.
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
        """Return whether a run would fail at its start."""
        return self.required and self.status in ("missing", "broken")


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use.

    Attributes:
        index: as torch counts, after ``CUDA_VISIBLE_DEVICES``.
        capability: compute capability, (9, 0) for Hopper.
        memory: bytes of the device.
        rates: the measured rates, None where nothing was measured.
        note: why there are no rates.
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    rates: Rates | None = None
    note: str = ""

    @property
    def has_bf16(self) -> bool:
        """Return whether its matrix units take bfloat16: Ampere (8.0) and newer."""
        return self.capability >= (8, 0)

    @property
    def has_fp8(self) -> bool:
        """Return whether its matrix units take 8-bit floats: Ada (8.9) and newer."""
        return self.capability >= FP8

    @property
    def fp8_recipes(self) -> dict[str, tuple[str, ...]]:
        """Return the values of ``--fp8-recipe`` that fit, by ``--transformer-impl``.

        They follow from the makers' documents, not from a measurement.
        """
        torch = ("delayed", "tensorwise", "rowwise") if self.has_fp8 else ()
        return {"torch": torch, "transformer_engine": engine_recipes(self.capability)}


@dataclass(frozen=True)
class Rates:
    """The measured rates of a GPU.

    Attributes:
        bf16: operations per second of a bfloat16 matrix product.
        fp8: operations per second of an 8-bit product with one scale for each operand; None where
            the GPU has no such unit.
        copy: bytes per second that a copy within the device's memory reads and writes.
    """

    bf16: float
    fp8: float | None
    copy: float


@dataclass(frozen=True)
class Examination:
    """Everything that was found on a machine.

    Attributes:
        findings: software and drivers, in the order in which they are printed.
        gpus: the GPUs that torch can use.
        unknown: sentences on what cannot be known here.
    """

    findings: tuple[Finding, ...]
    host: Host
    gpus: tuple[Gpu, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def stops_runs(self) -> bool:
        """Return whether a run would fail at its start."""
        return any(finding.stops_runs for finding in self.findings)

    def finding(self, name: str) -> Finding:
        """Return the finding of a name.

        Raises:
            KeyError: nothing of this name was looked at.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return all as JSON values: operations and bytes per second, memory in bytes."""
        found = dataclasses.asdict(self)
        for gpu, shown in zip(self.gpus, found["gpus"], strict=True):
            shown["fp8_recipes"] = gpu.fp8_recipes
        return found


STATUS_WORDS = {
    "found": "ok",
    "missing": "absent",
    "low": "LOW",
    "broken": "BROKEN",
    "unknown": "unknown",
    "not needed": "not needed",
}


def report(examination: Examination) -> list[str]:
    """Return the lines that a person reads."""
    width = max(len(finding.name) for finding in examination.findings)
    lines = [line for f in examination.findings for line in _finding(f, width)]
    for gpu in examination.gpus:
        lines += ["", *_gpu(gpu)]
    if examination.unknown:
        lines += ["", "Torch can use no GPU here, so this cannot be known:"]
        lines += [f"  - {text}" for text in examination.unknown]
    lines += ["", _verdict(examination)]
    return lines


def _finding(finding: Finding, width: int) -> Iterator[str]:
    words = [STATUS_WORDS[finding.status], finding.version or "", finding.detail]
    yield f"{finding.name:<{width}}  {' '.join(word for word in words if word)}"
    indent = " " * (width + 2)
    if finding.cost:
        yield f"{indent}what it costs: {finding.cost}"
    if finding.install:
        yield f"{indent}mend by: {finding.install}"


def _gpu(gpu: Gpu) -> Iterator[str]:
    capability = ".".join(map(str, gpu.capability))
    yield (
        f"GPU {gpu.index}: {gpu.name}, compute capability {capability}, "
        f"{gpu.memory / 2**30:.1f} GiB"
    )
    if not gpu.has_bf16:
        yield "  bf16: its matrix units do not take it; `--fp16` is what they take"
    yield _recipes(gpu)
    if gpu.rates is None:
        yield f"  rates: {gpu.note}"
        return
    yield f"  bf16 matrix product, measured: {gpu.rates.bf16 / 1e12:.0f} TFLOP/s"
    if gpu.rates.fp8 is not None:
        yield f"  fp8 matrix product, measured: {gpu.rates.fp8 / 1e12:.0f} TFLOP/s"
    yield f"  copy within its memory, read and written: {gpu.rates.copy / 1e12:.2f} TB/s"


def _recipes(gpu: Gpu) -> str:
    if not gpu.has_fp8:
        return "  fp8: its matrix units do not take it"
    shown = "; ".join(f"{impl}: {', '.join(names)}" for impl, names in gpu.fp8_recipes.items())
    return f"  fp8 recipes by --transformer-impl: {shown}"


def _verdict(examination: Examination) -> str:
    stopping = [finding.name for finding in examination.findings if finding.stops_runs]
    if stopping:
        return f"No run can start: mend {', '.join(stopping)} first."
    if examination.gpus:
        return f"Runs compute on {len(examination.gpus)} GPU(s)."
    return "Runs compute on the CPU, and their ranks talk over gloo."
