"""What the flags of a streaming run say, as its parts take it."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from megatron_ext.data.video.codecs import build_codec
from megatron_ext.data.video.text_encoders import build_text_encoder
from megatron_ext.errors import ConfigError
from megatron_ext.losses.dmd import DMDConfig
from megatron_ext.losses.noise_schedule import NoiseConfig
from megatron_ext.models.causal_video import FrameWindow
from megatron_ext.streaming.options import StreamingOptions
from megatron_ext.streaming.ratio import warn_of_aliasing
from megatron_ext.training.streaming.prompts import read_prompts
from megatron_ext.training.streaming.requests import film_requests

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.config.streaming import StreamingConfig
    from megatron_ext.data.tokenizers import Tokenizer


def options_of(config: StreamingConfig) -> StreamingOptions:
    """How sequences grow.

    Raises:
        ConfigError: see `StreamingOptions`.
    """
    values = _shared(config, StreamingOptions)
    return StreamingOptions(
        **{
            **values,
            "block": config.frame_block,
            "switch_prompts": config.second_prompts_path is not None,
            "switch_frames": config.switch_frames or (),
        }
    )


def noise_of(config: StreamingConfig) -> NoiseConfig:
    """Which noise levels there are; ConfigErrors as of `NoiseConfig`."""
    return NoiseConfig(**_shared(config, NoiseConfig))


def dmd_of(config: StreamingConfig) -> DMDConfig:
    """Options of the loss; ConfigErrors as of `DMDConfig`."""
    return DMDConfig(**_shared(config, DMDConfig))


def window_of(config: StreamingConfig) -> FrameWindow:
    """Which frames the generator sees; ConfigErrors as of `FrameWindow`."""
    return FrameWindow(config.frame_block, config.window_frames, config.sink_frames)


def _shared(config: StreamingConfig, kind: type[Any]) -> dict[str, Any]:
    """The flags that have the names of a dataclass's fields."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name in names
    }


def accumulation_of(config: RunConfig) -> int:
    """Chunks of each kind that a replica computes in a step."""
    micro_batch_size, batch = config.training.batch_sizes
    return batch // (micro_batch_size * config.parallel.data_parallel_size)


def prepare_streaming(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Check prompts, text, latents and lengths before any rank starts; see `Task.preflight`.

    Raises:
        ConfigError, DataError: flags or prompts that do not fit.
    """
    streaming = config.streaming
    read_prompts(streaming)
    options, _, _ = options_of(streaming), noise_of(streaming), dmd_of(streaming)
    window_of(streaming)
    if int(os.environ.get("RANK", "0")) == 0:
        warn_of_aliasing(options, accumulation_of(config))
        if streaming.teacher_checkpoint is None:
            print("> the teacher has random weights; give `--teacher-checkpoint`", flush=True)
    if config.sample.sample_interval is not None:
        film_requests(config)
    return sized(config)


def sized(config: RunConfig) -> RunConfig:
    """With what text encoder, codec and chunks decide about the networks.

    Raises:
        ConfigError: latents or a codec that do not fit the networks.
    """
    streaming = config.streaming
    width = build_text_encoder(config.text_encoder).width
    streaming = dataclasses.replace(streaming, text_features=width)
    _check_latents(config)
    model = dataclasses.replace(streaming.described(config.model), padded_vocab_size=None)
    length = chunk_tokens(streaming)
    model = dataclasses.replace(model, seq_length=length, max_position_embeddings=length)
    return dataclasses.replace(config, streaming=streaming, model=model)


def chunk_tokens(config: StreamingConfig) -> int:
    """Tokens of a chunk."""
    height, width = config.latent_size
    return config.chunk_frames * height * width // config.sizes(None).patch_size ** 2


def _check_latents(config: RunConfig) -> None:
    """The codec's channels must be those of the networks, and patches must fill the latents."""
    streaming = config.streaming
    sizes = streaming.sizes(None)
    if min(streaming.latent_size) < 1 or any(x % sizes.patch_size for x in streaming.latent_size):
        raise ConfigError(
            f"`--latent-size` ({' '.join(map(str, streaming.latent_size))}) must be positive "
            f"multiples of the patch size ({sizes.patch_size})."
        )
    samples = config.sample.sample_interval is not None or config.streaming_sample.only_samples
    if not streaming.encode_first_frame and not samples:
        return
    channels = build_codec(config.codec).channels
    if channels != sizes.channels:
        raise ConfigError(
            f"`--codec` has {channels} latent channels, but `--generator-size "
            f"{streaming.generator_size}` has {sizes.channels}; give `--codec-channels "
            f"{sizes.channels}` or another codec, or, with `--no-encode-first-frame`, sample no "
            "videos."
        )
