"""What an examination of a machine comes to: one finding for each thing that was looked at."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.device.rates import FP8, engine_recipes

if TYPE_CHECKING:
    from megatron_ext.inspect.doctor.host import Host

Status = Literal["found", "missing", "low", "broken", "unknown", "not needed"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing, as its makers write it.
        status: ``low`` is there but too little; ``broken`` is there but cannot be used;
            ``unknown`` could not be looked at here.
        version: as the thing itself or its metadata says, None where it is not known.
        detail: what was seen, a sentence or nothing.
        cost: what a run loses by its absence, a sentence; empty where it is found.
        install: the line that mends it; empty where nothing is to be done.
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
        """A run would fail at its start."""
        return self.required and self.status in ("missing", "broken")


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use.

    Attributes:
        index: as torch counts, after ``CUDA_VISIBLE_DEVICES``.
        name: of the device.
        capability: compute capability, (9, 0) for Hopper.
        memory: bytes of the device.
        rates: see `Rates`; None where nothing was measured.
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
        """Its matrix units take bfloat16: Ampere (8.0) and newer."""
        return self.capability >= (8, 0)

    @property
    def has_fp8(self) -> bool:
        """Its matrix units take 8-bit floats: Ada (8.9), Hopper (9.0) and newer."""
        return self.capability >= FP8

    @property
    def fp8_recipes(self) -> dict[str, tuple[str, ...]]:
        """``--fp8-recipe`` by ``--transformer-impl``; the makers' words, not a measurement."""
        torch = ("delayed", "tensorwise", "rowwise") if self.has_fp8 else ()
        return {"torch": torch, "transformer_engine": engine_recipes(self.capability)}


@dataclass(frozen=True)
class Rates:
    """What was measured on a GPU.

    Attributes:
        bf16: operations per second of a bfloat16 matrix product.
        fp8: of an 8-bit one with one scale for each operand; None where there is no such unit.
        copy: bytes per second that a copy within the device's memory reads and writes.
    """

    bf16: float
    fp8: float | None
    copy: float


@dataclass(frozen=True)
class Examination:
    """Everything that was found on a machine.

    Attributes:
        findings: of software and drivers.
        host: see `Host`.
        gpus: that torch can use.
        unknown: sentences on what cannot be known here.
    """

    findings: tuple[Finding, ...]
    host: Host
    gpus: tuple[Gpu, ...] = ()
    unknown: tuple[str, ...] = field(default=())

    @property
    def stops_runs(self) -> bool:
        """A run would fail at its start."""
        return any(finding.stops_runs for finding in self.findings)

    def finding(self, name: str) -> Finding:
        """The one of a name.

        Raises:
            KeyError: nothing of this name was looked at.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: rates in operations and bytes per second, memory in bytes."""
        found = dataclasses.asdict(self)
        for gpu, shown in zip(self.gpus, found["gpus"], strict=True):
            shown["fp8_recipes"] = gpu.fp8_recipes
        return found
