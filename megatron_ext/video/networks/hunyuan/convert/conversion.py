"""Describes the published weights of HunyuanVideo, in the forms of three codes."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from megatron_ext.video.networks.hunyuan.config import SIZES, HunyuanSizes
from megatron_ext.video.networks.hunyuan.convert.names import (
    ADAPTED,
    OUTER,
    Naming,
    parameters,
    public_name,
    table,
)
from megatron_ext.video.networks.hunyuan.convert.sizes import (
    HUNYUAN_CLASS,
    read_config,
    read_shapes,
    write_config,
)
from megatron_ext.video.networks.network import Sections
from megatron_ext.video.networks.published import Conversion, Form


def _knows(names: Collection[str], naming: Naming) -> bool:
    """Return whether these are names of HunyuanVideo or of a close relative."""
    modules = ("embedding.img_in", "embedding.txt_in.mean_in.linear_in")
    own = naming is not Naming.DIFFUSERS
    return all(public_name(f"{OUTER[x][own]}.weight", naming) in names for x in modules)


def _sections(sizes: HunyuanSizes, _kind: str) -> Sections:
    """Return the flags of a run that trains HunyuanVideo with these sizes."""
    own: dict[str, Any] = {
        "guidance_embed": sizes.guidance_embed,
        "cond_embed": sizes.cond_embed,
        "channels": sizes.channels,
        "caption_width": sizes.text_width,
        "pooled_caption_width": sizes.pooled_width,
    }
    flags = "num_double_blocks num_single_blocks axes_dim patch_size mlp_ratio rope_theta".split()
    compared = ("hidden_size", "num_heads", "num_refiner_blocks", *flags)
    for size, named in SIZES.items():
        if all(getattr(named, name) == getattr(sizes, name) for name in compared):
            return {"hunyuan": {"hunyuan_size": size}, "joint": own}
    own |= {name: getattr(sizes, name) for name in flags}
    return {
        "model": {"hidden_size": sizes.hidden_size, "num_attention_heads": sizes.num_heads},
        "joint": own,
        "hunyuan": {"num_refiner_blocks": sizes.num_refiner_blocks},
    }


def _form(naming: Naming) -> Form:
    # The original and ComfyUI's files have no config.json.
    in_folders: dict[str, Any] = {}
    if naming is Naming.DIFFUSERS:
        in_folders = {
            "classes": (HUNYUAN_CLASS,), "read_config": read_config, "write_config": write_config
        }  # fmt: skip
    return Form(
        name=naming.value,
        knows=partial(_knows, naming=naming),
        read_shapes=partial(read_shapes, naming=naming),
        table=partial(table, naming=naming),
        **in_folders,
    )


CONVERSION = Conversion(
    title="HunyuanVideo",
    forms=tuple(_form(naming) for naming in Naming),
    parameters=parameters,
    kinds=lambda _sizes: ("hunyuan-video",),
    sections=_sections,
    adapted=ADAPTED,
    refused={
        "HunyuanVideo15Transformer3DModel": "HunyuanVideo 1.5, which has another text encoder",
        "HunyuanVideoFramepackTransformer3DModel": "FramePack, which takes embeddings of an image",
        "HunyuanImageTransformer2DModel": "HunyuanImage 2.1, which has other text encoders",
        "HunyuanDiT2DModel": "HunyuanDiT, which has cross attention",
        "SkyReelsV2Transformer3DModel": "SkyReels V2, which is a Wan network",
    },
    adds=frozenset({"cond_embed"}),
)
