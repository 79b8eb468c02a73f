"""Flags of number formats, 8-bit matrix products (arXiv:2209.05433), TP overlap and CUDA graphs.

Names, meanings and defaults are Megatron-LM's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.flags import COUNT, NATURAL, SIZE, Changeable, Range, flag, said_flag

TE_RECIPES = ("blockwise", "mxfp8", "custom")
TORCH_RECIPES = ("rowwise",)
PRECISIONS = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}
"""dtype of the weights -> the command-line flags that make a run use it."""
SCALE = Range(0, 2.0**64, above=True)
"""The valid loss scales: above 0, at most 2**64."""


@dataclass(frozen=True)
class PrecisionConfig(Changeable):
    """Flags of the format of parameters and activations: fp32 unless ``--bf16`` or ``--fp16``."""

    bf16: bool = said_flag(False, "parameters and activations in bfloat16; --no-bf16 is fp32")
    fp16: bool = said_flag(False, "parameters and activations in float16, with loss scaling")
    loss_scale: float | None = flag(None, "fixed loss scale of fp16; default: dynamic", SCALE)
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", SCALE)
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale", SCALE)
    loss_scale_window: float = flag(
        1000, "steps without overflow before the dynamic loss scale doubles", Range(1, 1e9), "steps"
    )
    hysteresis: int = flag(2, "overflows before the dynamic loss scale halves", COUNT)
    accumulate_allreduce_grads_in_fp32: bool = said_flag(
        False, "sum gradients in fp32; always on with --bf16 unless --grad-reduce-in-bf16"
    )
    grad_reduce_in_bf16: bool = said_flag(False, "sum gradients in bf16")
    disable_bf16_reduced_precision_matmul: bool = said_flag(
        False, "add up products of bf16 matrices in fp32 only, in every kernel of cuBLAS"
    )
    bf16_on_gpu: bool = False
    """Whether ``--bf16`` is the default on a GPU."""

    def resolved(self, device: str) -> PrecisionConfig:
        """Return a copy with the formats of parameters and gradients filled in."""
        bf16 = self.bf16 or (self.bf16_on_gpu and device == "cuda")
        in_fp32 = self.accumulate_allreduce_grads_in_fp32
        in_fp32 = not self.grad_reduce_in_bf16 if bf16 else in_fp32
        return dataclasses.replace(
            self, bf16=bf16, bf16_on_gpu=False, accumulate_allreduce_grads_in_fp32=in_fp32
        )


@dataclass(frozen=True)
class Fp8Config:
    """Flags of 8-bit matrix products, on with ``--fp8-format``; names are Megatron-LM's."""

    fp8_format: str | None = flag(
        None,
        "products of the layers in 8 bits: e4m3 throughout, or hybrid with e5m2 for gradients",
        choices="e4m3 hybrid",
    )
    fp8_recipe: str = flag(
        "delayed",
        "where scales come from: the steps before, the tensor itself, each of its rows (torch "
        "only), its blocks of 128, or runs of 32 values (blockwise, mxfp8, custom: Transformer "
        "Engine only)",
        choices=("delayed", "tensorwise", *TORCH_RECIPES, *TE_RECIPES),
    )
    fp8_margin: int = flag(
        0, "headroom: a scale of the delayed recipe is divided by 2^margin", Range(0, 64)
    )
    fp8_amax_history_len: int = flag(
        1, "steps whose largest magnitudes the delayed recipe remembers", SIZE, "steps"
    )
    fp8_amax_compute_algo: str = flag(
        "most_recent",
        "magnitude that decides a scale of the delayed recipe: the latest, or the largest "
        "remembered",
        choices="most_recent max",
    )
    fp8_wgrad: bool = flag(True, "weight gradients in 8 bits as well; torch layers only")
    fp8_param_gather: bool = flag(
        False, "keep and gather Transformer Engine's weights in 8 bits", if_changed="allow"
    )
    fp8_quantizer_factory: str | None = flag(
        None,
        "function that makes the quantizers of --fp8-recipe custom: package.module.function",
        from_checkpoint=False,
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = flag(
        False, "gather mxfp8 weights through the memory of their gradients", if_changed="allow"
    )
    tp_only_amax_red: bool = flag(
        False,
        "take the largest magnitudes of Transformer Engine's delayed recipe over "
        "tensor-parallel ranks only",
    )
    moe_router_padding_for_quantization: bool = flag(
        False,
        "route tokens so that each expert's number suits 8-bit products, in place of padding",
        names="--moe-router-padding-for-fp8",
        if_changed="allow",
    )
    first_last_layers_bf16: bool = flag(False, "keep the first and the last layers in bf16")
    num_layers_at_start_in_bf16: int = flag(
        1, "first layers to keep with --first-last-layers-bf16", NATURAL, "layers"
    )
    num_layers_at_end_in_bf16: int = flag(
        1, "last layers to keep with --first-last-layers-bf16", NATURAL, "layers"
    )

    def resolved(self, *, te: bool) -> Fp8Config:
        """Return a copy; without ``te``, weights in 8 bits and the router's padding are off.

        ``te`` says whether the layers are Transformer Engine's. Torch's keep weights in bf16, and
        pad the tokens of an expert themselves.
        """
        if te or self.fp8_format is None:
            return self
        return dataclasses.replace(
            self, fp8_param_gather=False, moe_router_padding_for_quantization=False
        )

    def keeps_bf16(self, layer_number: int, num_layers: int) -> bool:
        """Return whether a layer computes in bf16 instead of 8 bits.

        Layers are numbered from 1 in the whole model.
        """
        if not self.first_last_layers_bf16:
            return False
        after = num_layers - self.num_layers_at_end_in_bf16
        return not self.num_layers_at_start_in_bf16 < layer_number <= after


TE_IMPL = "transformer_engine"
WARMUP_STEPS = 3


def _overlaps(name: str, what: str) -> Any:
    """Declare a flag that is on by default, but has an effect only with ``--tp-comm-overlap``.

    Args:
        name: the end of the spelling that switches it off, ``--disable-tp-comm-<name>``.
        what: the communication that is overlapped, for the help text.
    """
    help_text = f"with --tp-comm-overlap, overlap {what}"
    return flag(True, help_text, negative=f"--disable-tp-comm-{name}")


@dataclass(frozen=True)
class TransformerEngineConfig(Changeable):
    """Flags for overlapping matrix products with TP communication and for nested CP groups."""

    tp_comm_overlap: bool = flag(
        False, "overlap products with tensor-parallel communication, in Transformer Engine's layers"
    )
    tp_comm_overlap_cfg: str | None = flag(
        None,
        "YAML file that says how each product of --tp-comm-overlap overlaps",
        from_checkpoint=False,
    )
    tp_comm_overlap_ag: bool = _overlaps("overlap-ag", "the all-gather with the product after")
    tp_comm_overlap_rs: bool = _overlaps("overlap-rs", "the reduce-scatter with the product before")
    tp_comm_overlap_rs_dgrad: bool = flag(
        False, "with --tp-comm-overlap, overlap the reduce-scatter with the gradient of the input"
    )
    tp_comm_bulk_dgrad: bool = _overlaps(
        "bulk-dgrad", "the whole all-gather with the gradient of the input"
    )
    tp_comm_bulk_wgrad: bool = _overlaps(
        "bulk-wgrad", "the whole reduce-scatter with the gradient of the weight"
    )
    tp_comm_overlap_disable_qkv: bool = flag(
        False, "with --tp-comm-overlap, overlap nothing in the QKV projection"
    )
    tp_comm_overlap_disable_fc1: bool = flag(
        False, "with --tp-comm-overlap, overlap nothing in the first layer of the MLP"
    )
    tp_comm_bootstrap_backend: str = flag(
        "nccl", "backend that sets up the buffers of --tp-comm-overlap", choices="nccl mpi gloo"
    )
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None,
        "--context-parallel-size as a product, for --cp-comm-type a2a+p2p: ranks that exchange "
        "heads, and groups of them that pass keys and values on",
        SIZE,
        nargs="+",
    )


@dataclass(frozen=True)
class CudaGraphConfig(Changeable):
    """Flags of CUDA graphs, on with ``--cuda-graph-impl``; names are Megatron-LM's."""

    cuda_graph_impl: str = flag(
        "none",
        "launch the kernels of each transformer layer at once, recorded by torch (local)",
        choices="none local transformer_engine",
    )
    cuda_graph_warmup_steps: int = flag(
        WARMUP_STEPS, "runs of a layer before it is recorded", SIZE, "runs"
    )
