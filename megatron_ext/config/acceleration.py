"""Options that speed layers up on GPUs: Transformer Engine's overlaps, and CUDA graphs.

Names, meanings and defaults are Megatron-LM's; a flag that the torch layers would ignore is
refused with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import SIZE, IfChanged, flag

TE_IMPL = "transformer_engine"
LAUNCHES = "the launches of kernels that graphs save are a GPU's"
WARMUP_STEPS = 3


@dataclass(frozen=True)
class TransformerEngineConfig:
    """Overlap of matrix products with the communication of tensor parallelism."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    tp_comm_overlap: bool = flag(
        False, "overlap products with tensor-parallel communication, in Transformer Engine's layers"
    )
    tp_comm_overlap_cfg: str | None = flag(
        None, "YAML file that says how each product of --tp-comm-overlap overlaps"
    )
    tp_comm_overlap_ag: bool = flag(
        True,
        "with --tp-comm-overlap, overlap the all-gather with the product after it",
        negative=("--disable-tp-comm-overlap-ag",),
    )
    tp_comm_overlap_rs: bool = flag(
        True,
        "with --tp-comm-overlap, overlap the reduce-scatter with the product before it",
        negative=("--disable-tp-comm-overlap-rs",),
    )
    tp_comm_overlap_rs_dgrad: bool = flag(
        False, "with --tp-comm-overlap, overlap the reduce-scatter with the gradient of the input"
    )
    tp_comm_bulk_dgrad: bool = flag(
        True,
        "with --tp-comm-overlap, overlap the whole all-gather with the gradient of the input",
        negative=("--disable-tp-comm-bulk-dgrad",),
    )
    tp_comm_bulk_wgrad: bool = flag(
        True,
        "with --tp-comm-overlap, overlap the whole reduce-scatter with the gradient of the weight",
        negative=("--disable-tp-comm-bulk-wgrad",),
    )
    tp_comm_overlap_disable_qkv: bool = flag(
        False, "with --tp-comm-overlap, overlap nothing in the QKV projection"
    )
    tp_comm_overlap_disable_fc1: bool = flag(
        False, "with --tp-comm-overlap, overlap nothing in the first layer of the MLP"
    )
    tp_comm_bootstrap_backend: str = flag(
        "nccl",
        "backend over which the buffers of --tp-comm-overlap are set up",
        choices=("nccl", "mpi", "gloo"),
    )
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None,
        "--context-parallel-size as a product, for --cp-comm-type a2a+p2p: ranks that exchange "
        "heads, and groups of them that pass keys and values on",
        nargs="+",
        bounds=SIZE,
    )


@dataclass(frozen=True)
class CudaGraphConfig:
    """No graphs unless ``--cuda-graph-impl``; names and defaults are Megatron-LM's."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    cuda_graph_impl: str = flag(
        "none",
        "launch the kernels of each transformer layer at once, recorded by torch (local)",
        choices=("none", "local", "transformer_engine"),
        gpu_only=LAUNCHES,
    )
    cuda_graph_warmup_steps: int = flag(
        WARMUP_STEPS,
        "runs of a layer before it is recorded",
        unit="runs",
        gpu_only=LAUNCHES,
        bounds=SIZE,
    )
