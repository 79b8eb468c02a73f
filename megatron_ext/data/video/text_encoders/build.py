"""Text encoders by configuration, or by the manifest of the data that they encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_ext.config.encoding import FOLDERS, HASHED, T5_CLIP, TextEncoderConfig
from megatron_ext.data.video.identity import compared
from megatron_ext.data.video.text_encoders.base import TextEncoder
from megatron_ext.data.video.text_encoders.hashed import HashedWords
from megatron_ext.data.video.text_encoders.loading import read_settings
from megatron_ext.data.video.text_encoders.t5_clip import T5AndClip
from megatron_ext.data.video.text_encoders.umt5 import UMT5
from megatron_ext.errors import ConfigError, DataError


def build_text_encoder(
    config: TextEncoderConfig, device: torch.device | None = None
) -> TextEncoder:
    """The text encoder of a configuration.

    Raises:
        ConfigError: transformers is missing, or a folder is of no use.
    """
    if config.text_encoder == HASHED:
        return HashedWords(config)
    kind = T5AndClip if config.text_encoder == T5_CLIP else UMT5
    return kind(config, device or torch.device("cpu"))


def width_of(config: TextEncoderConfig) -> int:
    """Features of a row of the embeddings, without loading a model.

    Raises:
        ConfigError: a folder without a configuration of T5 or UMT5.
    """
    if config.text_encoder == HASHED:
        return config.text_width
    path = str(config.t5_path)
    width = read_settings("t5_path", path).get("d_model")
    if not isinstance(width, int) or width < 1:
        raise ConfigError(
            f"`t5_path` ({path}) has a config.json whose `d_model` is {width!r}, but must be the "
            "width of T5; correct the path."
        )
    return width


def text_encoder_from_manifest(
    manifest: Mapping[str, Any],
    t5_path: str | None = None,
    clip_path: str | None = None,
    device: torch.device | None = None,
) -> TextEncoder:
    """The text encoder that made the embeddings of a dataset, to encode new captions.

    Args:
        manifest: of the dataset; see `shards.read_json`.
        t5_path, clip_path: folders of the models; hashed words come from the manifest alone.
        device: where models compute.

    Raises:
        ConfigError: a folder is missing, of no use, or given for hashed words.
        DataError: the manifest names no text encoder, or other models than the folders'.
    """
    config = check_text_encoder(manifest, t5_path, clip_path)
    encoder = build_text_encoder(config, device)
    differing = compared(manifest["text_encoder"], encoder.identity)
    if differing:
        models = " and ".join(f"`{x}` ({getattr(config, x)})" for x in FOLDERS[config.text_encoder])
        raise DataError(
            f"The captions were not encoded with the models of {models}: {differing}; give the "
            "folders that preprocessed them."
        )
    return encoder


def check_text_encoder(
    manifest: Mapping[str, Any], t5_path: str | None, clip_path: str | None
) -> TextEncoderConfig:
    """Which text encoder made the embeddings of a dataset, without loading its models.

    Raises:
        ConfigError, DataError: see `text_encoder_from_manifest`; models are not compared.
    """
    identity = manifest.get("text_encoder")
    advice = "make the data again with tools/preprocess_video.py."
    if not isinstance(identity, Mapping) or identity.get("text_encoder") not in FOLDERS:
        raise DataError(
            f"The manifest must name its text encoder, but holds {identity!r}; {advice}"
        )
    name = identity["text_encoder"]
    try:
        sizes = [
            int(identity[size])
            for size in ("length", "width", "pooled_width")[: 3 if name == HASHED else 1]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"The manifest's text encoder ({dict(identity)}) lacks a size ({error!r}); {advice}"
        ) from None
    config = TextEncoderConfig(name, t5_path, clip_path, *sizes)
    for folder in FOLDERS[name]:
        read_settings(folder, str(getattr(config, folder)))
    return config
