"""Finds HunyuanVideo's sizes in diffusers' config.json, or in the shapes of a file's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.video.networks.hunyuan.config import SIZES, HunyuanSizes
from megatron_ext.video.networks.hunyuan.convert.names import BLOCKS, OUTER, Naming, public_name
from megatron_ext.video.networks.joint_weights import (
    axes_of,
    entries_of,
    mlp_ratio_of,
    refuse_kin,
)
from megatron_ext.video.networks.published import CLASS, Shapes

HUNYUAN_CLASS = "HunyuanVideoTransformer3DModel"
"""The class of HunyuanVideo in diffusers."""
_USE = "use HunyuanVideo for text to video, or for image to video with 33 input channels."
_COPY = "copy the whole model again."

_ENTRIES: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "num_attention_heads": 24, "attention_head_dim": 128,
    "num_layers": 20, "num_single_layers": 40, "num_refiner_layers": 2, "mlp_ratio": 4.0,
    "patch_size": 2, "patch_size_t": 1, "qk_norm": "rms_norm", "guidance_embeds": True,
    "text_embed_dim": 4096, "pooled_projection_dim": 768, "rope_theta": 256.0,
    "rope_axes_dim": (16, 56, 56), "image_condition_type": None,
}  # fmt: skip
"""The arguments of diffusers' class, with the values that missing ones have."""
_SETTLED = {"patch_size_t": 1, "qk_norm": "rms_norm"}
"""Entries that have one value in all models that can be read."""
_CONDITIONED = {
    "token_replace": "HunyuanVideo I2V that replaces the first frame's tokens",
}
"""Values of ``image_condition_type`` that cannot be read, with the models that have them."""
_KIN = {
    "byt5_in.": "HunyuanVideo 1.5 or HunyuanImage, which take glyphs of a byte-level T5",
    "vision_in.": "HunyuanVideo 1.5, which takes embeddings of an image",
    "image_projection.": "FramePack, which takes embeddings of an image",
    "clean_x_embedder.": "FramePack, which takes clean frames of several scales",
    "time_r_in.": "HunyuanVideo distilled by MeanFlow, which takes a second timestep",
    "audio_proj.": "HunyuanVideo-Avatar, which takes audio",
}
"""Beginnings of names that only relatives of HunyuanVideo have, with words for the relative."""


def read_config(raw: Mapping[str, Any], path: Path) -> HunyuanSizes:
    """Return the sizes in a config.json; raise CheckpointError for what cannot be trained here."""
    x = entries_of(raw, path, _ENTRIES, HUNYUAN_CLASS, _USE)
    condition = x["image_condition_type"]
    if condition not in (None, "latent_concat"):
        kind = _CONDITIONED.get(condition, "a model with a condition of another kind")
        raise CheckpointError(
            f"{path} says `image_condition_type` {condition!r}, like {kind}, but reference frames "
            f"are concatenated here; {_USE}"
        )
    for name, value in _SETTLED.items():
        if x[name] != value:
            raise CheckpointError(f"{path} says `{name}` {x[name]!r}, but must say {value!r}.")
    for name, value in x.items():
        fits, wanted = _fits(name, value)
        if not fits:
            raise CheckpointError(f"{path} says `{name}` {value!r}, which must be {wanted}.")
    heads = x["num_attention_heads"]
    return _sizes(
        path,
        in_channels=x["in_channels"],
        cond_embed=condition is not None,
        channels=x["out_channels"] or x["in_channels"],
        hidden_size=heads * x["attention_head_dim"],
        num_heads=heads,
        axes_dim=tuple(x["rope_axes_dim"]),
        num_double_blocks=x["num_layers"],
        num_single_blocks=x["num_single_layers"],
        num_refiner_blocks=x["num_refiner_layers"],
        patch_size=x["patch_size"],
        text_width=x["text_embed_dim"],
        pooled_width=x["pooled_projection_dim"],
        mlp_ratio=int(x["mlp_ratio"]),
        rope_theta=float(x["rope_theta"]),
        guidance_embed=x["guidance_embeds"],
    )


def _fits(name: str, value: Any) -> tuple[bool, str]:
    """Return whether an entry of config.json has the right type, and words for this type."""
    if name in (*_SETTLED, "image_condition_type"):
        return True, ""
    if name == "guidance_embeds":
        return isinstance(value, bool), "true or false"
    if name == "rope_axes_dim":
        fits = isinstance(value, list | tuple) and all(type(part) is int for part in value)
        return fits, "a list of integers"
    number = type(value) in (int, float) and math.isfinite(value) and value > 0
    if name == "rope_theta":
        return number, "a positive number"
    if name == "mlp_ratio":
        return number and value == int(value), "a whole number"
    return type(value) is int or (name == "out_channels" and value is None), "an integer"


def write_config(sizes: HunyuanSizes) -> dict[str, Any]:
    """Return the content of config.json."""
    values = (
        sizes.channels * 2 + 1 if sizes.cond_embed else sizes.channels, sizes.channels,
        sizes.num_heads, sizes.head_dim, sizes.num_double_blocks, sizes.num_single_blocks,
        sizes.num_refiner_blocks, float(sizes.mlp_ratio), sizes.patch_size, 1, "rms_norm",
        sizes.guidance_embed, sizes.text_width, sizes.pooled_width, sizes.rope_theta,
        list(sizes.axes_dim), "latent_concat" if sizes.cond_embed else None,
    )  # fmt: skip
    return {CLASS: HUNYUAN_CLASS, **dict(zip(_ENTRIES, values, strict=True))}


def read_shapes(shapes: Shapes, path: Path, naming: Naming) -> HunyuanSizes:
    """Return the sizes of a model whose tensors have these shapes; raise CheckpointError if none.

    No shape tells how many features of a head rotate by frame, row and column, nor the base of the
    frequencies; they are those of the named size with heads of equal size.
    """
    refuse_kin(shapes, _KIN, path, _USE)
    own = naming is not Naming.DIFFUSERS

    def shape(module: str, dimensions: int) -> tuple[int, ...]:
        """Return the shape of a weight by its name in diffusers or in the original repository."""
        name = public_name(f"{module}.weight", naming)
        if len(shapes.get(name, ())) != dimensions:
            raise CheckpointError(
                f"{path} holds no `{name}` of {dimensions} dimensions, which HunyuanVideo has; "
                f"{_COPY}"
            )
        return shapes[name]

    def has(module: str) -> bool:
        return public_name(f"{module}.weight", naming) in shapes

    def layer(block: str, number: int, own_layer: str) -> str:
        *places, layers = BLOCKS[block]
        return f"{places[own]}.{layers[own_layer][own]}".replace("{}", str(number))

    def count(block: str, own_layer: str) -> int:
        number = 0
        while has(layer(block, number, own_layer)):
            number += 1
        return number

    h, channels, frames, patch, width = shape(OUTER["embedding.img_in"][own], 5)
    if frames != 1 or patch != width:
        raise CheckpointError(
            f"{path} has patches of {frames} x {patch} x {width}, which must be 1 x p x p; {_USE}"
        )
    doubles = count("double_blocks.{}.img", "linear_proj")
    singles = count("single_blocks.{}", "linear_proj")
    block = "double_blocks.{}.img" if doubles else "single_blocks.{}"
    (d,) = shape(layer(block, 0, "norm.q_layernorm"), 1)
    if doubles:
        inner = shape(layer(block, 0, "linear_fc1"), 2)[0]
    else:
        inner = shape(layer(block, 0, "linear_fc2"), 2)[1] - h
    ratio = mlp_ratio_of(inner, h, path, _USE)
    latent = shape(OUTER["final_layer.linear"][own], 2)[0] // max(1, patch**2)
    return _sizes(
        path,
        in_channels=channels,
        cond_embed=channels != latent,
        channels=latent,
        hidden_size=h,
        num_heads=h // max(1, d),
        axes_dim=axes_of(d, SIZES, path),
        num_double_blocks=doubles,
        num_single_blocks=singles,
        num_refiner_blocks=count("embedding.txt_in.blocks.{}", "linear_proj"),
        patch_size=patch,
        text_width=shape(OUTER["embedding.txt_in.linear_in"][own], 2)[1],
        pooled_width=shape(OUTER["embedding.pooled_in.linear_in"][own], 2)[1],
        mlp_ratio=ratio,
        guidance_embed=has(OUTER["embedding.guidance_in.linear_in"][own]),
    )


def _sizes(path: Path, *, in_channels: int, **sizes: Any) -> HunyuanSizes:
    """Return sizes; CheckpointError says what in ``path`` does not fit HunyuanVideo.

    ``in_channels`` is the number of channels in front of the network; ``sizes`` holds those behind.
    """
    channels = sizes["channels"]
    wanted = 2 * channels + 1 if sizes["cond_embed"] else channels
    if in_channels != wanted:
        kind = {2 * channels: "SkyReels V1 for image to video"}.get(in_channels, "another model")
        raise CheckpointError(
            f"{path} has {in_channels} channels in front and {channels} behind, like {kind}, but "
            f"needs {channels}, or {2 * channels + 1} for image to video; {_USE}"
        )
    try:
        return HunyuanSizes(**sizes)
    except (ConfigError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is no model: {error}") from error
