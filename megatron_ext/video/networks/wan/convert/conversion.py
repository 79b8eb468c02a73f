"""Describes the published weights of Wan, named as in diffusers or in the original repository."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.encoding import UMT5
from megatron_ext.video.networks.network import STREAMING, Sections
from megatron_ext.video.networks.published import Conversion, Form
from megatron_ext.video.networks.wan.config import (
    BIDIRECTIONAL,
    CAUSAL,
    OWN_SIZES,
    SIZES,
    TI2V,
    VideoDiTConfig,
    VideoDiTSizes,
    name_of,
)
from megatron_ext.video.networks.wan.convert.config import (
    CLASSES,
    REFUSED,
    config_json,
    read_config,
    read_shapes,
    with_vision,
)
from megatron_ext.video.networks.wan.convert.names import ADAPTED, Naming, shapes, table

_IGNORED = re.compile(r"norm_added_q|^model_type\.")
"""Names of a norm that diffusers ignores, too, and of the marks in single files of ComfyUI."""


def _knows(names: Collection[str], naming: Naming) -> bool:
    own = naming is Naming.DIFFUSERS
    mark = "condition_embedder.text_embedder." if own else "text_embedding."
    return any(mark in name for name in names)


def _kinds(sizes: VideoDiTSizes) -> Sequence[str]:
    if sizes.condition_channels:
        return (BIDIRECTIONAL,)
    if name_of(sizes) is None:
        return BIDIRECTIONAL, CAUSAL, STREAMING
    return STREAMING, BIDIRECTIONAL, CAUSAL


def _sections(sizes: VideoDiTSizes, kind: str) -> Sections:
    if kind not in _kinds(sizes):
        raise CheckpointError(
            f"The model is given frames, but `{kind}` trains networks of Wan text to video; give "
            f"one of these, or train it by `--video-model {BIDIRECTIONAL}`."
        )
    if kind == STREAMING:
        return {"streaming": _streaming(sizes)}
    own = VideoDiTConfig().with_sizes(sizes)
    usual = VideoDiTConfig()
    stated = {"video_dit_size", "dit_channels", "dit_text_width"}
    fields = [field.name for field in dataclasses.fields(own)]
    changed = [x for x in fields if x in stated or getattr(own, x) != getattr(usual, x)]
    return {"video_dit": {field: getattr(own, field) for field in changed}}


def _streaming(sizes: VideoDiTSizes) -> dict[str, Any]:
    """Return the flags of `StreamingConfig` whose generator has these sizes."""
    name = name_of(sizes)
    named = name or VideoDiTConfig().video_dit_size
    flags: dict[str, Any] = {"generator_size": named, "text_features": sizes.text_width}
    if name is None:
        flags["generator_sizes"] = {size: getattr(sizes, size) for size in OWN_SIZES}
    if sizes.channels != SIZES[named].channels:
        flags["latent_channels"] = sizes.channels
    return flags


def _sampling(sizes: VideoDiTSizes, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of sampling that Wan's own program and diffusers have."""
    flags = {"fps_words": False, "text_encoder": UMT5}
    if index.get("expand_timesteps") or sizes.channels == SIZES["5b"].channels:
        size = {"sample_size": (704, 1280), "sample_frames": 121, "sample_fps": 24.0}
        return {**flags, **size, "dit_condition": TI2V}
    return {**flags, "sample_size": (480, 832), "sample_frames": 81, "sample_fps": 16.0}


def _form(naming: Naming) -> Form:
    return Form(
        name=naming.value,
        classes=CLASSES[naming],
        knows=partial(_knows, naming=naming),
        read_config=partial(read_config, naming=naming),
        read_shapes=partial(read_shapes, naming=naming),
        completed=partial(with_vision, naming=naming),
        write_config=partial(config_json, naming=naming),
        table=partial(table, naming=naming),
        ignored=_IGNORED,
    )


CONVERSION = Conversion(
    title="Wan 2.1 or 2.2",
    forms=tuple(_form(naming) for naming in Naming),
    parameters=shapes,
    kinds=_kinds,
    sections=_sections,
    sampling=_sampling,
    adapted=ADAPTED,
    refused=REFUSED,
    remedies=dict.fromkeys(
        ("condition_channels", "vision_width", "vision_positions"),
        "leave out `--dit-condition`, or give weights that were trained with it: those of text to "
        "video have no input for given frames",
    ),
)
