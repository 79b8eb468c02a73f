"""Maps the video DiT's parameters, and their adapters, to the tensors of Wan 2.1.

Sources: ``wan/modules/model.py`` of the original repository (Wan-Video/Wan2.1) and
``models/transformers/transformer_wan.py`` of diffusers. Besides the names, four things differ
(h: hidden size; n heads of size d; c: latent channels; p: patch size):

- ``linear_qkv`` and ``linear_kv`` are fused head by head: the rows of a head's query, key and value
  follow one another. The weight of ``linear_qkv`` is ``[n, 3, d, h]``, flattened to ``[3 h, h]``.
  Therefore tensor parallelism, which gives each rank contiguous rows, gives it whole heads.
- ``patch_in`` is a linear layer over the numbers of a patch, in the order channel, row, column. Wan
  has a convolution: ``[h, c, 1, p, p]``.
- Our head outputs the numbers of a patch in this order too; Wan's order is row, column, channel.
- Modulation tables have no leading axis: ``[6, h]``, in Wan ``[1, 6, h]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from megatron_ext.checkpoint.conversion import Part, PeftLayers
from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.networks.wan.config import VideoDiTSizes


class Naming(Enum):
    """The code of Wan whose tensor names are used: diffusers or the original repository."""

    DIFFUSERS = "diffusers"
    ORIGINAL = "original"


_PATCH_IN, _HEAD = "embedder.patch_in.weight", "head.linear"
_TIME, _TEXT = "condition_embedder.time_embedder", "condition_embedder.text_embedder"
MODULES = {
    "embedder.patch_in": ("patch_embedding", "patch_embedding"),
    "embedder.text_in": (f"{_TEXT}.linear_1", "text_embedding.0"),
    "embedder.text_out": (f"{_TEXT}.linear_2", "text_embedding.2"),
    "embedder.time_in.linear_in": (f"{_TIME}.linear_1", "time_embedding.0"),
    "embedder.time_in.linear_out": (f"{_TIME}.linear_2", "time_embedding.2"),
    "embedder.time_projection": ("condition_embedder.time_proj", "time_projection.1"),
    _HEAD: ("proj_out", "head.head"),
}
"""Modules outside of the blocks: our name to (diffusers' name, name in the original repository)."""
BLOCK_MODULES = {
    "self_attention.linear_qkv": ("attn1.to_{q,k,v}", "self_attn.{q,k,v}"),
    "self_attention.q_norm": ("attn1.norm_q", "self_attn.norm_q"),
    "self_attention.k_norm": ("attn1.norm_k", "self_attn.norm_k"),
    "self_attention.linear_proj": ("attn1.to_out.0", "self_attn.o"),
    "cross_norm": ("norm2", "norm3"),
    "cross_attention.linear_q": ("attn2.to_q", "cross_attn.q"),
    "cross_attention.linear_kv": ("attn2.to_{k,v}", "cross_attn.{k,v}"),
    "cross_attention.q_norm": ("attn2.norm_q", "cross_attn.norm_q"),
    "cross_attention.k_norm": ("attn2.norm_k", "cross_attn.norm_k"),
    "cross_attention.linear_proj": ("attn2.to_out.0", "cross_attn.o"),
    "linear_fc1": ("ffn.net.0.proj", "ffn.0"),
    "linear_fc2": ("ffn.net.2", "ffn.2"),
}
"""Modules of a block in order, as in `MODULES`. Our module fuses several of Wan's if these are
written with braces: ``to_{q,k,v}`` stands for ``to_q``, ``to_k`` and ``to_v``."""
_TABLE = "modulation.weight"
_NAMES = {
    f"blocks.{_TABLE}": ("scale_shift_table", "modulation"),
    f"head.{_TABLE}": ("scale_shift_table", "head.modulation"),
} | {
    f"{prefix}{ours}.{kind}": (f"{diffusers}.{kind}", f"{original}.{kind}")
    for prefix, modules in (("", MODULES), ("blocks.", BLOCK_MODULES))
    for ours, (diffusers, original) in modules.items()
    for kind in ("weight", "bias")
}
"""Our names of parameters, each with (diffusers' name, name in the original repository).

The names of parameters in blocks lack the block's number."""


def shapes(sizes: VideoDiTSizes) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of each parameter of a video DiT by name, in module order.

    All layers and norms have biases, except the norms of queries and keys.
    """
    h = sizes.hidden_size
    ffn = sizes.ffn_size
    token = sizes.token_width
    matrices = {
        "embedder.patch_in": (h, token),
        "embedder.text_in": (h, sizes.text_width),
        "embedder.time_in.linear_in": (h, TIMESTEP_WIDTH),
        "embedder.time_projection": (6 * h, h),
        _HEAD: (token, h),
        "self_attention.linear_qkv": (3 * h, h),
        "cross_attention.linear_kv": (2 * h, h),
        "linear_fc1": (ffn, h),
        "linear_fc2": (h, ffn),
    }
    by_name: dict[str, tuple[int, ...]] = {}

    def add(prefix: str, module: str) -> None:
        weight = (h,) if module.endswith("norm") else matrices.get(module, (h, h))
        by_name[f"{prefix}{module}.weight"] = weight
        if not module.endswith(("q_norm", "k_norm")):
            by_name[f"{prefix}{module}.bias"] = weight[:1]

    *embedder, head = MODULES
    for module in embedder:
        add("", module)
    for number in range(sizes.num_blocks):
        by_name[f"blocks.{number}.{_TABLE}"] = (6, h)
        for module in BLOCK_MODULES:
            add(f"blocks.{number}.", module)
    by_name[f"head.{_TABLE}"] = (2, h)
    add("", head)
    return by_name


def wan_names(name: str, naming: Naming) -> tuple[str, ...]:
    """Return, in order, the names of Wan's tensors that together make our parameter ``name``."""
    prefix = ""
    key = name
    if name.startswith("blocks."):
        blocks, number, inner = name.split(".", 2)
        prefix = f"{blocks}.{number}."
        key = f"{blocks}.{inner}"
    before, _, rest = _NAMES[key][naming is Naming.ORIGINAL].partition("{")
    parts, _, after = rest.partition("}")
    return tuple(f"{prefix}{before}{part}{after}" for part in parts.split(","))


def from_wan(name: str, tensors: Sequence[Tensor], sizes: VideoDiTSizes) -> Tensor:
    """Return our parameter ``name``, joined from Wan's tensors in the order of `wan_names`."""
    if len(tensors) > 1:
        heads = [torch.unflatten(x, 0, (sizes.num_heads, 1, sizes.head_dim)) for x in tensors]
        return torch.cat(heads, dim=1).flatten(0, 2)
    (tensor,) = tensors
    if name.endswith(_TABLE):
        return tensor.flatten(0, 1)
    if name == _PATCH_IN:
        return tensor.flatten(1)
    if name.startswith(_HEAD):
        return torch.unflatten(tensor, 0, (-1, sizes.channels)).transpose(0, 1).flatten(0, 1)
    return tensor


def to_wan(name: str, tensor: Tensor, sizes: VideoDiTSizes) -> tuple[Tensor, ...]:
    """Return Wan's tensors, split from our parameter ``name``; the inverse of `from_wan`."""
    if (number := len(wan_names(name, Naming.ORIGINAL))) > 1:
        heads = torch.unflatten(tensor, 0, (sizes.num_heads, number, sizes.head_dim))
        return tuple(part.flatten(0, 1) for part in heads.unbind(1))
    if name.endswith(_TABLE):
        return (tensor.unsqueeze(0),)
    if name == _PATCH_IN:
        p = sizes.patch_size
        return (torch.unflatten(tensor, 1, (sizes.channels, 1, p, p)),)
    if name.startswith(_HEAD):
        return (torch.unflatten(tensor, 0, (sizes.channels, -1)).transpose(0, 1).flatten(0, 1),)
    return (tensor,)


_ADAPTER = re.compile(
    r"(?:critic\.)?"
    rf"(?P<layer>blocks\.\d+\.(?:{'|'.join(map(re.escape, BLOCK_MODULES))}))"
    r"\.lora\.(?P<matrix>[ab])$"
)


def wan_adapters(head_dim: int) -> PeftLayers:
    """Return the mapping of our LoRA adapters to the layers of diffusers' WanTransformer3DModel.

    Adapters exported with it are loaded by diffusers' method ``load_lora_adapter``, with
    ``prefix="base_model.model"``.
    """
    # A layer is called alike in all blocks, such as ``attn1.to_q``.
    parts = partial(_wan_parts, head_dim=head_dim)
    return PeftLayers(_ADAPTER, parts, lambda path: path.split(".", 2)[2], None)


def _wan_parts(name: str, matrix: Tensor, head_dim: int) -> Iterator[Part]:
    """Split our LoRA matrix ``name`` into one matrix for each layer of Wan that our layer fuses.

    Yields (Wan's layer, kind, matrix). The kind is "A" for LoRA's matrix ``[r, in]``, "B" for
    ``[out, r]``. If our layer fuses p layers, such as query, key and value, its output rows are
    ordered head by head, ``[n, p, d]``; each of the p layers gets its own rows of B and a copy
    of A.
    """
    match = _ADAPTER.match(name)
    assert match is not None
    weights = wan_names(f"{match['layer']}.weight", Naming.DIFFUSERS)
    layers = [weight.removesuffix(".weight") for weight in weights]
    kind = match["matrix"].upper()
    if kind == "B" and len(layers) > 1:
        heads = matrix.reshape(-1, len(layers), head_dim, matrix.size(1))
        values = [part.flatten(0, 1) for part in heads.unbind(1)]
    else:
        # safetensors refuses tensors that share memory.
        values = [matrix.clone() for _ in layers]
    for layer, part in zip(layers, values, strict=True):
        yield layer, kind, part
