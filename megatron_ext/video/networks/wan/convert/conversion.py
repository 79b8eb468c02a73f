"""Describes the published weights of Wan, named as in diffusers or in the original repository."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from megatron_ext.video.networks.network import STREAMING, Sections
from megatron_ext.video.networks.published import Conversion, Form
from megatron_ext.video.networks.wan.config import BIDIRECTIONAL, CAUSAL, VideoDiTSizes
from megatron_ext.video.networks.wan.convert.config import (
    CLASSES,
    config_json,
    name_of,
    read_config,
    read_shapes,
)
from megatron_ext.video.networks.wan.convert.names import ADAPTED, Naming, shapes, table


def _knows(names: Collection[str], naming: Naming) -> bool:
    mark = "text_embedder." if naming is Naming.DIFFUSERS else "text_embedding."
    return any(mark in name for name in names)


def _sections(sizes: VideoDiTSizes, kind: str) -> Sections:
    size = name_of(sizes)
    if kind == STREAMING:
        return {"streaming": {"generator_size": size, "text_features": sizes.text_width}}
    return {"video_dit": {"video_dit_size": size, "dit_text_width": sizes.text_width}}


def _form(naming: Naming) -> Form:
    return Form(
        name=naming.value,
        classes=CLASSES[naming],
        knows=partial(_knows, naming=naming),
        read_config=partial(read_config, naming=naming),
        read_shapes=partial(read_shapes, naming=naming),
        write_config=partial(config_json, naming=naming),
        table=partial(table, naming=naming),
    )


CONVERSION = Conversion(
    title="Wan 2.1 text to video",
    forms=tuple(_form(naming) for naming in Naming),
    parameters=shapes,
    kinds=lambda sizes: (STREAMING, BIDIRECTIONAL, CAUSAL),
    sections=_sections,
    adapted=ADAPTED,
)
