"""What GPUs can do: rates, memory and links from NVIDIA's datasheets, or measured by the doctor.

Rates are dense (datasheets quote twice as much with sparsity). Links are bytes a second in one
direction: NVLink's datasheet figure counts both, so it is halved here. Between nodes the table
assumes one InfiniBand port for each GPU, 400 Gbit/s with Hopper and Blackwell (DGX H100/H200/B200),
200 Gbit/s with Ampere (DGX A100).

Sources: NVIDIA A100 Tensor Core GPU Datasheet (nvidia-a100-datasheet-nvidia-us-2188504),
NVIDIA H100 Tensor Core GPU Datasheet, NVIDIA H200 Tensor Core GPU Datasheet, NVIDIA HGX and DGX
B200 datasheets (a system's figures divided by its eight GPUs), NVIDIA L40S Datasheet.

What a run reaches of these rates is in no datasheet: `assumptions` has what is assumed of it.

GPUs as ``tools/doctor.py --json`` found them.

Numbers of bytes as people read them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError

GB = 10**9
TFLOPS = 10**12


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: short, as the table has it.
        bf16: dense bfloat16 rate, operations a second.
        fp8: dense fp8 rate; None where there is none.
        fp32: rate of float32 products without TensorFloat.
        memory: bytes.
        memory_bandwidth: bytes a second.
        link: to another GPU of the node, bytes a second in one direction.
        network: to a GPU of another node, the same.
        per_node: GPUs of a node.
        hopper: Hopper or newer, whose matrix library takes more memory.
        measured: what the doctor measured of this very machine; None for datasheets alone.
    """

    name: str
    bf16: float
    fp8: float | None
    fp32: float
    memory: int
    memory_bandwidth: float
    link: float
    network: float
    per_node: int = 8
    hopper: bool = False
    measured: Measured | None = None

    def peak(self, width: int) -> float:
        """The dense rate of products of numbers with ``width`` bytes.

        Raises:
            ConfigError: fp8 on a GPU without it.
        """
        rate = {1: self.fp8, 2: self.bf16, 4: self.fp32}[width]
        if rate is None:
            raise ConfigError(
                f"The GPU {self.name} has no fp8 products, but `--fp8-format` asks for them; plan "
                "for H100, H200, B200 or L40S, or leave `--fp8-format` out."
            )
        return rate


@dataclass(frozen=True)
class Measured:
    """Rates of a machine, see `inspect.doctor.findings.Rates`.

    Attributes:
        bf16: operations a second of a large bfloat16 product.
        fp8: of an 8-bit one; None where there is none.
        copy: bytes a second that a copy within the memory reads and writes.
        source: the file.
    """

    bf16: float
    fp8: float | None
    copy: float
    source: str


def _gpu(
    name: str,
    rates: tuple[float, float | None, float],
    memory: tuple[int, float],
    links: tuple[float, float],
    *,
    hopper: bool = False,
) -> Gpu:
    """From TFLOP/s, GB, GB/s."""
    bf16, fp8, fp32 = rates
    return Gpu(
        name=name,
        bf16=bf16 * TFLOPS,
        fp8=None if fp8 is None else fp8 * TFLOPS,
        fp32=fp32 * TFLOPS,
        memory=memory[0] * GB,
        memory_bandwidth=memory[1] * GB,
        link=links[0] * GB,
        network=links[1] * GB,
        hopper=hopper,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40GB", (312, None, 19.5), (40, 1555), (300, 25)),
        _gpu("A100", (312, None, 19.5), (80, 2039), (300, 25)),
        _gpu("L40S", (362, 733, 91.6), (48, 864), (32, 25)),
        _gpu("H100", (989, 1979, 67), (80, 3350), (450, 50), hopper=True),
        _gpu("H200", (989, 1979, 67), (141, 4800), (450, 50), hopper=True),
        _gpu("B200", (2250, 4500, 80), (180, 8000), (900, 50), hopper=True),
    )
}


def gpu_named(name: str) -> Gpu:
    """A GPU of the table, or of a file that the doctor wrote.

    Args:
        name: as the table has it, in any case; or a path that ends in ``.json``.

    Raises:
        ConfigError: a name that the table lacks, or a file that does not say what is needed.
    """
    if name.endswith(".json"):
        return gpu_of_file(name)
    found = {key.lower(): gpu for key, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise ConfigError(
            f"`--gpu` ({name}) must be one of {', '.join(GPUS)}, or a file .json that "
            "`tools/doctor.py --json` wrote."
        )
    return found


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
        return _gpu_of_measured(slowest, path)
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


def _gpu_of_measured(found: dict[str, Any], path: str) -> Gpu:
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


def size(count: float) -> str:
    """Bytes in GB, small ones in MB (powers of ten), a dash for none."""
    if not count:
        return "–"
    return f"{count / GB:,.2f} GB" if count >= GB / 10 else f"{count / 1e6:,.2f} MB"
