"""Generates clips for the prompts of a run, on all of its ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import (
    PATCH,
    CodecConfig,
    TextEncoderConfig,
)
from megatron_ext.video.config.run import (
    ConditionConfig,
    FlowConfig,
    SampleConfig,
    VideoConfig,
)
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.codecs import codec_from_manifest
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.data.text_encoders import check_text_encoder
from megatron_ext.video.networks.lookup import chosen, network_of
from megatron_ext.video.sampling.encoding import EncodedRequests, reference_parts
from megatron_ext.video.sampling.flow import References, sample
from megatron_ext.video.sampling.groups import groups_of, shape_of
from megatron_ext.video.sampling.requests import requests_of
from megatron_ext.video.sampling.velocity import ParallelVelocity

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


def build_codec_of(
    codec: CodecConfig, manifest: Mapping[str, Any], device: torch.device | None = None
) -> VideoCodec:
    """Build the codec with which a dataset was encoded; its ``manifest`` says which.

    If it is a VAE, its weights are read from the folder ``--codec``. ``device`` None is the CPU.
    """
    return codec_from_manifest(manifest, None if codec.codec == PATCH else codec.codec, device)


def check_sampling(config: RunConfig, manifest: Mapping[str, Any]) -> None:
    """Check that clips can be sampled with the flags of a run, before it starts.

    Raises:
        ConfigError, DataError: prompts or references cannot be read, the size does not fit codec or
            model, or encoders cannot be built.
    """
    sample = config.section(SampleConfig)
    text = config.section(TextEncoderConfig)
    requests = requests_of(sample)
    model = config.section(VideoConfig).video_model
    with_reference = next((x for x in requests if x.reference is not None), None)
    if with_reference is not None and not chosen(config).takes_references:
        raise ConfigError(
            f"The prompt {with_reference.text!r} has a reference ({with_reference.reference}), but "
            f"`--video-model {model}` is given no reference frames; leave it out."
        )
    check_text_encoder(manifest, text.t5_path, text.clip_path)
    codec = build_codec_of(config.section(CodecConfig), manifest)
    for group in groups_of(requests, shape_of(sample, manifest), sample):
        shape = group.shape
        latent = codec.latent_shape(shape.num_frames, shape.height, shape.width)
        network_of(config).check_clips(latent[1:], "Sampled clips")
        for request in group.requests:
            if request.reference is not None:
                reference_parts(request, shape, codec, config.section(ConditionConfig))


@torch.no_grad()
def decoded(codec: VideoCodec, latents: Tensor, batch_size: int) -> Tensor:
    """Decode latents ``[P, c, t, h, w]``, ``batch_size`` clips at a time.

    Returns pixels ``[P, 3, f, H, W]`` on the CPU.
    """
    return torch.cat([codec.decode(part).cpu() for part in torch.split(latents, batch_size)])


def generate_latents(
    velocity: ParallelVelocity,
    encoded: EncodedRequests,
    *,
    flow: FlowConfig,
    sampling: SampleConfig,
    context: ParallelContext,
    draws: Sequence[tuple[int, int]] | None = None,
) -> Tensor | None:
    """Sample latents of P requests, divided among the replicas; all ranks call this together.

    A clip's noise does not depend on the parallel layout. A replica with one clip less than others
    also samples the last clip, and discards it. All replicas then call the model equally often,
    as a model whose experts lie on several replicas needs.

    Args:
        draws: (seed, number) of each request, the two numbers that determine its noise. None means
            ``--sample-seed`` and the request's index.

    Returns:
        ``[P, c, t, h, w]`` float32 on the model's device, on the reporting rank; None elsewhere.

    Raises:
        ConfigError: there are references, but the model takes none.
        DataError: the inputs do not fit the model.
    """
    if encoded.references is not None and not velocity.takes_references:
        raise ConfigError(
            "A prompt has a reference, but the model was built without `cond_embed` and would "
            "ignore it; sample from a model of image to video, or leave the reference out."
        )
    device = velocity.device
    shape = encoded.latent_shape
    text = encoded.text
    null = encoded.null
    null = Text(null.sequence.to(device), null.pooled.to(device))
    draws = draws or [(sampling.sample_seed, number) for number in range(len(encoded))]

    def sampled(numbers: list[int]) -> Tensor:
        """Sample the latents of the requests with the indices ``numbers``."""
        given = encoded.references
        if given is not None:
            given = References(given.latents[numbers], given.masks[numbers])
        captions = Text(text.sequence[numbers].to(device), text.pooled[numbers].to(device))
        noise = torch.cat(
            [
                draw_noise(seed, [number], shape, purpose="sampling noise")
                for seed, number in (draws[i] for i in numbers)
            ]
        )
        one = len(null.sequence) == 1
        away = null if one else Text(null.sequence[numbers], null.pooled[numbers])
        return sample(
            velocity.of_shape(shape[1:]), captions, away, noise.to(device), flow=flow,
            patch_size=velocity.patch_size, sampling=sampling, references=given,
        )  # fmt: skip

    replicas = context.layout.data_parallel_size
    batch = sampling.sample_batch_size
    total = len(encoded)
    rounds = -(-total // replicas)
    numbers = [min(i * replicas + context.dp_rank, total - 1) for i in range(rounds)]
    own = torch.cat([sampled(numbers[i : i + batch]) for i in range(0, rounds, batch)])
    parts = [torch.empty_like(own) for _ in range(replicas)]
    torch.distributed.all_gather(parts, own.contiguous(), group=context.pgs.dp)
    if not context.is_reporting_rank:
        return None
    return torch.stack(parts, dim=1).flatten(0, 1)[:total]
