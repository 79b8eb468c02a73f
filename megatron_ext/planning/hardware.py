"""The GPU that a run is planned for, and the fractions of its datasheet rates that runs reach.

The GPU is one of the kinds in `device.gpus`, or a GPU that ``tools/doctor.py --json`` has measured.
`Efficiency` holds the assumed fractions and their sources. Measured rates are used in place of its
``products`` in 16 bits, ``fp8_products`` and ``copies``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from megatron_ext.config.output import unknown_gpu
from megatron_ext.device.gpus import GB, GPUS, Gpu, Measured
from megatron_ext.disk.reading import UnreadableFile, read_json
from megatron_ext.errors import ConfigError
from megatron_ext.planning.kernels import Phase, Work
from megatron_ext.planning.stages import Ranks

MIB = 2**20


PCIE = 25.0 * GB
"""Assumed bytes a second in one direction between GPUs with unknown links (PCIe 4.0 x16)."""
FP32_SHARE = 1 / 16
"""Assumed ratio of the fp32 rate to the bf16 rate for GPUs that `GPUS` lacks; close to H100's."""
_RULE = "must be what `tools/doctor.py --json > machine.json` wrote on a machine with GPUs"


def gpu_named(name: str, flag: str = "--dry-run-gpu") -> Gpu:
    """Return the GPU with this name in `GPUS`, or a measured one if ``name`` is a ``.json`` file.

    ``tools/doctor.py --json`` writes such a file. If it lists several GPUs, the one with the lowest
    bf16 rate is returned. Links and networks are not measured: their rates come from the datasheet
    if `GPUS` has this kind of GPU, and are `PCIE` otherwise. ``flag`` is named in errors.

    Raises:
        ConfigError: `GPUS` lacks the name, or the file has no readable rates.
    """
    if not name.endswith(".json"):
        listed = {key.lower(): gpu for key, gpu in GPUS.items()}.get(name.lower())
        if listed is None:
            raise ConfigError(unknown_gpu(flag, name))
        return listed
    rated = [gpu for gpu in _read_gpus(name, flag) if isinstance(gpu.get("rates"), dict)]
    if not rated:
        raise ConfigError.about(
            flag,
            name,
            "holds no measured rates",
            "let `tools/doctor.py --json` measure, without `--no-measure`",
        )
    try:
        return _measured_gpu(min(rated, key=lambda gpu: float(gpu["rates"]["bf16"])), name)
    except (KeyError, TypeError, ValueError) as error:
        rule = f"{_RULE}, but its rates cannot be read"
        raise ConfigError.about(flag, name, rule) from error


def _read_gpus(path: str, flag: str) -> list[dict[str, Any]]:
    refused = partial(ConfigError.about, flag, path)
    remedy = f"it {_RULE}"
    try:
        content = read_json(path)
    except UnreadableFile as error:
        raise refused(f"cannot be read ({error.reason})", remedy) from error
    gpus = content.get("gpus") if isinstance(content, dict) else None
    if not isinstance(gpus, list) or not all(isinstance(gpu, dict) for gpu in gpus):
        raise refused("has no list of GPUs", remedy)
    if not gpus:
        raise refused("was written where torch found no GPU", remedy)
    return gpus


def _measured_gpu(report: dict[str, Any], path: str) -> Gpu:
    rates = report["rates"]
    name = str(report["name"])
    memory = int(report["memory"])
    fp8 = None if rates["fp8"] is None else float(rates["fp8"])
    measured = Measured(float(rates["bf16"]), fp8, float(rates["copy"]), path)
    positive = (measured.bf16, measured.copy, *(() if fp8 is None else (fp8,)))
    if not all(0 < rate < float("inf") for rate in positive) or memory <= 0:
        raise ValueError("rates must be positive")
    kinds = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name.split()]
    kinds += [gpu for gpu in GPUS.values() if f"{gpu.name.partition('-')[0]}-" in name]
    if kinds:
        # Among kinds with the same name, take the one with the closest memory size.
        closest = min(kinds, key=lambda gpu: abs(gpu.memory - memory))
        return replace(closest, name=name, memory=memory, measured=measured)
    return Gpu(
        name=name,
        bf16=measured.bf16,
        fp8=fp8,
        fp32=measured.bf16 * FP32_SHARE,
        memory=memory,
        memory_bandwidth=measured.copy,
        link=PCIE,
        network=PCIE,
        hopper=int(report["capability"][0]) >= 9,
        measured=measured,
    )


def _assumed(value: float, what: str) -> Any:
    return field(default=value, metadata={"what": what})


@dataclass(frozen=True)
class Efficiency:
    """Fractions of higher rates, such as a datasheet's, that runs are assumed to reach.

    The text with each field names the higher rate and the source of the number.
    """

    products: float = _assumed(
        0.80,
        "of the datasheet's bf16 or fp32 rate, by a large matrix product; 790 of 989 TFLOP/s on "
        "H200 are expected of CUDA 13; 720 on H100 with CUDA 12.4 (SemiAnalysis, MI300X vs H100 vs "
        "H200, 2024)",
    )
    fp8_products: float = _assumed(
        0.65,
        "of the datasheet's fp8 rate, by a large 8-bit product; "
        "1280 of 1979 TFLOP/s on H100 (the same)",
    )
    copies: float = _assumed(
        0.90,
        "of the datasheet's memory bandwidth, by a copy; "
        "about 3.0 of 3.35 TB/s on H100, as STREAM-like benchmarks report",
    )
    layers: float = _assumed(
        0.90,
        "of the rate of a large product, by those of layers and of the head; a guess for products "
        "of 4 to 64 thousand rows, whose last wave of tiles is not full",
    )
    attention_forward: float = _assumed(
        0.67,
        "of the rate of a large product, by attention; cuDNN's 529 TFLOP/s for 8 k causal tokens, "
        "heads of 128, H100 (FlashAttention-3, arXiv:2407.08608, figure 5)",
    )
    attention_backward: float = _assumed(
        0.60,
        "of the rate of a large product, by attention's backward pass; cuDNN's 518 TFLOP/s without "
        "a mask (figure 6), less 8% for a causal one, which is a guess",
    )
    kernels: float = _assumed(
        0.85,
        "of the rate of a copy, by norms, activations and other kernels of several inputs; a guess",
    )
    streams: float = _assumed(
        0.92,
        "of the rate of a copy, by kernels over all weights or logits, such as the optimizer's; a "
        "guess; their arrays are long and read once",
    )
    links: float = _assumed(
        0.75,
        "of a link's bandwidth, by collectives; "
        "about 350 of 450 GB/s on H100 (NVIDIA/nccl issue 864)",
    )
    hidden: float = _assumed(
        0.80,
        "of an exchange that overlaps, where the run asks for overlap; "
        "a guess; the first and the last bucket are never hidden",
    )

    def __post_init__(self) -> None:
        errors = [
            f"`{name}` ({value}) must be above 0 and at most 1; use 0.7."
            for name, value in vars(self).items()
            if not (0 <= value <= 1) or (value == 0 and name != "hidden")
        ]
        if errors:
            raise ConfigError(errors)


DEFAULT = Efficiency()
FLASH_3 = replace(DEFAULT, attention_forward=0.76, attention_backward=0.65)
"""Efficiency with FlashAttention 3, which runs only on Hopper GPUs.

Its paper (arXiv:2407.08608, figures 5 and 6) reports 602 TFLOP/s forward with a causal mask, and
559 TFLOP/s backward without a mask. A causal mask is guessed to reduce the latter by 8%. Both are
divided by the rate of a large matrix product, 790 TFLOP/s.
"""

GAP = 5e-6
"""Assumed seconds from the last work of a kernel until the next one runs at full speed; a guess."""
GRAPH_GAP = 4.6e-6
"""Assumed seconds between two kernels of a CUDA graph if the host keeps up; a guess."""


def assumed(gpu: Gpu) -> list[tuple[str, str, str, bool]]:
    """Return the fields of `Efficiency` as rows of a table.

    Each row is (name, value, meaning, whether a measured rate of the GPU is used instead).
    """
    replaced = set[str]()
    if gpu.measured is not None:
        replaced = {"products", "copies", *["fp8_products"] * (gpu.measured.fp8 is not None)}
    return [
        (x.name, f"{getattr(DEFAULT, x.name):.2f}", x.metadata["what"], x.name in replaced)
        for x in fields(DEFAULT)
    ]


@dataclass(frozen=True)
class Rates:
    """The rates that a kind of GPU is assumed to reach, in operations or bytes per second."""

    gpu: Gpu
    efficiency: Efficiency = DEFAULT

    def products(self, width: int) -> float:
        """Return the operations per second of a large matrix product of ``width``-byte numbers.

        Raises:
            ConfigError: ``width`` is 1 on a GPU without fp8.
        """
        measured = self.gpu.measured
        if measured is not None and width == 2:
            return measured.bf16
        if measured is not None and width == 1 and measured.fp8 is not None:
            return measured.fp8
        reached = self.efficiency.fp8_products if width == 1 else self.efficiency.products
        return self.gpu.peak(width) * reached

    def operations(self, work: Work) -> float:
        """Return the operations per second of the matrix products in ``work``."""
        x = self.efficiency
        share = x.layers
        if work.kind == "attention":
            forward = work.phase is Phase.FORWARD
            share = x.attention_forward if forward else x.attention_backward
        return self.products(work.width) * share

    def memory(self, kind: str) -> float:
        """Return the bytes per second that kernels of a class (a key of `KINDS`) read and write."""
        measured = self.gpu.measured
        efficiency = self.efficiency
        copied = self.gpu.memory_bandwidth * efficiency.copies
        share = efficiency.kernels if kind in ("pointwise", "casts") else efficiency.streams
        return (copied if measured is None else measured.copy) * share

    def busy(self, work: Work) -> float:
        """Return the seconds in which the kernels run, without the gaps between them."""
        moved = work.num_bytes / self.memory(work.kind)
        return moved + (work.flops / self.operations(work) if work.flops else 0.0)

    def seconds(self, work: Work) -> float:
        """Return the seconds that the kernels take, with the gaps between them."""
        return self.busy(work) + self.gaps(work)

    def gaps(self, work: Work) -> float:
        """Return the sum of the seconds between one kernel and the next."""
        return work.kernels * (GRAPH_GAP if work.graphed else GAP)

    def link(self, span: int) -> float:
        """Return the bytes per second that a rank can send to one that is ``span`` ranks away.

        If the span is at most the number of GPUs in a node, the message uses the links within the
        node, otherwise the network.
        """
        link = self.gpu.link if span <= self.gpu.per_node else self.gpu.network
        return link * self.efficiency.links

    def ring(self, ranks: int, stride: int = 1) -> float:
        """Return the bytes per second that each of ``ranks`` ranks can send in a ring.

        The ranks are ``stride`` apart. If a ring spans nodes, NCCL runs as many rings as the group
        has ranks on a node, and each leaves the node through the network port of another rank. So
        all the ports together carry what one rank sends, up to the rate of the links within a node.
        """
        if ranks * stride <= self.gpu.per_node:
            return self.link(1)
        inside = max(1, self.gpu.per_node // stride)
        return min(self.gpu.link, inside * self.gpu.network) * self.efficiency.links

    def all_to_all(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which each of ``ranks`` ranks sends ``num_bytes`` to all others.

        Each of the others gets the same share. Shares for ranks of the same node go over the links
        within it, while the others go over the network. The ranks are ``stride`` apart.
        """
        if ranks < 2:
            return 0.0
        inside = min(ranks, max(1, self.gpu.per_node // stride))
        near = num_bytes * (inside - 1) / (ranks - 1)
        far = num_bytes * (ranks - inside) / (ranks - 1)
        return max(near / self.gpu.link, far / self.gpu.network) / self.efficiency.links


def reserve_on(gpu: Gpu, ranks: Ranks, moving: int) -> dict[str, int]:
    """Return the bytes of a GPU's memory that tensors cannot use, keyed by what occupies them.

    CUDA's context and code take 0.4 to 0.6 GiB. torch gives cuBLAS and cuBLASLt a workspace each,
    on two streams: 32 MiB on Hopper and newer, 8 MiB on others
    (``aten/src/ATen/cuda/CublasHandlePool.cpp``). For each process group of two or more ranks,
    NCCL has 24 channels with a buffer of 4 MiB (``NCCL_BUFFSIZE``) in each direction. Fragmentation
    is guessed as 5% of ``moving``, the bytes of activations and transient tensors.
    """
    groups = [ranks.tp, ranks.cp, ranks.dp * ranks.cp, ranks.ep]
    count = sum(size > 1 for size in groups) + 2 * (ranks.pp > 1)
    return {
        "CUDA context and kernels": 600 * MIB,
        "cuBLAS and cuBLASLt workspaces": 2 * 2 * (32 if gpu.hopper else 8) * MIB,
        "NCCL buffers of all groups": count * 2 * 24 * 4 * MIB,
        "fragments of the allocator's blocks": round(0.05 * moving),
    }


def size(count: float) -> str:
    """Format a number of bytes in GB (10^9), or in MB if it is below 0.1 GB; 0 becomes a dash."""
    if not count:
        return "–"
    return f"{count / GB:,.2f} GB" if count >= GB / 10 else f"{count / 1e6:,.2f} MB"
