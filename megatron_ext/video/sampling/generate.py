"""What a run is to sample, and with which encoders: its flags and the manifest of its data.

Clips for prompts, by all ranks of a run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.parallel.collectives import on_reporting_rank
from megatron_ext.video.config.encoding import PATCH
from megatron_ext.video.config.run import ConditionConfig, FlowConfig, SampleConfig
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.codecs import codec_from_manifest
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.data.text_encoders import (
    TextEncoder,
    check_text_encoder,
    text_encoder_from_manifest,
)
from megatron_ext.video.sampling.flow import GuidanceConfig, References, SamplingConfig, sample
from megatron_ext.video.sampling.requests import (
    ClipRequest,
    EncodedRequests,
    SampleShape,
    encode_requests,
    read_requests,
)
from megatron_ext.video.sampling.velocity import ParallelVelocity
from megatron_ext.video.step import check_clips

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


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


def generate(
    velocity: ParallelVelocity,
    requests: Sequence[ClipRequest],
    *,
    shape: SampleShape,
    codec: VideoCodec | None,
    text_encoder: TextEncoder | None,
    null: Text | None = None,
    conditions: ConditionConfig | None = None,
    flow: FlowConfig,
    sampling: SamplingConfig,
    seed: int,
    context: ParallelContext,
    batch_size: int = 1,
) -> Tensor | None:
    """Clips of P requests; all ranks call this together.

    Args:
        velocity: the model on these ranks.
        requests: the same on all ranks.
        shape: of the clips in pixels.
        codec, text_encoder: used on the reporting rank only; None will do elsewhere.
        null, conditions: see `encode_requests`.
        flow: that of training.
        sampling: steps and guidance.
        seed: of the noise.
        context: groups of this rank.
        batch_size: clips that a replica samples at a time, at most; the guidance makes two or
            three predictions for each.

    Returns:
        Pixels ``[P, 3, f, H, W]`` float32 on the CPU, in the order of the requests, on the
        reporting rank; None on the others.

    Raises:
        ConfigError, DataError: see `encode_requests`, `generate_latents` and `on_reporting_rank`;
            on all ranks alike.
    """
    encoded = encode_on_reporting_rank(
        requests, shape, codec, text_encoder, context, null=null, conditions=conditions
    )
    latents = generate_latents(
        velocity,
        encoded,
        flow=flow,
        sampling=sampling,
        seed=seed,
        context=context,
        batch_size=batch_size,
    )

    def decode() -> Tensor:
        assert codec is not None and latents is not None
        return decoded(codec, latents, batch_size)

    return on_reporting_rank(decode, "Decoding the clips", context)


@torch.no_grad()
def decoded(codec: VideoCodec, latents: Tensor, batch_size: int) -> Tensor:
    """Pixels ``[P, 3, f, H, W]`` of latents ``[P, c, t, h, w]``, on the CPU."""
    return torch.cat([codec.decode(part).cpu() for part in torch.split(latents, batch_size)])


def encode_on_reporting_rank(
    requests: Sequence[ClipRequest],
    shape: SampleShape,
    codec: VideoCodec | None,
    text_encoder: TextEncoder | None,
    context: ParallelContext,
    *,
    null: Text | None = None,
    conditions: ConditionConfig | None = None,
) -> EncodedRequests:
    """Encode requests once, for all ranks, which call this together; see `encode_requests`.

    What is asked for again and again needs this once.

    Raises:
        ConfigError, DataError: what went wrong on the reporting rank, on all ranks.
    """

    def encode() -> EncodedRequests:
        assert codec is not None and text_encoder is not None
        return encode_requests(
            requests, shape, codec, text_encoder, null=null, conditions=conditions
        )

    encoded = [on_reporting_rank(encode, "Encoding the prompts", context)]
    torch.distributed.broadcast_object_list(encoded, src=context.reporting_rank)
    assert encoded[0] is not None
    return encoded[0]


def generate_latents(
    velocity: ParallelVelocity,
    encoded: EncodedRequests,
    *,
    flow: FlowConfig,
    sampling: SamplingConfig,
    seed: int,
    context: ParallelContext,
    batch_size: int = 1,
) -> Tensor | None:
    """Latents of P requests, which the replicas share out; all ranks call this together.

    A clip's noise is decided by the seed and its number, so that it is the same in any layout.
    Replicas that have one clip less than others sample the last one too, and it is thrown away:
    all make the same number of calls, as a model with experts spread over replicas needs.

    Args:
        velocity, flow, sampling, seed, context, batch_size: see `generate`.
        encoded: of `encode_on_reporting_rank`, the same on all ranks.

    Returns:
        ``[P, c, t, h, w]`` float32 on the model's device, on the reporting rank; None elsewhere.

    Raises:
        ConfigError: a batch size below 1, or references for a model that takes none.
        DataError: inputs that do not fit the model.
    """
    if batch_size < 1:
        raise ConfigError(f"`batch_size` ({batch_size}) must be at least 1; it counts clips.")
    if encoded.references is not None and not velocity.takes_references:
        raise ConfigError(
            "A prompt has a reference, but the model was built without `cond_embed` and would "
            "ignore it; sample from a model of image to video, or leave the reference out."
        )
    replicas, total = context.layout.data_parallel_size, len(encoded)
    rounds = -(-total // replicas)
    own = [min(i * replicas + context.dp_rank, total - 1) for i in range(rounds)]
    clips = [
        _sample(velocity, encoded, own[i : i + batch_size], flow, sampling, seed)
        for i in range(0, rounds, batch_size)
    ]
    return _gathered(torch.cat(clips), total, context)


def _sample(
    velocity: ParallelVelocity,
    encoded: EncodedRequests,
    numbers: list[int],
    flow: FlowConfig,
    sampling: SamplingConfig,
    seed: int,
) -> Tensor:
    """Latents of the requests of these numbers."""
    device, shape = velocity.device, encoded.latent_shape
    text, given = encoded.text, encoded.references
    return sample(
        velocity.of_shape(shape[1:]),
        Text(text.sequence[numbers].to(device), text.pooled[numbers].to(device)),
        Text(encoded.null.sequence.to(device), encoded.null.pooled.to(device)),
        draw_noise(seed, numbers, shape, purpose="sampling noise").to(device),
        patch_size=velocity.patch_size,
        flow=flow,
        sampling=sampling,
        references=None
        if given is None
        else References(given.latents[numbers], given.masks[numbers]),
    )


def _gathered(own: Tensor, total: int, context: ParallelContext) -> Tensor | None:
    """The clips of all replicas in the order of the requests, on the reporting rank."""
    parts = [torch.empty_like(own) for _ in range(context.layout.data_parallel_size)]
    torch.distributed.all_gather(parts, own.contiguous(), group=context.pgs.dp)
    if not context.is_reporting_rank:
        return None
    return torch.stack(parts, dim=1).flatten(0, 1)[:total]
