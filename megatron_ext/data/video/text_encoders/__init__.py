"""From captions to embeddings: models from local folders, or hashed words without weights."""

from megatron_ext.config.encoding import TextEncoderConfig
from megatron_ext.data.video.text_encoders.base import TextEncoder
from megatron_ext.data.video.text_encoders.build import (
    build_text_encoder,
    check_text_encoder,
    text_encoder_from_manifest,
    width_of,
)
from megatron_ext.data.video.text_encoders.hashed import HashedWords
from megatron_ext.data.video.text_encoders.t5_clip import T5AndClip
from megatron_ext.data.video.text_encoders.umt5 import UMT5

__all__ = [
    "UMT5",
    "HashedWords",
    "T5AndClip",
    "TextEncoder",
    "TextEncoderConfig",
    "build_text_encoder",
    "check_text_encoder",
    "text_encoder_from_manifest",
    "width_of",
]
