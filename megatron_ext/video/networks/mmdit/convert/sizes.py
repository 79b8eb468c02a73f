"""Finds the sizes of an MMDiT in diffusers' config.json, or in the shapes of a file's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.networks.joint_weights import (
    axes_of,
    entries_of,
    mlp_ratio_of,
    refuse_kin,
)
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.networks.mmdit.convert.table import Naming, public_names
from megatron_ext.video.networks.published import CLASS, Shapes

FLUX_CLASS = "FluxTransformer2DModel"
"""The class of FLUX.1 in diffusers."""
FLUX_CLASSES = (FLUX_CLASS, "FluxTransformer2DModelWithMasking")
"""Classes with these weights: the second is SimpleTuner's, which also masks the text."""
_PATCH = 2
"""The patch size of FLUX.1, which neither config.json nor the shapes of its tensors tell."""
_RATIO = 4
"""The width of MLPs over the hidden size in diffusers' class."""
_THETA = 10_000.0
"""The base of the rotary frequencies in all published models."""
_USE = "use FLUX.1 dev or schnell, or Open-Sora 2.0."
_COPY = "copy the whole model again."

_ENTRIES: dict[str, Any] = {
    "patch_size": 1, "in_channels": 64, "out_channels": None, "num_layers": 19,
    "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
"""The arguments of diffusers' class, with the values that missing ones have."""

_CONDITIONED = {384: "FLUX.1 Fill", 128: "FLUX.1 Canny or Depth"}
"""Widths of the input of FLUX.1's models that take further images, whose output has width 64."""

KIN = {
    "distilled_guidance_layer.": "Chroma, whose modulation comes from one common network",
    "double_stream_modulation_img.": "FLUX.2, whose blocks share their modulation",
}
"""Beginnings of names that only relatives of FLUX.1 have, with words for the relative."""


def read_config(raw: Mapping[str, Any], path: Path) -> JointSizes:
    """Return the sizes in a config.json; raise CheckpointError for what the MMDiT lacks."""
    x = entries_of(raw, path, _ENTRIES, FLUX_CLASS, _USE)
    for name, value in x.items():
        fits = type(value) is int or (name == "out_channels" and value is None)
        wanted = "an integer"
        if name == "guidance_embeds":
            fits = isinstance(value, bool)
            wanted = "true or false"
        elif name == "axes_dims_rope":
            fits = isinstance(value, list | tuple) and all(type(part) is int for part in value)
            wanted = "a list of integers"
        if not fits:
            raise CheckpointError(f"{path} says `{name}` {value!r}, which must be {wanted}.")
    if x["patch_size"] != 1:
        raise CheckpointError(
            f"{path} says `patch_size` {x['patch_size']}, but FLUX.1 has 1, since its tokens are "
            f"patches already; {_USE}"
        )
    heads = x["num_attention_heads"]
    return _sizes(
        path,
        token_width=x["in_channels"],
        output_width=x["out_channels"] or x["in_channels"],
        patch_size=_PATCH,
        hidden_size=heads * x["attention_head_dim"],
        num_heads=heads,
        axes_dim=tuple(x["axes_dims_rope"]),
        num_double_blocks=x["num_layers"],
        num_single_blocks=x["num_single_layers"],
        text_width=x["joint_attention_dim"],
        pooled_width=x["pooled_projection_dim"],
        guidance_embed=x["guidance_embeds"],
    )


def write_config(sizes: JointSizes) -> dict[str, Any]:
    """Return the content of config.json; raise CheckpointError for what diffusers' class lacks."""
    lacks = {
        f"has patches of {sizes.patch_size} x {sizes.patch_size}": sizes.patch_size != _PATCH,
        f"has MLPs {sizes.mlp_ratio} times as wide as the rest": sizes.mlp_ratio != _RATIO,
        f"rotates with the base {sizes.rope_theta:g}": sizes.rope_theta != _THETA,
    }
    for what, differs in lacks.items():
        if differs:
            raise CheckpointError(
                f"This MMDiT {what}, unlike diffusers' {FLUX_CLASS}; write a single file by "
                f"`--naming {Naming.OPEN_SORA.value}` or `--naming {Naming.ORIGINAL.value}`."
            )
    values = (
        1, sizes.token_width, None, sizes.num_double_blocks, sizes.num_single_blocks,
        sizes.head_dim, sizes.num_heads, sizes.text_width, sizes.pooled_width,
        sizes.guidance_embed, list(sizes.axes_dim),
    )  # fmt: skip
    return {CLASS: FLUX_CLASS, **dict(zip(_ENTRIES, values, strict=True))}


def read_shapes(shapes: Shapes, path: Path, naming: Naming) -> JointSizes:
    """Return the sizes of a model whose tensors have these shapes; raise CheckpointError if none.

    No shape tells the patch size, unless the model takes reference frames, nor how many features of
    a head rotate by frame, row and column, which are those of the named size with equal heads.
    """
    refuse_kin(shapes, KIN, path, _USE)

    def side(module: str, dimension: int) -> int:
        """Return a side of the matrix of our module, which must be one public tensor."""
        (name,) = public_names(f"{module}.weight", naming)
        if len(shapes.get(name, ())) != 2:
            raise CheckpointError(f"{path} holds no matrix `{name}`, as FLUX.1 does; {_COPY}")
        return shapes[name][dimension]

    h, tokens = (side("embedding.img_in", dimension) for dimension in (0, 1))
    doubles = _number_of_blocks(shapes, naming, "double_blocks.{}.img")
    singles = _number_of_blocks(shapes, naming, "single_blocks.{}")
    first = "double_blocks.0.img" if doubles else "single_blocks.0"
    (scale,) = public_names(f"{first}.norm.q_layernorm.weight", naming)
    if len(shapes.get(scale, ())) != 1:
        raise CheckpointError(f"{path} holds no vector `{scale}`, as FLUX.1 does; {_COPY}")
    (d,) = shapes[scale]
    width = side(f"{first}.linear_fc1", 0) if doubles else side(f"{first}.linear_fc2", 1) - h
    ratio = mlp_ratio_of(width, h, path, _USE)
    (cond,) = public_names("embedding.cond_in.weight", naming) or ("",)
    patch = _PATCH
    if cond in shapes:
        patch = math.isqrt(max(1, side("embedding.cond_in", 1) - tokens))
    (guidance,) = public_names("embedding.guidance_in.linear_in.weight", naming)
    return _sizes(
        path,
        token_width=tokens,
        output_width=side("final_layer.linear", 0),
        patch_size=patch,
        hidden_size=h,
        num_heads=h // max(1, d),
        axes_dim=axes_of(d, SIZES, path),
        num_double_blocks=doubles,
        num_single_blocks=singles,
        text_width=side("embedding.txt_in", 1),
        pooled_width=side("embedding.pooled_in.linear_in", 1),
        mlp_ratio=ratio,
        guidance_embed=guidance in shapes,
        cond_embed=cond in shapes,
    )


def _number_of_blocks(shapes: Shapes, naming: Naming, block: str) -> int:
    """Return how many blocks, from the first on, have a norm of queries; ``{}`` is the number."""
    count = 0
    while public_names(f"{block.format(count)}.norm.q_layernorm.weight", naming)[0] in shapes:
        count += 1
    return count


def _sizes(
    path: Path, *, token_width: int, output_width: int, patch_size: int, **sizes: Any
) -> JointSizes:
    """Return sizes; CheckpointError says what in ``path`` does not fit an MMDiT.

    ``token_width`` and ``output_width`` are the widths of a token before and after the network.
    """
    if token_width != output_width:
        kind = _CONDITIONED.get(token_width, "a model with further input channels")
        raise CheckpointError(
            f"{path} has tokens of {token_width} features in front and {output_width} behind, like "
            f"{kind}, but the MMDiT has equally many; {_USE}"
        )
    if token_width % patch_size**2:
        raise CheckpointError(
            f"{path} has tokens of {token_width} features, which must be divisible by the "
            f"{patch_size**2} latent pixels of a patch; {_USE}"
        )
    try:
        return JointSizes(channels=token_width // patch_size**2, patch_size=patch_size, **sizes)
    except (ConfigError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is no model: {error}") from error
