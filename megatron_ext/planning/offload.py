"""Host memory that a run needs for what it moves there, and the time of the copies.

No GPU of `device.gpus` says how it is connected to its host, nor how fast the host is; so these
rates are assumptions, which a plan prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.device.gpus import GB, Gpu
from megatron_ext.planning.hardware import PCIE, size
from megatron_ext.planning.memory import RankMemory
from megatron_ext.planning.network import Network
from megatron_ext.planning.sheet import Column, Sheet
from megatron_ext.planning.stages import FP32, Stage
from megatron_ext.planning.state import State

HOST_MEMORY = 25.0 * GB
"""Assumed bytes a second that the host reads and writes for one GPU; a guess, 200 GB/s for 8."""
ASSUMED = [
    ("copies", f"{PCIE / GB:.0f} GB/s", "in each direction, by PCIe 4.0 x16; a guess"),
    ("host memory", f"{HOST_MEMORY / GB:.0f} GB/s", "for one GPU, an eighth of a host's; a guess"),
]


def update_parts(network: Network, state: State) -> tuple[float, float, float]:
    """Return the seconds of the parts of an update on the host, for a rank with this state.

    Gradients come down in float32; the host reads and writes the state, and reads the gradients;
    weights go up as the model keeps them. A float32 model's weights also come down.
    """
    elements = state.hosted
    x = network.sizes
    down = elements * (FP32 if x.half else 2 * FP32) / PCIE
    up = elements * x.width / PCIE
    weight = FP32 + 2 * x.width if x.half else 2 * FP32
    moments = 2 * state.host_optimizer
    return down, (moments + elements * (FP32 + weight)) / HOST_MEMORY, up


def update_seconds(network: Network, state: State) -> float:
    """Return the seconds in which the host updates the weights of a rank whose state it has."""
    parts = update_parts(network, state)
    return max(parts) if network.config.offload.overlap_cpu_optimizer_d2h_h2d else sum(parts)


def copy_seconds(network: Network, stage: Stage) -> float:
    """Return the seconds in which a micro-batch's activations go to the host, or come back."""
    return network.hosted(stage) / PCIE


def offload_sheet(network: Network, ranks: Sequence[RankMemory], gpu: Gpu | None) -> Sheet:
    """Return a table of what a node's host keeps for its GPUs, and of the assumed rates."""
    columns = [Column("on the host", "what"), Column("", "value"), Column("meaning", "meaning")]
    most = max(ranks, key=lambda rank: rank.host)
    count = min(gpu.per_node if gpu is not None else 8, network.config.parallel.world_size)
    rows = [
        ("optimizer", size(most.state.host), "state, averages and buffers of a rank"),
        ("activations", size(most.moved), "of the micro-batches that a rank holds at its peak"),
        ("a node", size(count * most.host), f"host memory for {count} such rank(s)"),
        *ASSUMED,
    ]
    return Sheet("host", "kept in host memory", columns, [list(row) for row in rows])
