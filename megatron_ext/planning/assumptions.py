"""What a plan assumes because nothing but a measurement could say it, with where it comes from.

Shares multiply the figures of `hardware`. A plan prints the table; a file of the doctor
(``tools/doctor.py --json``) takes the place of the first three.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.planning.contents import Ranks
from megatron_ext.planning.hardware import Gpu

MIB = 2**20


def _assumed(value: float, what: str, source: str) -> Any:
    return field(default=value, metadata={"what": what, "source": source})


@dataclass(frozen=True)
class Efficiency:
    """Shares of rates that are reached; each says in its metadata what it is and why.

    Raises:
        ConfigError: a share outside of (0, 1], or of [0, 1] for what is hidden.
    """

    products: float = _assumed(
        0.73,
        "of the datasheet's bf16 or fp32 rate, by a large matrix product",
        "720 of 989 TFLOP/s on H100 (SemiAnalysis, MI300X vs H100 vs H200, 2024)",
    )
    fp8_products: float = _assumed(
        0.65,
        "of the datasheet's fp8 rate, by a large 8-bit product",
        "1280 of 1979 TFLOP/s on H100 (the same)",
    )
    copies: float = _assumed(
        0.90,
        "of the datasheet's memory bandwidth, by a copy",
        "about 3.0 of 3.35 TB/s on H100, as STREAM-like benchmarks report",
    )
    layers: float = _assumed(
        0.85,
        "of the rate of a large product, by those of layers, attention among them",
        "chosen so that runs come to the MFU of 0.38 to 0.47 that Llama 3 (arXiv:2407.21783, "
        "table 4) and Megatron-LM's README report on H100",
    )
    kernels: float = _assumed(
        0.85,
        "of the rate of a copy, by kernels that read and write",
        "a guess; eager kernels of several inputs stay below a copy",
    )
    links: float = _assumed(
        0.75,
        "of a link's bandwidth, by collectives",
        "about 350 of 450 GB/s on H100 (NVIDIA/nccl issue 864)",
    )
    hidden: float = _assumed(
        0.80,
        "of the replicas' exchange that overlaps, where the run asks for overlap",
        "a guess; the first and the last bucket are never hidden",
    )

    def __post_init__(self) -> None:
        found = [
            f"`{name}` ({value}) must be above 0 and at most 1; use 0.7."
            for name, value in vars(self).items()
            if not (0 <= value <= 1) or (value == 0 and name != "hidden")
        ]
        if found:
            raise ConfigError(found)


DEFAULT = Efficiency()


@dataclass(frozen=True)
class Rates:
    """What a kind of GPU is taken to reach, in operations and bytes a second.

    Attributes:
        gpu: the kind.
        efficiency: what is assumed.
    """

    gpu: Gpu
    efficiency: Efficiency = DEFAULT

    def products(self, width: int) -> float:
        """Of the products of layers, of numbers with ``width`` bytes.

        Raises:
            ConfigError: fp8 on a GPU without it.
        """
        measured, share = self.gpu.measured, self.efficiency.layers
        if measured is not None and width == 2:
            return measured.bf16 * share
        if measured is not None and width == 1 and measured.fp8 is not None:
            return measured.fp8 * share
        reached = self.efficiency.fp8_products if width == 1 else self.efficiency.products
        return self.gpu.peak(width) * reached * share

    @property
    def memory(self) -> float:
        """Of kernels that read and write."""
        measured, efficiency = self.gpu.measured, self.efficiency
        copied = self.gpu.memory_bandwidth * efficiency.copies
        return (copied if measured is None else measured.copy) * efficiency.kernels

    def link(self, span: int) -> float:
        """Between ranks of which ``span`` neighbours form a group."""
        link = self.gpu.link if span <= self.gpu.per_node else self.gpu.network
        return link * self.efficiency.links


@dataclass(frozen=True)
class Reserve:
    """Bytes on a GPU that torch's tensors never fill.

    Attributes:
        context: CUDA's context and the code of its kernels; 0.4 to 0.6 GiB are usual.
        matrix_library: cuBLAS and cuBLASLt, a workspace each: torch takes 32 MiB on Hopper and
            newer, 8 MiB on others (``aten/src/ATen/cuda/CublasHandlePool.cpp``), for the stream of
            the computation and one beside it.
        channels: NCCL's buffers: 4 MiB (``NCCL_BUFFSIZE``) both ways on 24 channels of each group
            of ranks.
        fragments: share of what is activated that the allocator's blocks leave unused; a guess.
    """

    context: int
    matrix_library: int
    channels: int
    fragments: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))


CONTEXT = 600 * MIB
BUFFER, CHANNELS = 4 * MIB, 24
FRAGMENTS = 0.05


def reserve(gpu: Gpu, ranks: Ranks, moving: int) -> Reserve:
    """What is kept free on a GPU.

    Args:
        gpu: the kind.
        ranks: whose groups talk.
        moving: bytes of activations and of the moment, which the allocator cuts and joins.
    """
    replicas = ranks.dp * ranks.cp
    groups = [ranks.tp, ranks.cp, replicas, ranks.ep]
    count = sum(size > 1 for size in groups) + 2 * (ranks.pp > 1)
    workspace = (32 if gpu.hopper else 8) * MIB
    return Reserve(
        context=CONTEXT,
        matrix_library=2 * 2 * workspace,
        channels=count * 2 * CHANNELS * BUFFER,
        fragments=round(FRAGMENTS * moving),
    )


def assumed(gpu: Gpu, efficiency: Efficiency = DEFAULT) -> list[tuple[str, str, str, bool]]:
    """Name, value, what it is a share of and its source; whether a measurement replaces it."""
    replaced = {"products", "copies"} if gpu.measured is not None else set[str]()
    if gpu.measured is not None and gpu.measured.fp8 is not None:
        replaced.add("fp8_products")
    return [
        (
            x.name,
            f"{getattr(efficiency, x.name):.2f}",
            f"{x.metadata['what']}; {x.metadata['source']}",
            x.name in replaced,
        )
        for x in fields(efficiency)
    ]
