"""Describes the published weights of HunyuanVideo, in the forms of three codes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_ext.video.config.encoding import LLAMA_CLIP
from megatron_ext.video.networks import joint_weights
from megatron_ext.video.networks.hunyuan.config import SIZES, HunyuanSizes
from megatron_ext.video.networks.hunyuan.convert.names import (
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
from megatron_ext.video.networks.published import Conversion


def _knows(names: Collection[str], naming: Naming) -> bool:
    """Return whether these are names of HunyuanVideo or of a close relative."""
    modules = ("embedding.img_in", "embedding.txt_in.mean_in.linear_in")
    own = naming is not Naming.DIFFUSERS
    return all(public_name(f"{OUTER[x][own]}.weight", naming) in names for x in modules)


def _sections(sizes: HunyuanSizes, _kind: str) -> Sections:
    """Return the flags of a run that trains HunyuanVideo with these sizes."""
    flag = ("hunyuan", "hunyuan_size")
    blocks = sizes.num_refiner_blocks
    return joint_weights.sections(sizes, flag, SIZES, num_refiner_blocks=blocks)


def _sampling(sizes: HunyuanSizes, _index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of sampling that HunyuanVideo's own program and diffusers have."""
    flags: dict[str, Any] = {
        "sample_size": (720, 1280),
        "sample_frames": 129,
        "sample_fps": 24.0,
        "sample_text_scale": 1.0,
        "sample_image_scale": 1.0,
        "sample_oscillation": False,
        "fps_words": False,
        "text_encoder": LLAMA_CLIP,
        "text_length": 256,
    }
    return {**flags, "guidance": 6.0} if sizes.guidance_embed else flags


CONVERSION = Conversion(
    title="HunyuanVideo",
    # The original and ComfyUI's files have no config.json.
    forms=joint_weights.forms(
        Naming,
        in_folders=Naming.DIFFUSERS,
        classes=(HUNYUAN_CLASS,),
        read_config=read_config,
        write_config=write_config,
        knows=_knows,
        read_shapes=read_shapes,
        table=table,
    ),
    parameters=parameters,
    kinds=lambda _sizes: ("hunyuan-video",),
    sections=_sections,
    adapted=joint_weights.ADAPTED,
    sampling=_sampling,
    refused={
        "HunyuanVideo15Transformer3DModel": "HunyuanVideo 1.5, which has another text encoder",
        "HunyuanVideoFramepackTransformer3DModel": "FramePack, which takes embeddings of an image",
        "HunyuanImageTransformer2DModel": "HunyuanImage 2.1, which has other text encoders",
        "HunyuanDiT2DModel": "HunyuanDiT, which has cross attention",
    },
    adds=frozenset({"cond_embed"}),
)
