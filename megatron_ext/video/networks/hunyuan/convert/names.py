"""Maps HunyuanVideo's parameters to the published tensors, in each of their three namings.

Sources: ``hyvideo/modules/models.py`` of the original repository (Tencent/HunyuanVideo),
``transformer_hunyuan_video.py`` of diffusers, and ``comfy/supported_models.py`` of ComfyUI, which
renames the original's tensors, and saves them so. Besides the names, they differ from ours in this
(h hidden size, n heads of size d, c latent channels, p patch size):

- The projections to queries, keys and values of double and single blocks are fused head by head
  here, ``[n, 3, d]`` rows. The original has ``[3, n, d]`` rows; diffusers has three layers. The
  refiner's have the original's order here too.
- A single block has one layer for attention and one for the MLP here. The original's ``linear1``
  has the rows [queries; keys; values; MLP], ``linear2`` (diffusers' ``proj_out``) the columns
  [attention, MLP].
- The published layer of the latents is a convolution, ``[h, channels, 1, p, p]``. In models for
  image to video its input is [noised latents; latents of the reference; mask], whose layers are
  ``img_in`` and ``cond_in`` here.
- diffusers swaps shift and scale in the modulation of the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.networks import joint_weights
from megatron_ext.video.networks.hunyuan.config import HunyuanSizes
from megatron_ext.video.networks.joint_weights import embedder, linear
from megatron_ext.video.networks.published import (
    Rule,
    Shape,
    by_head,
    columns_from,
    expanded,
    joined,
    reordered,
    rows_from,
    unfused_by_head,
    whole,
)


class Naming(Enum):
    """The code whose tensor names are used."""

    DIFFUSERS = "diffusers"
    ORIGINAL = "original"
    COMFYUI = "comfyui"


_TXT = "context_embedder.time_text_embed"
_MODULATION = "final_layer.modulation"
OUTER = {
    "embedding.img_in": ("x_embedder.proj", "img_in.proj"),
    "embedding.txt_in.linear_in": ("context_embedder.proj_in", "txt_in.input_embedder"),
    "embedding.txt_in.time_in.linear_in": (
        f"{_TXT}.timestep_embedder.linear_1",
        "txt_in.t_embedder.mlp.0",
    ),
    "embedding.txt_in.time_in.linear_out": (
        f"{_TXT}.timestep_embedder.linear_2",
        "txt_in.t_embedder.mlp.2",
    ),
    "embedding.txt_in.mean_in.linear_in": (
        f"{_TXT}.text_embedder.linear_1",
        "txt_in.c_embedder.linear_1",
    ),
    "embedding.txt_in.mean_in.linear_out": (
        f"{_TXT}.text_embedder.linear_2",
        "txt_in.c_embedder.linear_2",
    ),
    "embedding.time_in.linear_in": (
        "time_text_embed.timestep_embedder.linear_1",
        "time_in.mlp.0",
    ),
    "embedding.time_in.linear_out": (
        "time_text_embed.timestep_embedder.linear_2",
        "time_in.mlp.2",
    ),
    "embedding.pooled_in.linear_in": (
        "time_text_embed.text_embedder.linear_1",
        "vector_in.in_layer",
    ),
    "embedding.pooled_in.linear_out": (
        "time_text_embed.text_embedder.linear_2",
        "vector_in.out_layer",
    ),
    "embedding.guidance_in.linear_in": (
        "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.mlp.0",
    ),
    "embedding.guidance_in.linear_out": (
        "time_text_embed.guidance_embedder.linear_2",
        "guidance_in.mlp.2",
    ),
    _MODULATION: ("norm_out.linear", "final_layer.adaLN_modulation.1"),
    "final_layer.linear": ("proj_out", "final_layer.linear"),
}
"""Modules outside of the blocks: our name to (diffusers' name, name in the original)."""

_REFINER = {
    "norm1": ("norm1", "norm1"),
    "linear_qkv": ("attn.to_{q,k,v}", "self_attn_qkv"),
    "linear_proj": ("attn.to_out.0", "self_attn_proj"),
    "norm2": ("norm2", "norm2"),
    "linear_fc1": ("ff.net.0.proj", "mlp.fc1"),
    "linear_fc2": ("ff.net.2", "mlp.fc2"),
    "modulation": ("norm_out.linear", "adaLN_modulation.1"),
}
_TEXT = {
    "modulation": ("norm1_context.linear", "txt_mod.linear"),
    "linear_qkv": ("attn.add_{q,k,v}_proj", "txt_attn_qkv"),
    "norm.q_layernorm": ("attn.norm_added_q", "txt_attn_q_norm"),
    "norm.k_layernorm": ("attn.norm_added_k", "txt_attn_k_norm"),
    "linear_proj": ("attn.to_add_out", "txt_attn_proj"),
    "linear_fc1": ("ff_context.net.0.proj", "txt_mlp.fc1"),
    "linear_fc2": ("ff_context.net.2", "txt_mlp.fc2"),
}
_IMAGE = {
    "modulation": ("norm1.linear", "img_mod.linear"),
    "linear_qkv": ("attn.to_{q,k,v}", "img_attn_qkv"),
    "norm.q_layernorm": ("attn.norm_q", "img_attn_q_norm"),
    "norm.k_layernorm": ("attn.norm_k", "img_attn_k_norm"),
    "linear_proj": ("attn.to_out.0", "img_attn_proj"),
    "linear_fc1": ("ff.net.0.proj", "img_mlp.fc1"),
    "linear_fc2": ("ff.net.2", "img_mlp.fc2"),
}
_SINGLE = {
    "modulation": ("norm.linear", "modulation.linear"),
    "linear_qkv": ("attn.to_{q,k,v}", "linear1"),
    "linear_fc1": ("proj_mlp", "linear1"),
    "norm.q_layernorm": ("attn.norm_q", "q_norm"),
    "norm.k_layernorm": ("attn.norm_k", "k_norm"),
    "linear_proj": ("proj_out", "linear2"),
    "linear_fc2": ("proj_out", "linear2"),
}
BLOCKS = {
    "embedding.txt_in.blocks.{}": (
        "context_embedder.token_refiner.refiner_blocks.{}",
        "txt_in.individual_token_refiner.blocks.{}",
        _REFINER,
    ),
    "double_blocks.{}.txt": ("transformer_blocks.{}", "double_blocks.{}", _TEXT),
    "double_blocks.{}.img": ("transformer_blocks.{}", "double_blocks.{}", _IMAGE),
    "single_blocks.{}": ("single_transformer_blocks.{}", "single_blocks.{}", _SINGLE),
}
"""Blocks, whose number stands for ``{}``: our name to (diffusers' name, name in the original,
layers in order as in `OUTER`). Braces around several names stand for layers that we fuse."""

_RENAMED = (
    ("txt_in.c_embedder.linear_1.", "txt_in.c_embedder.in_layer."),
    ("txt_in.c_embedder.linear_2.", "txt_in.c_embedder.out_layer."),
    ("_embedder.mlp.0.", "_embedder.in_layer."),
    ("_embedder.mlp.2.", "_embedder.out_layer."),
    ("_in.mlp.0.", "_in.in_layer."),
    ("_in.mlp.2.", "_in.out_layer."),
    ("_mod.linear.", "_mod.lin."),
    (".modulation.linear.", ".modulation.lin."),
    ("_attn_qkv.", "_attn.qkv."),
    ("_attn_proj.", "_attn.proj."),
    ("mlp.fc1.", "mlp.0."),
    ("mlp.fc2.", "mlp.2."),
    ("_attn_q_norm.weight", "_attn.norm.query_norm.scale"),
    ("_attn_k_norm.weight", "_attn.norm.key_norm.scale"),
    (".q_norm.weight", ".norm.query_norm.scale"),
    (".k_norm.weight", ".norm.key_norm.scale"),
)
"""Parts of the original's names, and what ComfyUI has in their place."""


def parameters(sizes: HunyuanSizes) -> dict[str, Shape]:
    """Return the unsharded shape of each parameter of HunyuanVideo by name, in module order."""
    h = sizes.hidden_size
    inner = sizes.refiner_mlp_size
    name = "embedding.txt_in"
    text = linear(f"{name}.linear_in", h, sizes.text_width)
    text |= embedder(f"{name}.time_in", TIMESTEP_WIDTH, h)
    text |= embedder(f"{name}.mean_in", sizes.text_width, h)
    for number in range(sizes.num_refiner_blocks):
        block = f"{name}.blocks.{number}"
        text |= {f"{block}.norm1.{kind}": (h,) for kind in ("weight", "bias")}
        text |= linear(f"{block}.linear_qkv", 3 * h, h)
        text |= linear(f"{block}.linear_proj", h, h)
        text |= {f"{block}.norm2.{kind}": (h,) for kind in ("weight", "bias")}
        text |= linear(f"{block}.linear_fc1", inner, h)
        text |= linear(f"{block}.linear_fc2", h, inner)
        text |= linear(f"{block}.modulation", 2 * h, h)
    return joint_weights.parameters(sizes, text, cond_bias=False)


def public_name(name: str, naming: Naming) -> str:
    """Return a tensor's name of the original repository as another code writes it."""
    if naming is Naming.COMFYUI:
        for theirs, comfy in _RENAMED:
            name = name.replace(theirs, comfy)
    return name


def table(sizes: HunyuanSizes, naming: Naming) -> Mapping[str, Rule]:
    """Return the rule by which each of our parameters is made of published tensors."""
    own = naming is not Naming.DIFFUSERS
    rules = dict[str, Rule]()
    for ours, names in OUTER.items():
        for kind in ("weight", "bias"):
            tensor = public_name(f"{names[own]}.{kind}", naming)
            swapped = ours == _MODULATION and not own
            rules[f"{ours}.{kind}"] = reordered(tensor, (1, 0)) if swapped else whole(tensor)
    channels = sizes.channels * (2 if sizes.cond_embed else 1) + sizes.cond_embed
    kernel = (sizes.hidden_size, channels, 1, sizes.patch_size, sizes.patch_size)
    latents = f"{OUTER['embedding.img_in'][own]}.weight"
    rules["embedding.img_in.weight"] = columns_from(latents, 0, shape=kernel)
    rules["embedding.cond_in.weight"] = columns_from(latents, sizes.token_width, shape=kernel)
    counts = {
        "embedding.txt_in.blocks.{}": sizes.num_refiner_blocks,
        "double_blocks.{}.txt": sizes.num_double_blocks,
        "double_blocks.{}.img": sizes.num_double_blocks,
        "single_blocks.{}": sizes.num_single_blocks,
    }
    for block, (*places, layers) in BLOCKS.items():
        for number in range(counts[block]):
            for ours, names in layers.items():
                for kind in ("weight", "bias"):
                    name = public_name(f"{places[own]}.{names[own]}.{kind}", naming)
                    tensors = expanded(name.replace("{}", str(number)))
                    rule = _rule(sizes, block, ours, tensors, kind, own=own)
                    rules[f"{block.format(number)}.{ours}.{kind}"] = rule
    return {name: rules[name] for name in parameters(sizes)}


def _rule(
    sizes: HunyuanSizes, block: str, layer: str, tensors: tuple[str, ...], kind: str, *, own: bool
) -> Rule:
    """Return the rule of the weight or bias (``kind``) of a block's layer.

    ``tensors`` are the published tensors that hold it, which have the names of diffusers unless
    ``own``.
    """
    h = sizes.hidden_size
    first = tensors[0]
    refines = ".txt_in." in block
    if layer == "linear_qkv" and len(tensors) > 1:
        return joined(*tensors) if refines else by_head(tensors, sizes.head_dim)
    if layer == "linear_qkv" and not refines:
        return unfused_by_head(first, 3, sizes.num_heads, sizes.head_dim)
    if block.startswith("single") and layer == "linear_fc1" and own:
        return rows_from(first, 3 * h)
    if block.startswith("single") and layer in ("linear_proj", "linear_fc2") and kind == "weight":
        return columns_from(first, 0 if layer == "linear_proj" else h)
    return whole(first)
