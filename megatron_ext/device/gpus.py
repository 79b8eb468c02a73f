"""Kinds of GPUs by NVIDIA's datasheets: rates, memory and links.

Rates are dense (datasheets quote twice as much with sparsity). Links are bytes a second in one
direction: NVLink's datasheet figure counts both, so it is halved here. Between nodes the table
assumes one InfiniBand port for each GPU, 400 Gbit/s with Hopper and Blackwell (DGX H100/H200/B200),
200 Gbit/s with Ampere (DGX A100).

Sources: NVIDIA A100 Tensor Core GPU Datasheet (nvidia-a100-datasheet-nvidia-us-2188504),
NVIDIA H100 Tensor Core GPU Datasheet, NVIDIA H200 Tensor Core GPU Datasheet, NVIDIA HGX and DGX
B200 datasheets (a system's figures divided by its eight GPUs), NVIDIA L40S Datasheet.

What a run reaches of these rates is in no datasheet: `device.rates` measures it, and
`planning.hardware` says what a plan assumes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import ConfigError

GB = 10**9
TFLOPS = 10**12


@dataclass(frozen=True)
class Measured:
    """Rates of a machine as the doctor measured them.

    Attributes:
        bf16: operations a second of a large bfloat16 product.
        fp8: operations a second of an 8-bit product; None on GPUs without them.
        copy: bytes a second that a copy within the memory reads and writes.
        source: the file that holds the measurement.
    """

    bf16: float
    fp8: float | None
    copy: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: short name, as the table has it.
        bf16: dense bfloat16 rate, operations a second.
        fp8: dense fp8 rate; None on GPUs without it.
        fp32: rate of float32 products without TensorFloat.
        memory: bytes.
        memory_bandwidth: bytes a second.
        link: bytes a second in one direction to another GPU of the node.
        network: the same to a GPU of another node.
        per_node: GPUs of a node.
        hopper: Hopper or newer, whose matrix library takes more memory.
        measured: rates measured on this very machine; None for the datasheet alone.
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
        """Return the dense rate of products of numbers with ``width`` bytes.

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


def _gpu(
    name: str,
    rates: tuple[float, float | None, float],
    memory: tuple[int, float],
    links: tuple[float, float],
    *,
    hopper: bool = False,
) -> Gpu:
    """Return a kind, given its figures in TFLOP/s, GB and GB/s."""
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
"""The kinds that a run can be planned for (`config.reporting.GPU_NAMES`)."""

PEAK_FLOPS_BF16 = {name: gpu.bf16 for name, gpu in GPUS.items()} | {
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "A800": 312e12,
    "A40": 150e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 rates by a part of the device's name."""


def peak_flops(device_name: str | None) -> float | None:
    """Return the dense bfloat16 rate of a GPU as torch names it, None where it is not known."""
    if device_name is None:
        return None
    matches = [name for name in PEAK_FLOPS_BF16 if name in device_name]
    return PEAK_FLOPS_BF16[max(matches, key=len)] if matches else None
