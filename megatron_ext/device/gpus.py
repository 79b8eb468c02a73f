"""Kinds of GPUs: rates, memory and links by NVIDIA's datasheets, and measured rates.

Rates are dense (datasheets quote twice as much with sparsity). Link rates are bytes a second in one
direction: NVLink's figure in the datasheet counts both directions and is halved here. Between nodes
the table assumes one InfiniBand port for each GPU, 400 Gbit/s with Hopper and Blackwell (DGX
H100/H200/B200), 200 Gbit/s with Ampere (DGX A100).

Sources: NVIDIA A100 Tensor Core GPU Datasheet (nvidia-a100-datasheet-nvidia-us-2188504), NVIDIA
H100 Tensor Core GPU Datasheet, NVIDIA H200 Tensor Core GPU Datasheet, NVIDIA HGX and DGX B200
datasheets (a system's figures divided by its eight GPUs), NVIDIA L40S Datasheet.

``python -m megatron_ext.device.gpus --index 0`` prints the measured rates of a GPU as JSON. It runs
in a separate process, so that a broken driver kills only that one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_ext.errors import ConfigError, DeviceNotSupported

GB = 10**9
TFLOPS = 10**12


@dataclass(frozen=True)
class Measured:
    """Rates of a GPU that ``tools/doctor.py --json`` measured and wrote into the file ``source``.

    Attributes:
        bf16, fp8: operations a second of large matrix products; fp8 is None on GPUs without 8-bit
            units.
        copy: bytes a second (read and written) of a copy within the GPU's memory.
    """

    bf16: float
    fp8: float | None
    copy: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        bf16, fp8, fp32: dense floating-point operations per second; fp8 is None if unsupported, and
            fp32 is without TF32.
        memory: bytes.
        memory_bandwidth: bytes per second.
        link: bytes per second in one direction, to a GPU of the same node.
        network: bytes per second in one direction, to a GPU of another node.
        hopper: whether it is Hopper or newer, where cuBLAS uses more memory.
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
        """Return the datasheet's peak operations per second of dense matrix products.

        ``width`` is the bytes of a number: 1 for fp8, 2 for bf16, 4 for fp32.

        Raises:
            ConfigError: ``width`` is 1, and the GPU has no fp8.
        """
        rate = {1: self.fp8, 2: self.bf16, 4: self.fp32}[width]
        if rate is None:
            raise ConfigError(
                f"The GPU {self.name} has no fp8 products, but `--fp8-format` asks for them; plan "
                "for H100, H200, B200 or L40S, or leave `--fp8-format` out."
            )
        return rate


def _gpu(name: str, bf16: float, fp8: float | None, fp32: float, memory: int, *rates: float) -> Gpu:
    """Return a `Gpu` from figures in the units of datasheets: TFLOP/s for rates, GB for memory.

    ``rates`` are memory bandwidth, link and network, in GB/s.
    """
    eight = None if fp8 is None else fp8 * TFLOPS
    bandwidth, link, network = (rate * GB for rate in rates)
    numbers = (bf16 * TFLOPS, eight, fp32 * TFLOPS, memory * GB, bandwidth, link, network)
    return Gpu(name, *numbers, hopper=name in ("H100", "H200", "B200"))


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40GB", 312, None, 19.5, 40, 1555, 300, 25),
        _gpu("A100", 312, None, 19.5, 80, 2039, 300, 25),
        _gpu("L40S", 362, 733, 91.6, 48, 864, 32, 25),
        _gpu("H100", 989, 1979, 67, 80, 3350, 450, 50),
        _gpu("H200", 989, 1979, 67, 141, 4800, 450, 50),
        _gpu("B200", 2250, 4500, 80, 180, 8000, 900, 50),
    )
}
"""Name -> `Gpu`, for each kind that a run can be planned for (`config.output.GPU_NAMES`)."""

PEAK_FLOPS_BF16 = {name: gpu.bf16 for name, gpu in GPUS.items()} | {
    "H100 PCIe": 756e12, "H800": 989e12, "GB200": 2500e12, "A800": 312e12, "A40": 150e12,
    "A10G": 70e12, "RTX 4090": 165e12,
}  # fmt: skip
"""Part of the device name that torch reports -> peak dense bfloat16 operations per second."""


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's peak dense bfloat16 operations per second; None if its name is unknown.

    ``device_name`` is the name that torch reports.
    """
    matches = [name for name in PEAK_FLOPS_BF16 if name in device_name]
    return PEAK_FLOPS_BF16[max(matches, key=len)] if matches else None


Capability = tuple[int, int]

FP8: Capability = (8, 9)
"""The lowest compute capability with 8-bit matrix products (Ada)."""

FIRST: dict[str, Capability] = {
    "delayed": FP8, "tensorwise": FP8, "blockwise": (9, 0), "mxfp8": (10, 0),
}  # fmt: skip
"""The lowest compute capability that supports each fp8 recipe of Transformer Engine."""

CONSUMER_BLACKWELL: Capability = (12, 0)
"""The lowest compute capability of consumer Blackwell GPUs, which lack MXFP8, unlike (10, 0)."""


def engine_recipes(capability: Capability) -> tuple[str, ...]:
    """Return the fp8 recipes of Transformer Engine that a GPU supports, as in ``--fp8-recipe``.

    The rules are those of ``transformer_engine/pytorch/quantization.py`` 2.9.
    """
    return tuple(
        recipe
        for recipe, first in FIRST.items()
        if first <= capability and not (recipe == "mxfp8" and capability >= CONSUMER_BLACKWELL)
    )


MATRIX = 8192
COPIED = 2**30


def seconds_of(
    work: Callable[[], object], device: torch.device, *, repeats: int = 10, warm_ups: int = 3
) -> float:
    """Return the median time of one call of ``work``, in seconds.

    ``repeats`` calls are timed after ``warm_ups`` others, by CUDA events on a GPU and by a clock on
    a CPU.
    """
    for _ in range(warm_ups):
        work()
    if device.type != "cuda":
        return statistics.median(timeit.repeat(work, number=1, repeat=repeats))
    mark = partial(torch.cuda.Event, enable_timing=True)
    marks = [(mark(), mark()) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    milliseconds: float = statistics.median(start.elapsed_time(end) for start, end in marks)
    return milliseconds / 1e3


def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies 8-bit floats: Ada (sm_89), Hopper and newer do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8


def matrix_rate(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = MATRIX
) -> float:
    """Measure the operations per second of a product of two ``[size, size]`` matrices of ``dtype``.

    A product counts as 2 size^3 operations. The entries are normal random numbers: zeros would take
    less power and let the device clock higher. The product of matrices in ``float8_e4m3fn`` is
    computed with scale factors of 1, and is in bfloat16.

    Raises:
        DeviceNotSupported: ``dtype`` is ``float8_e4m3fn``, which the device does not multiply.
    """
    eight = dtype == torch.float8_e4m3fn
    if eight and not has_fp8(device):
        raise DeviceNotSupported(
            f"The matrix rate of 8-bit floats was asked for, but {device} has no unit for them; it "
            "takes an NVIDIA GPU of compute capability 8.9 or newer."
        )
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16).to(dtype)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16).to(dtype)
    if eight:
        one = torch.ones((), device=device)
        scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one, use_fast_accum=True)
        # cuBLAS needs the second fp8 factor in column-major order.
        seconds = seconds_of(lambda: scaled(a, b.t(), out_dtype=torch.bfloat16), device)
    else:
        out = torch.empty_like(a)
        seconds = seconds_of(lambda: torch.mm(a, b, out=out), device)
    return 2 * size**3 / seconds


def copy_rate(device: torch.device, size: int = COPIED) -> float:
    """Measure a copy of ``size`` bytes within the device's memory; return bytes per second.

    Each byte counts twice: it is read and written.
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def rates(
    device: torch.device, size: int = MATRIX, copied: int = COPIED
) -> dict[str, float | None]:
    """Measure a device; return the rates ``bf16``, ``fp8`` (None if unsupported) and ``copy``.

    ``size`` is the argument of `matrix_rate`, ``copied`` the size of `copy_rate` in bytes.
    """
    eight = matrix_rate(device, torch.float8_e4m3fn, size) if has_fp8(device) else None
    half = matrix_rate(device, torch.bfloat16, size)
    return {"bf16": half, "fp8": eight, "copy": copy_rate(device, copied)}


def main(argv: Sequence[str]) -> int:
    """Print the `rates` of the GPU ``--index`` as JSON; return the exit code, 1 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="of the GPU, as torch counts")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("torch can use no GPU here", file=sys.stderr)
        return 1
    device = torch.device("cuda", args.index)
    torch.cuda.set_device(device)
    print(json.dumps(rates(device)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
