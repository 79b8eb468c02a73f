"""Maps the MMDiT's parameters to the tensors of FLUX.1 and of Open-Sora 2.0.

Sources: ``src/flux/model.py`` of black-forest-labs/flux, ``transformer_flux.py`` of diffusers, and
``opensora/models/mmdit`` of hpcaitech/Open-Sora. All three compute what our MMDiT computes. Besides
the names, they differ in this (h hidden size, m MLP width; n heads of size d):

- Ours fuses the projections to queries, keys and values head by head, ``[n, 3, d]`` rows. FLUX.1's
  own code has ``[3, n, d]`` rows; the others have three layers.
- A single block of ours has one layer for attention and one for the MLP where the others multiply
  once: ``linear1`` has the rows [queries; keys; values; MLP], ``linear2`` (diffusers' ``proj_out``)
  the columns [attention, MLP], Open-Sora's ``v_mlp`` the rows [values; MLP].
- diffusers swaps shift and scale in the modulation of the last layer.
- Open-Sora trains with Liger's rotary kernel, which rotates the features j and d / 2 + j of a head
  together, where ours and FLUX's rotate 2 j and 2 j + 1. So features of queries and keys, and of
  their norms, are in another order. Its configurations have three layers exactly where they use
  this kernel; a file with ``qkv`` is FLUX's, with or without Open-Sora's layer ``cond_in``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial

from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.networks import joint_weights
from megatron_ext.video.networks.joint_weights import linear
from megatron_ext.video.networks.published import (
    Part,
    Rule,
    Shape,
    by_head,
    columns_from,
    expanded,
    reordered,
    rows_from,
    unfused_by_head,
    whole,
)


class Naming(Enum):
    """The code whose names the tensors have.

    It is diffusers, Open-Sora, the repository of FLUX.1 (which ComfyUI reads), or newer versions of
    ComfyUI, which call the scales of norms weights. A file's names are compared in this order.
    """

    DIFFUSERS = "diffusers"
    OPEN_SORA = "open-sora"
    COMFYUI = "comfyui"
    ORIGINAL = "original"


_MODULATION = "final_layer.modulation"
_OUTER = {
    "embedding.img_in": ("x_embedder", "img_in"),
    "embedding.txt_in": ("context_embedder", "txt_in"),
    **{
        f"embedding.{ours}.linear_{side}": (
            f"time_text_embed.{diffusers}_embedder.linear_{number}",
            f"{original}.{side}_layer",
        )
        for ours, diffusers, original in (
            ("time_in", "timestep", "time_in"),
            ("pooled_in", "text", "vector_in"),
            ("guidance_in", "guidance", "guidance_in"),
        )
        for number, side in ((1, "in"), (2, "out"))
    },
    "embedding.cond_in": (None, "cond_in"),
    _MODULATION: ("norm_out.linear", "final_layer.adaLN_modulation.1"),
    "final_layer.linear": ("proj_out", "final_layer.linear"),
}
"""Modules outside of the blocks: our name to (diffusers' name, name of FLUX.1 and Open-Sora).

diffusers has no layer for reference frames."""

_STREAMS: dict[str, dict[str, tuple[str, str]]] = {
    "img": {
        "modulation": ("norm1.linear", "img_mod.lin"),
        "linear_qkv": ("attn.to_{q,k,v}", "img_attn.{q,k,v}_proj"),
        "norm.q_layernorm": ("attn.norm_q", "img_attn.norm.query_norm"),
        "norm.k_layernorm": ("attn.norm_k", "img_attn.norm.key_norm"),
        "linear_proj": ("attn.to_out.0", "img_attn.proj"),
        "linear_fc1": ("ff.net.0.proj", "img_mlp.0"),
        "linear_fc2": ("ff.net.2", "img_mlp.2"),
    },
    "txt": {
        "modulation": ("norm1_context.linear", "txt_mod.lin"),
        "linear_qkv": ("attn.add_{q,k,v}_proj", "txt_attn.{q,k,v}_proj"),
        "norm.q_layernorm": ("attn.norm_added_q", "txt_attn.norm.query_norm"),
        "norm.k_layernorm": ("attn.norm_added_k", "txt_attn.norm.key_norm"),
        "linear_proj": ("attn.to_add_out", "txt_attn.proj"),
        "linear_fc1": ("ff_context.net.0.proj", "txt_mlp.0"),
        "linear_fc2": ("ff_context.net.2", "txt_mlp.2"),
    },
}
"""Layers of a double block's streams, as in `_OUTER`; the names of Open-Sora's three layers stand
for FLUX.1's ``qkv`` too."""

_SINGLE = {
    "modulation": ("norm.linear", "modulation.lin"),
    "linear_qkv": ("attn.to_{q,k,v}", "{q_proj,k_proj,v_mlp}"),
    "norm.q_layernorm": ("attn.norm_q", "norm.query_norm"),
    "norm.k_layernorm": ("attn.norm_k", "norm.key_norm"),
    "linear_fc1": ("proj_mlp", "v_mlp"),
    "linear_proj": ("proj_out", "linear2"),
    "linear_fc2": ("proj_out", "linear2"),
}
"""Layers of a single block, as in `_OUTER`; FLUX.1 has ``linear1`` in place of Open-Sora's
``q_proj``, ``k_proj`` and ``v_mlp``."""


def parameters(sizes: JointSizes) -> dict[str, Shape]:
    """Return the unsharded shape of each parameter of an MMDiT by name, in module order."""
    text = linear("embedding.txt_in", sizes.hidden_size, sizes.text_width)
    return joint_weights.parameters(sizes, text)


_ANY = JointSizes(12, 2, (2, 2, 2), 1, 1)
"""Sizes of some MMDiT; which tensors make a parameter does not depend on them."""


def public_names(name: str, naming: Naming) -> tuple[str, ...]:
    """Return the names of the public tensors that make our parameter ``name``, () if none do."""
    rule = _rule(_ANY, naming, *name.rsplit(".", 1))
    parts = [] if rule is None else rule(3 * _ANY.hidden_size)
    return tuple(dict.fromkeys(part.tensor for part in parts))


def table(sizes: JointSizes, naming: Naming) -> Mapping[str, Rule]:
    """Return the rule by which each of our parameters is made of public tensors."""
    return {
        name: rule
        for name in parameters(sizes)
        if (rule := _rule(sizes, naming, *name.rsplit(".", 1))) is not None
    }


def _rule(sizes: JointSizes, naming: Naming, module: str, kind: str) -> Rule | None:
    """Return the rule of the weight or bias (``kind``) of a module, None if the form lacks it."""
    own = naming is not Naming.DIFFUSERS
    if module in _OUTER:
        name = _OUTER[module][own]
        if name is None:
            return None
        tensor = f"{name}.{kind}"
        swapped = module == _MODULATION and not own
        return reordered(tensor, (1, 0)) if swapped else whole(tensor)
    place, number, layer = module.split(".", 2)
    block = f"{place}.{number}." if own else f"{place.replace('_', '_transformer_')}.{number}."
    if place == "single_blocks":
        return _single_rule(sizes, naming, block, layer, kind)
    stream, layer = layer.split(".", 1)
    if not own:
        block = f"transformer_blocks.{number}."
    name = _STREAMS[stream][layer][own]
    if layer == "linear_qkv":
        if naming is not Naming.OPEN_SORA and own:
            qkv = f"{block}{stream}_attn.qkv.{kind}"
            return unfused_by_head(qkv, 3, sizes.num_heads, sizes.head_dim)
        return _by_head(sizes, naming, [f"{block}{x}.{kind}" for x in expanded(name)])
    return _norm_or_whole(sizes, naming, f"{block}{name}", kind)


def _single_rule(sizes: JointSizes, naming: Naming, block: str, layer: str, kind: str) -> Rule:
    h = sizes.hidden_size
    own = naming is not Naming.DIFFUSERS
    name = f"{block}{_SINGLE[layer][own]}"
    if own and naming is not Naming.OPEN_SORA and layer in ("linear_qkv", "linear_fc1"):
        tensor = f"{block}linear1.{kind}"
        if layer == "linear_fc1":
            return rows_from(tensor, 3 * h)
        return unfused_by_head(tensor, 3, sizes.num_heads, sizes.head_dim)
    if layer == "linear_qkv":
        return _by_head(sizes, naming, [f"{x}.{kind}" for x in expanded(name)])
    if layer == "linear_fc1" and own:
        return rows_from(f"{name}.{kind}", h)
    if layer in ("linear_proj", "linear_fc2") and kind == "weight":
        return columns_from(f"{name}.weight", 0 if layer == "linear_proj" else h)
    return _norm_or_whole(sizes, naming, name, kind)


def _norm_or_whole(sizes: JointSizes, naming: Naming, name: str, kind: str) -> Rule:
    if naming in (Naming.DIFFUSERS, Naming.COMFYUI) or not name.endswith("_norm"):
        return whole(f"{name}.{kind}")
    if naming is Naming.OPEN_SORA:
        return partial(_interleaved, [(f"{name}.scale", True)], sizes.head_dim)
    return whole(f"{name}.scale")


def _by_head(sizes: JointSizes, naming: Naming, tensors: Sequence[str]) -> Rule:
    if naming is Naming.DIFFUSERS:
        return by_head(tensors, sizes.head_dim)
    *rotated, value = tensors
    turned = [*((tensor, True) for tensor in rotated), (value, False)]
    return partial(_interleaved, turned, sizes.head_dim)


def _interleaved(tensors: Sequence[tuple[str, bool]], d: int, rows: int) -> list[Part]:
    """Return the parts of a projection, ``[n, p, d]`` rows, fused head by head from p tensors.

    ``tensors`` has the name of each tensor, ``[n, d]`` rows, and whether the halves of its heads
    are rotated together: rows j and d / 2 + j are then our rows 2 j and 2 j + 1.
    """
    parts = list[Part]()
    for head in range(rows // (len(tensors) * d)):
        for i, (tensor, halves) in enumerate(tensors):
            row = (head * len(tensors) + i) * d
            if halves:
                pairs = range(d // 2)
                parts += [Part(tensor, row + 2 * j, 2, head * d + j, d // 2) for j in pairs]
            else:
                parts.append(Part(tensor, row, d, head * d))
    return parts
