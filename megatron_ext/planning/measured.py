"""GPUs as ``tools/doctor.py --json`` found them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.planning.hardware import GB, GPUS, Gpu, Measured

PCIE = 25.0 * GB
"""Bytes a second each way between GPUs of which nothing is known but the slot, PCIe 4.0 x16."""
FP32_SHARE = 1 / 16
"""Of a bf16 rate, that of float32 products on GPUs that the table lacks; about that of H100."""
_RULE = "must be what `tools/doctor.py --json > machine.json` wrote on a machine with GPUs"


def gpu_of_file(path: str) -> Gpu:
    """The GPUs of a machine, the slowest of them where they differ.

    Figures that the doctor cannot measure, which are those of links and networks, are the
    datasheet's where the table has the kind, and else those of PCIe.

    Raises:
        ConfigError: no such file, another one, or one without measured rates.
    """
    given = f"`--dry-run-gpu` ({path})"
    found = _gpus(path, given)
    rated = [gpu for gpu in found if isinstance(gpu.get("rates"), dict)]
    if not rated:
        raise ConfigError(
            f"{given} holds no measured rates; let `tools/doctor.py --json` measure, without "
            "`--no-measure`."
        )
    try:
        slowest = min(rated, key=lambda gpu: float(gpu["rates"]["bf16"]))
        return _gpu(slowest, path)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{given} {_RULE}, but its rates cannot be read.") from error


def _gpus(path: str, given: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ConfigError(f"{given} cannot be read ({said}); it {_RULE}.") from error
    gpus = content.get("gpus") if isinstance(content, dict) else None
    if not isinstance(gpus, list) or not all(isinstance(gpu, dict) for gpu in gpus):
        raise ConfigError(f"{given} has no list of GPUs; it {_RULE}.")
    if not gpus:
        raise ConfigError(f"{given} was written where torch found no GPU; it {_RULE}.")
    return gpus


def _gpu(found: dict[str, Any], path: str) -> Gpu:
    rates, name = found["rates"], str(found["name"])
    fp8 = None if rates["fp8"] is None else float(rates["fp8"])
    measured = Measured(float(rates["bf16"]), fp8, float(rates["copy"]), path)
    positive = (measured.bf16, measured.copy, *(() if fp8 is None else (fp8,)))
    memory = int(found["memory"])
    if not all(0 < rate < float("inf") for rate in positive) or memory <= 0:
        raise ValueError("rates must be positive")
    known = _known(name, memory)
    if known is None:
        return Gpu(
            name=name,
            bf16=measured.bf16,
            fp8=fp8,
            fp32=measured.bf16 * FP32_SHARE,
            memory=memory,
            memory_bandwidth=measured.copy,
            link=PCIE,
            network=PCIE,
            hopper=int(found["capability"][0]) >= 9,
            measured=measured,
        )
    figures = {**vars(known), "name": name, "memory": memory, "measured": measured}
    return Gpu(**figures)


def _known(name: str, memory: int) -> Gpu | None:
    """The kind in the table; of kinds with one name the one whose memory comes closest."""
    kinds = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name.split()]
    kinds += [gpu for gpu in GPUS.values() if f"{gpu.name.partition('-')[0]}-" in name]
    return min(kinds, key=lambda gpu: abs(gpu.memory - memory), default=None)
