"""From the plain model's parameters to the parallel model's, and back; weights and gradients."""

from __future__ import annotations

import torch

from megatron_ext.video.config.wan import VideoDiTSizes
from tests.video.networks import Tensors

LINEARS = {
    "patch_embedding": "embedder.patch_in",
    "text_embedding.0": "embedder.text_in",
    "text_embedding.2": "embedder.text_out",
    "time_embedding.0": "embedder.time_in.linear_in",
    "time_embedding.2": "embedder.time_in.linear_out",
    "time_projection": "embedder.time_projection",
    "head": "head.linear",
}
IN_BLOCK = {
    "self_attn.o": "self_attention.linear_proj",
    "cross_attn.q": "cross_attention.linear_q",
    "cross_attn.o": "cross_attention.linear_proj",
    "norm3": "cross_norm",
    "ffn_in": "linear_fc1",
    "ffn_out": "linear_fc2",
}
NORMS = {
    "self_attn.norm_q": "self_attention.q_norm",
    "self_attn.norm_k": "self_attention.k_norm",
    "cross_attn.norm_q": "cross_attention.q_norm",
    "cross_attn.norm_k": "cross_attention.k_norm",
}
FUSED = {
    "self_attention.linear_qkv": [f"self_attn.{x}" for x in "qkv"],
    "cross_attention.linear_kv": [f"cross_attn.{x}" for x in "kv"],
}


def pairs(z: VideoDiTSizes) -> dict[str, str]:
    """Plain names, without those of fused parameters, to names of the parallel model."""
    names = dict(LINEARS)
    full = {"head_modulation": "head.modulation.weight"}
    for i in range(z.num_blocks):
        names |= {f"blocks.{i}.{old}": f"blocks.{i}.{new}" for old, new in IN_BLOCK.items()}
        for old, new in NORMS.items():
            full[f"blocks.{i}.{old}.weight"] = f"blocks.{i}.{new}.weight"
        full[f"blocks.{i}.modulation"] = f"blocks.{i}.modulation.weight"
    for old, new in names.items():
        full |= {f"{old}.{kind}": f"{new}.{kind}" for kind in ("weight", "bias")}
    return full


def fused_pairs(z: VideoDiTSizes) -> dict[str, list[str]]:
    """Names of fused parameters to those of their parts."""
    return {
        f"blocks.{i}.{new}.{kind}": [f"blocks.{i}.{old}.{kind}" for old in olds]
        for i in range(z.num_blocks)
        for new, olds in FUSED.items()
        for kind in ("weight", "bias")
    }


def to_parallel(plain: Tensors, z: VideoDiTSizes) -> Tensors:
    out = {new: plain[old] for old, new in pairs(z).items()}
    for new, olds in fused_pairs(z).items():
        heads = [plain[old].unflatten(0, (z.num_heads, 1, z.head_dim)) for old in olds]
        out[new] = torch.cat(heads, dim=1).flatten(0, 2)
    return out


def to_plain(parallel: Tensors, z: VideoDiTSizes) -> Tensors:
    out = {old: parallel[new] for old, new in pairs(z).items()}
    for new, olds in fused_pairs(z).items():
        parts = parallel[new].unflatten(0, (z.num_heads, len(olds), z.head_dim)).unbind(1)
        out |= {old: part.flatten(0, 1) for old, part in zip(olds, parts, strict=True)}
    return out
