"""Prepares a `--dry-run` without data, for clips that all have the shape of `--dry-run-shape`.

The shape is, for example, ``768x768x129``: height, width and frames. Settings that otherwise come
from the manifest of the data are derived from the flags of codec and text encoder.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.text_encoders import TextEncoder, build_text_encoder
from megatron_ext.video.model.tokens import grid
from megatron_ext.video.networks.lookup import network_of, with_widths


def prepare_shape(config: RunConfig) -> RunConfig:
    """Return the configuration, completed by settings that otherwise come from the data.

    These are the sequence length, which follows from `--dry-run-shape`, and the widths of latents
    and text, which follow from the encoders. The run gets one step, and no evaluation.

    ConfigError is raised if the codec or the network cannot take clips of this shape.
    """
    codec = _codec(config.section(CodecConfig))
    text = _text_encoder(config.section(TextEncoderConfig))
    widths: dict[str, Any] = {
        "latent_channels": codec.channels,
        "text_width": text.width,
        "pooled_width": text.pooled_width,
    }
    config = network_of(with_widths(config, widths)).checked()
    clip = clip_of_shape(config)
    length = clip.num_text + clip.num_image
    model = dataclasses.replace(config.model, seq_length=length, padded_vocab_size=None)
    # Without data nobody knows how many steps an epoch has.
    training = dataclasses.replace(config.training, train_epochs=None, eval_iters=0)
    return dataclasses.replace(config, model=model, training=training)


def clip_of_shape(config: RunConfig) -> Clip:
    """Return the cost model's description (`Clip`) of clips of the shape `--dry-run-shape`.

    It has the numbers of text and image tokens, and the micro-batch size. ConfigError is raised if
    the codec or the network cannot take clips of this shape.
    """
    video = config.section(VideoConfig)
    network = network_of(config)
    assert video.dry_run_shape is not None
    height, width, frames = video.shape_to_price()
    codec = _codec(config.section(CodecConfig))
    side = codec.spatial * network.patch_size
    temporal = codec.temporal
    if height % side or width % side or (frames - 1) % temporal:
        nearest = [max(1, round(length / side)) * side for length in (height, width)]
        nearest.append((frames - 1) // temporal * temporal + 1)
        raise ConfigError.about(
            "--dry-run-shape",
            video.dry_run_shape,
            f"must have a height and a width that {side} divides, and {temporal}k + 1 frames, "
            "for this codec and network",
            f"choose {'x'.join(map(str, nearest))}",
        )
    latents = codec.latent_shape(frames, height, width)[1:]
    network.check_clips(latents, f"Clips of `--dry-run-shape` ({video.dry_run_shape})")
    t, rows, columns = grid(latents, network.patch_size)
    length = config.section(TextEncoderConfig).text_length
    text = network.padded_text(length, t * rows * columns)
    return Clip(video.dry_run_shape, t, rows, columns, text, config.training.batch_sizes[0])


@lru_cache(maxsize=1)
def _codec(config: CodecConfig) -> VideoCodec:
    return build_codec(config)


@lru_cache(maxsize=1)
def _text_encoder(config: TextEncoderConfig) -> TextEncoder:
    return build_text_encoder(config)
