"""Maps the video DiT's parameters to the tensors of Wan, in each of its two namings.

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
from collections.abc import Mapping
from enum import Enum

from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.networks.published import (
    Rule,
    by_head,
    expanded,
    transposed_rows,
    whole,
)
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
_VISION, _IMAGE = "embedder.vision_in", "condition_embedder.image_embedder"
VISION_MODULES = {
    f"{_VISION}.input_norm": (f"{_IMAGE}.norm1", "img_emb.proj.0"),
    f"{_VISION}.linear_in": (f"{_IMAGE}.ff.net.0.proj", "img_emb.proj.1"),
    f"{_VISION}.linear_out": (f"{_IMAGE}.ff.net.2", "img_emb.proj.3"),
    f"{_VISION}.output_norm": (f"{_IMAGE}.norm2", "img_emb.proj.4"),
}
"""The modules, as in `MODULES`, by which a network embeds vision tokens, if it takes any."""
POSITIONS = (f"{_IMAGE}.pos_embed", "img_emb.emb_pos")
"""The names of the vision tokens' positions in both namings."""
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
    "cross_attention.linear_vision_kv": ("attn2.add_{k,v}_proj", "cross_attn.{k,v}_img"),
    "cross_attention.vision_k_norm": ("attn2.norm_added_k", "cross_attn.norm_k_img"),
    "cross_attention.linear_proj": ("attn2.to_out.0", "cross_attn.o"),
    "linear_fc1": ("ffn.net.0.proj", "ffn.0"),
    "linear_fc2": ("ffn.net.2", "ffn.2"),
}
"""Modules of a block in order, as in `MODULES`. Our module fuses several of Wan's if these are
written with braces: ``to_{q,k,v}`` stands for ``to_q``, ``to_k`` and ``to_v``. Only networks that
take vision tokens have those named after these."""
_TABLE = "modulation.weight"
_BLOCK_TABLE = ("scale_shift_table", "modulation")
_HEAD_TABLE = ("scale_shift_table", "head.modulation")


def shapes(sizes: VideoDiTSizes) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of each parameter of a video DiT by name, in module order.

    All layers and norms have biases, except the norms of queries and keys.
    """
    h = sizes.hidden_size
    ffn = sizes.ffn_size
    token = sizes.token_width
    matrices = {
        "embedder.patch_in": (h, sizes.input_width),
        "embedder.text_in": (h, sizes.text_width),
        "embedder.time_in.linear_in": (h, TIMESTEP_WIDTH),
        "embedder.time_projection": (6 * h, h),
        _HEAD: (token, h),
        "self_attention.linear_qkv": (3 * h, h),
        "cross_attention.linear_kv": (2 * h, h),
        "cross_attention.linear_vision_kv": (2 * h, h),
        f"{_VISION}.input_norm": (sizes.vision_width,),
        f"{_VISION}.linear_in": (sizes.vision_width, sizes.vision_width),
        f"{_VISION}.linear_out": (h, sizes.vision_width),
        "linear_fc1": (ffn, h),
        "linear_fc2": (h, ffn),
    }
    by_name: dict[str, tuple[int, ...]] = {}

    def add(prefix: str, module: str) -> None:
        usual = (h,) if module.endswith("norm") else (h, h)
        weight = matrices.get(module, usual)
        by_name[f"{prefix}{module}.weight"] = weight
        if not module.endswith(("q_norm", "k_norm")):
            by_name[f"{prefix}{module}.bias"] = weight[:1]

    *embedder, head = MODULES
    for module in embedder:
        add("", module)
    if sizes.vision_positions:
        by_name[f"{_VISION}.positions"] = (sizes.vision_positions, sizes.vision_width)
    for module in VISION_MODULES if sizes.vision_width else ():
        add("", module)
    own = [name for name in BLOCK_MODULES if sizes.vision_width or "vision" not in name]
    for number in range(sizes.num_blocks):
        by_name[f"blocks.{number}.{_TABLE}"] = (6, h)
        for module in own:
            add(f"blocks.{number}.", module)
    by_name[f"head.{_TABLE}"] = (2, h)
    add("", head)
    return by_name


def table(sizes: VideoDiTSizes, naming: Naming) -> Mapping[str, Rule]:
    """Return the rule by which each of our parameters is made of Wan's tensors."""
    h = sizes.hidden_size
    own = naming is Naming.ORIGINAL
    positions = (1, sizes.vision_positions, sizes.vision_width)
    rules: dict[str, Rule] = {
        f"head.{_TABLE}": whole(_HEAD_TABLE[own], shape=(1, 2, h)),
        f"{_VISION}.positions": whole(POSITIONS[own], shape=positions),
    }
    for ours, names in (MODULES | VISION_MODULES).items():
        for kind in ("weight", "bias"):
            rules[f"{ours}.{kind}"] = whole(f"{names[own]}.{kind}")
    channels = sizes.channels + sizes.condition_channels
    patch = (h, channels, 1, sizes.patch_size, sizes.patch_size)
    rules[_PATCH_IN] = whole(f"{MODULES['embedder.patch_in'][own]}.weight", shape=patch)
    for kind in ("weight", "bias"):
        rules[f"{_HEAD}.{kind}"] = transposed_rows(f"{MODULES[_HEAD][own]}.{kind}", sizes.channels)
    for number in range(sizes.num_blocks):
        block = f"blocks.{number}."
        rules[block + _TABLE] = whole(block + _BLOCK_TABLE[own], shape=(1, 6, h))
        for ours, names in BLOCK_MODULES.items():
            for kind in ("weight", "bias"):
                parts = expanded(f"{block}{names[own]}.{kind}")
                rules[f"{block}{ours}.{kind}"] = (
                    whole(*parts) if len(parts) == 1 else by_head(parts, sizes.head_dim)
                )
    return rules


ADAPTED = re.compile(rf"blocks\.\d+\.(?:{'|'.join(map(re.escape, BLOCK_MODULES))})$")
"""The names of our layers that can have LoRA adapters."""
