"""From the plain model's parameters to the parallel model's, and back.

The same for weights and for gradients, since rows and columns only change places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.video.config.mmdit import MMDiTSizes
from tests.video.networks import Tensors

EMBEDDERS = {"time_in": "time_in", "vector_in": "pooled_in", "guidance_in": "guidance_in"}
STREAM = {
    "mod": "modulation",
    "proj": "linear_proj",
    "mlp_in": "linear_fc1",
    "mlp_out": "linear_fc2",
    "query_norm.scale": "norm.q_layernorm.weight",
    "key_norm.scale": "norm.k_layernorm.weight",
}


def pairs(z: MMDiTSizes) -> dict[str, str]:
    """Plain names, without those of fused parameters, to names of the parallel model."""
    names = {f"{x}_in": f"embedding.{x}_in" for x in ("img", "txt", "cond")}
    for ours, theirs in EMBEDDERS.items():
        names[f"{ours}.in_layer"] = f"embedding.{theirs}.linear_in"
        names[f"{ours}.out_layer"] = f"embedding.{theirs}.linear_out"
    for i in range(z.num_double_blocks):
        for s in ("txt", "img"):
            for old, new in STREAM.items():
                names[f"double_blocks.{i}.{s}.{old}"] = f"double_blocks.{i}.{s}.{new}"
    for i in range(z.num_single_blocks):
        for old in ("mod", "query_norm.scale", "key_norm.scale"):
            names[f"single_blocks.{i}.{old}"] = f"single_blocks.{i}.{STREAM[old]}"
    names["final_mod"] = "final_layer.modulation"
    names["final_linear"] = "final_layer.linear"
    full = {}
    for old, new in names.items():
        if old.endswith(".scale"):
            full[old] = new
        else:
            full |= {f"{old}.{kind}": f"{new}.{kind}" for kind in ("weight", "bias")}
    return full


def by_heads(qkv: Tensor, z: MMDiTSizes) -> Tensor:
    """Rows (3, n, d) to (n, 3, d)."""
    return qkv.unflatten(0, (3, z.num_heads, z.head_dim)).transpose(0, 1).flatten(0, 2)


def by_parts(qkv: Tensor, z: MMDiTSizes) -> Tensor:
    """Rows (n, 3, d) to (3, n, d)."""
    return qkv.unflatten(0, (z.num_heads, 3, z.head_dim)).transpose(0, 1).flatten(0, 2)


def to_parallel(plain: Tensors, z: MMDiTSizes) -> Tensors:
    out = {new: plain[old] for old, new in pairs(z).items() if old in plain}
    h = z.hidden_size
    for kind in ("weight", "bias"):
        for i in range(z.num_double_blocks):
            for s in ("txt", "img"):
                if f"double_blocks.{i}.{s}.qkv.{kind}" in plain:
                    fused = plain[f"double_blocks.{i}.{s}.qkv.{kind}"]
                    out[f"double_blocks.{i}.{s}.linear_qkv.{kind}"] = by_heads(fused, z)
        for i in range(z.num_single_blocks):
            first = plain[f"single_blocks.{i}.linear1.{kind}"]
            out[f"single_blocks.{i}.linear_qkv.{kind}"] = by_heads(first[: 3 * h], z)
            out[f"single_blocks.{i}.linear_fc1.{kind}"] = first[3 * h :]
    for i in range(z.num_single_blocks):
        second = plain[f"single_blocks.{i}.linear2.weight"]
        out[f"single_blocks.{i}.linear_proj.weight"] = second[:, :h]
        out[f"single_blocks.{i}.linear_fc2.weight"] = second[:, h:]
        out[f"single_blocks.{i}.linear_proj.bias"] = plain[f"single_blocks.{i}.linear2.bias"]
    return out


def to_plain(parallel: Tensors, z: MMDiTSizes) -> Tensors:
    out = {old: parallel[new] for old, new in pairs(z).items() if new in parallel}
    for kind in ("weight", "bias"):
        for i in range(z.num_double_blocks):
            for s in ("txt", "img"):
                if f"double_blocks.{i}.{s}.linear_qkv.{kind}" in parallel:
                    fused = parallel[f"double_blocks.{i}.{s}.linear_qkv.{kind}"]
                    out[f"double_blocks.{i}.{s}.qkv.{kind}"] = by_parts(fused, z)
        for i in range(z.num_single_blocks):
            qkv = by_parts(parallel[f"single_blocks.{i}.linear_qkv.{kind}"], z)
            mlp = parallel[f"single_blocks.{i}.linear_fc1.{kind}"]
            out[f"single_blocks.{i}.linear1.{kind}"] = torch.cat([qkv, mlp])
    for i in range(z.num_single_blocks):
        pieces = [parallel[f"single_blocks.{i}.linear_{x}.weight"] for x in ("proj", "fc2")]
        out[f"single_blocks.{i}.linear2.weight"] = torch.cat(pieces, dim=1)
        out[f"single_blocks.{i}.linear2.bias"] = parallel[f"single_blocks.{i}.linear_proj.bias"]
    return out
