"""What a run is to sample, and with which encoders: its flags and the manifest of its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.config.encoding import PATCH
from megatron_ext.config.video import SampleConfig
from megatron_ext.data.video.codecs import codec_from_manifest
from megatron_ext.data.video.geometry import Bucket
from megatron_ext.data.video.text_encoders import check_text_encoder, text_encoder_from_manifest
from megatron_ext.sampling.flow import SamplingConfig
from megatron_ext.sampling.guidance import GuidanceConfig
from megatron_ext.sampling.requests import ClipRequest, SampleShape, read_requests
from megatron_ext.training.video.dit import check_clips

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.config import RunConfig
    from megatron_ext.data.video.codec_base import VideoCodec
    from megatron_ext.data.video.text_encoders import TextEncoder


def requests_of(config: RunConfig) -> list[ClipRequest]:
    """The captions of ``--sample-prompts`` or ``--sample-texts``.

    Raises:
        ConfigError, DataError: see `read_requests`.
    """
    sample = config.sample
    if sample.sample_texts is not None:
        return [ClipRequest(text) for text in sample.sample_texts]
    assert sample.sample_prompts is not None
    return read_requests(sample.sample_prompts)


def shape_of(sample: SampleConfig, manifest: Mapping[str, Any]) -> SampleShape:
    """Pixels of the clips: as the flags say, else as the largest bucket of the data."""
    buckets = [Bucket(**entry["shape"]) for entry in manifest["buckets"]]
    largest = max(buckets, key=lambda b: (b.height * b.width, b.num_frames, b))
    height, width = sample.sample_size or (largest.height, largest.width)
    frames = sample.sample_frames or largest.num_frames
    return SampleShape(frames, height, width, sample.sample_fps or int(manifest["fps"]))


def sampling_config(sample: SampleConfig) -> SamplingConfig:
    """Steps and guidance of the flags."""
    guidance = GuidanceConfig(
        text_scale=sample.sample_text_scale,
        image_scale=sample.sample_image_scale,
        oscillate_text=sample.sample_oscillation,
        oscillate_image=sample.sample_oscillation,
        scale_image_by_frame=sample.sample_scale_by_frame,
    )
    return SamplingConfig(num_steps=sample.sample_steps, guidance=guidance)


def build_codec_of(
    config: RunConfig, manifest: Mapping[str, Any], device: torch.device | None = None
) -> VideoCodec:
    """The codec that the data was made with; ``--codec`` says where a VAE lies.

    Raises:
        ConfigError, DataError: see `codec_from_manifest`.
    """
    folder = config.codec.codec
    return codec_from_manifest(manifest, None if folder == PATCH else folder, device)


def build_text_encoder_of(
    config: RunConfig, manifest: Mapping[str, Any], device: torch.device | None = None
) -> TextEncoder:
    """The text encoder of the data; ``--t5-path`` and ``--clip-path`` say where models lie.

    Raises:
        ConfigError, DataError: see `text_encoder_from_manifest`.
    """
    return text_encoder_from_manifest(manifest, *_text_folders(config), device=device)


def _text_folders(config: RunConfig) -> tuple[str | None, str | None]:
    return config.text_encoder.t5_path, config.text_encoder.clip_path


def check_sampling(config: RunConfig, manifest: Mapping[str, Any]) -> None:
    """Refuse what could not be sampled before the run starts.

    Raises:
        ConfigError, DataError: prompts that cannot be read, a size that codec or model do not
            take, encoders that cannot be built.
    """
    requests_of(config)
    shape = shape_of(config.sample, manifest)
    sampling_config(config.sample)
    check_text_encoder(manifest, *_text_folders(config))
    codec = build_codec_of(config, manifest)
    latent = codec.latent_shape(shape.num_frames, shape.height, shape.width)
    if config.video.uses_dit:
        check_clips(config, latent[1:], "Sampled clips")
