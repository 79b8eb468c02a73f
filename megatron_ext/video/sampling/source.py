"""Chooses the encoders with which clips are sampled: those of the data, or those of the flags.

A run samples as its training data was encoded. Without data, as with published weights, the flags
name codec and text encoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.video.config.encoding import (
    PATCH,
    TILE_FLAGS,
    CodecConfig,
    EncodeConfig,
    ImageEncoderConfig,
    TextEncoderConfig,
)
from megatron_ext.video.config.run import SampleConfig, VideoConfig
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.codecs import build_codec, codec_from_manifest
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.image_encoder import (
    ImageEncoder,
    build_image_encoder,
    check_image_encoder,
    image_encoder_from_manifest,
)
from megatron_ext.video.data.manifest import SIDES, folder_of_model
from megatron_ext.video.data.setup import manifest_of, null_text_of
from megatron_ext.video.data.text_encoders import (
    TextEncoder,
    build_text_encoder,
    check_text_encoder,
    text_encoder_from_manifest,
    widths_of,
)

_FPS = 24
"""Frames per second of clips for which neither flags nor data give a rate."""


class SampleSource(ABC):
    """The encoders with which a run samples.

    Attributes:
        manifest: facts on latents and captions, as the manifest of a dataset has them: the widths,
            ``encode``, ``fps`` and ``buckets``.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def manifest(self) -> Mapping[str, Any]: ...

    @abstractmethod
    def codec(self, device: torch.device | None = None) -> VideoCodec:
        """Build the codec; ``device`` None is the CPU.

        Raises:
            ConfigError, DataError: it cannot be built, or did not make the data.
        """

    @abstractmethod
    def text_encoder(self, device: torch.device | None = None) -> TextEncoder:
        """Build the text encoder, as `codec` builds the codec."""

    @abstractmethod
    def check_text_encoder(self) -> None:
        """Raise ConfigError or DataError if the folders of the text encoder cannot be used."""

    @property
    def image_folder(self) -> str | None:
        """Return the folder of the image encoder; None if there is none."""
        return self.config.section(ImageEncoderConfig).image_encoder

    @abstractmethod
    def image_encoder(self, device: torch.device | None = None) -> ImageEncoder | None:
        """Build the image encoder, as `codec` builds the codec; return None if there is none."""

    @property
    @abstractmethod
    def null(self) -> Text | None:
        """Return the encoded empty caption, ``[1, k, d]`` and ``[1, e]``, if data has it."""


class DataSource(SampleSource):
    """The encoders that made a run's training data.

    The flags say where their weights are; without a flag they are where preprocessing found them.
    """

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return manifest_of(self.config)

    @property
    def _text_folders(self) -> dict[str, str | None]:
        flags = self.config.section(TextEncoderConfig)
        names = ("t5_path", "clip_path", "llama_path")
        return {x: folder_of_model(self.manifest, x, getattr(flags, x)) for x in names}

    def codec(self, device: torch.device | None = None) -> VideoCodec:
        flags = self.config.section(CodecConfig)
        tiles = {name: getattr(flags, name) for name in TILE_FLAGS}
        given = None if flags.codec == PATCH else flags.codec
        folder = folder_of_model(self.manifest, "codec", given)
        return codec_from_manifest(self.manifest, folder, device, **tiles)

    def text_encoder(self, device: torch.device | None = None) -> TextEncoder:
        return text_encoder_from_manifest(self.manifest, **self._text_folders, device=device)

    def check_text_encoder(self) -> None:
        check_text_encoder(self.manifest, **self._text_folders)

    @property
    def image_folder(self) -> str | None:
        given = self.config.section(ImageEncoderConfig).image_encoder
        return folder_of_model(self.manifest, "image_encoder", given)

    def image_encoder(self, device: torch.device | None = None) -> ImageEncoder | None:
        return image_encoder_from_manifest(self.manifest, self.image_folder, device)

    @property
    def null(self) -> Text:
        text, pooled = null_text_of(self.config, self.manifest)
        return Text(text[None].float(), pooled[None].float())


class FlagSource(SampleSource):
    """The encoders that flags name, for a run without data."""

    @cached_property
    def _on_cpu(self) -> VideoCodec:
        return build_codec(self.config.section(CodecConfig))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        text = self.config.section(TextEncoderConfig)
        width, pooled_width = widths_of(text)
        codec = self._on_cpu
        about: dict[str, Any] = {
            "codec": codec.identity,
            "latents": codec.facts,
            "latent_channels": codec.channels,
            "text_length": text.text_length,
            "text_width": width,
            "pooled_width": pooled_width,
            "encode": asdict(self.config.section(EncodeConfig)),
            "fps": self.config.section(SampleConfig).sample_fps or _FPS,
            "buckets": [],
        }
        images = self.config.section(ImageEncoderConfig).image_encoder
        if images is not None:
            about["image_embeds"] = {"sides": list(SIDES), **sizes_of_image_encoder(images)}
        return about

    def codec(self, device: torch.device | None = None) -> VideoCodec:
        if device is None:
            return self._on_cpu
        return build_codec(self.config.section(CodecConfig), device)

    def text_encoder(self, device: torch.device | None = None) -> TextEncoder:
        return build_text_encoder(self.config.section(TextEncoderConfig), device)

    def check_text_encoder(self) -> None:
        widths_of(self.config.section(TextEncoderConfig))

    def image_encoder(self, device: torch.device | None = None) -> ImageEncoder | None:
        return build_image_encoder(self.config.section(ImageEncoderConfig), device)

    @property
    def null(self) -> None:
        return None


def sizes_of_image_encoder(path: str) -> dict[str, int]:
    """Return the ``tokens`` and their ``width`` of an image's embedding, without loading a model.

    Raises:
        ConfigError: the folder holds no vision model of CLIP.
    """
    settings = check_image_encoder(path)
    settings = settings.get("vision_config", settings)
    # Missing entries have the values of transformers' class.
    side = settings.get("image_size", 224) // settings.get("patch_size", 32)
    return {"tokens": side**2 + 1, "width": settings.get("hidden_size", 768)}


def source_of(config: RunConfig) -> SampleSource:
    """Return the encoders of a run: those of its data, or, without data, those of its flags."""
    if config.section(VideoConfig).video_data_path is None:
        return FlagSource(config)
    return DataSource(config)
