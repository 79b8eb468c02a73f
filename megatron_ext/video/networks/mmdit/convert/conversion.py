"""Describes the published weights of FLUX.1 and Open-Sora 2.0, in the forms of three codes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.networks import joint_weights
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.networks.mmdit.convert.sizes import (
    FLUX_CLASSES,
    KIN,
    read_config,
    read_shapes,
    write_config,
)
from megatron_ext.video.networks.mmdit.convert.table import (
    Naming,
    parameters,
    public_names,
    table,
)
from megatron_ext.video.networks.network import WITHOUT_REFERENCES, Sections
from megatron_ext.video.networks.published import Conversion

_OUTER = ("embedding.img_in.weight", "embedding.txt_in.weight", "final_layer.linear.weight")
_OWN = {
    Naming.OPEN_SORA: "linear_qkv.weight",
    Naming.COMFYUI: "norm.q_layernorm.weight",
}
"""The parameter of a block whose names only this naming has; `Naming.ORIGINAL` has the others."""


def _knows(names: Collection[str], naming: Naming) -> bool:
    """Return whether these are names of FLUX.1, of Open-Sora 2.0 or of a close relative."""
    if any(name not in names for ours in _OUTER for name in public_names(ours, naming)):
        return False
    blocks = ("double_blocks.0.img", "single_blocks.0")
    own = [f"{block}.{_OWN[naming]}" for block in blocks if naming in _OWN]
    return not own or any(public_names(ours, naming)[0] in names for ours in own)


def _sections(sizes: JointSizes, _kind: str) -> Sections:
    """Return the flags of a run that trains an MMDiT of these sizes."""
    return joint_weights.sections(sizes, ("mmdit", "mmdit_size"), SIZES)


def _sampling(sizes: JointSizes, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags with which Open-Sora 2.0 samples videos, or FLUX.1 pictures."""
    if sizes.cond_embed:
        return {"sample_size": (192, 336), "sample_frames": 129, "sample_fps": 24.0}
    flags: dict[str, Any] = {
        **WITHOUT_REFERENCES,
        "sample_size": (1024, 1024),
        "sample_frames": 1,
        "sample_steps": 28,
        "sample_text_scale": 1.0,
        "sample_image_scale": 1.0,
        "sample_oscillation": False,
    }
    return {**flags, "guidance": 3.5} if sizes.guidance_embed else flags


CONVERSION = Conversion(
    title="FLUX.1 or Open-Sora 2.0",
    # Open-Sora and Black Forest Labs publish single files alone.
    forms=joint_weights.forms(
        Naming,
        in_folders=Naming.DIFFUSERS,
        classes=FLUX_CLASSES,
        read_config=read_config,
        write_config=write_config,
        knows=_knows,
        read_shapes=read_shapes,
        table=table,
    ),
    parameters=parameters,
    kinds=lambda _sizes: ("mmdit",),
    sections=_sections,
    sampling=_sampling,
    adapted=joint_weights.ADAPTED,
    refused={
        "ChromaTransformer2DModel": KIN["distilled_guidance_layer."],
        "Flux2Transformer2DModel": KIN["double_stream_modulation_img."],
        "SD3Transformer2DModel": "Stable Diffusion 3, which has no single blocks",
        "FluxControlNetModel": "a ControlNet beside FLUX.1",
    },
    adds=frozenset({"cond_embed"}),
)
