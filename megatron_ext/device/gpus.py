"""Kinds of GPUs: rates, memory and links by NVIDIA's datasheets, and what they can compute.

Memory is the least that torch reports ("GPU 0 has a total capacity of 79.10 GiB" on H100): more
than a datasheet's GB, which are GiB, of which the driver keeps some. Rates are dense (datasheets
quote twice as much with sparsity). Link rates are bytes a second in one direction: NVLink's figure
in the datasheet counts both directions and is halved here. Between nodes the table assumes one
InfiniBand port for each GPU, 400 Gbit/s with Hopper and Blackwell (DGX H100/H200/B200), 200 Gbit/s
with Ampere (DGX A100).

Sources: NVIDIA A100 Tensor Core GPU Datasheet (nvidia-a100-datasheet-nvidia-us-2188504), NVIDIA
H100 Tensor Core GPU Datasheet, NVIDIA H200 Tensor Core GPU Datasheet, NVIDIA HGX and DGX B200
datasheets (a system's figures divided by its eight GPUs), NVIDIA L40S Datasheet.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import ConfigError

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


def _gpu(name: str, bf16: float, fp8: float | None, fp32: float, gb: float, *rates: float) -> Gpu:
    """Return a `Gpu` from figures in TFLOP/s for rates, and in GB (10^9) for memory.

    ``rates`` are memory bandwidth, link and network, in GB/s.
    """
    eight = None if fp8 is None else fp8 * TFLOPS
    bandwidth, link, network = (rate * GB for rate in rates)
    numbers = (bf16 * TFLOPS, eight, fp32 * TFLOPS, round(gb * GB), bandwidth, link, network)
    return Gpu(name, *numbers, hopper=name in ("H100", "H200", "B200"))


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40GB", 312, None, 19.5, 42.2, 1555, 300, 25),
        _gpu("A100", 312, None, 19.5, 84.9, 2039, 300, 25),
        _gpu("L40S", 362, 733, 91.6, 47.6, 864, 32, 25),
        _gpu("H100", 989, 1979, 67, 84.9, 3350, 450, 50),
        _gpu("H200", 989, 1979, 67, 150.0, 4800, 450, 50),
        _gpu("B200", 2250, 4500, 80, 191.5, 8000, 900, 50),
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
