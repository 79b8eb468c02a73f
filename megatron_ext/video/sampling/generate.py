"""Generates clips for the prompts of a run, on all of its ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.parallel.collectives import on_reporting_rank
from megatron_ext.video.config.encoding import (
    PATCH,
    CodecConfig,
    TextEncoderConfig,
    encode_of,
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
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.data.text_encoders import TextEncoder, check_text_encoder
from megatron_ext.video.networks.lookup import chosen, network_of
from megatron_ext.video.sampling.flow import References, sample
from megatron_ext.video.sampling.requests import (
    ClipRequest,
    EncodedRequests,
    SampleShape,
    default_mode,
    encode_requests,
    given_starts,
    read_requests,
    reference_parts,
)
from megatron_ext.video.sampling.velocity import ParallelVelocity

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


def requests_of(sample: SampleConfig) -> list[ClipRequest]:
    """Read the requests in the file ``--sample-prompts``, or make one for each ``--sample-texts``.

    A request without a negative prompt gets that of ``--sample-negative-prompt``.
    """
    if sample.sample_texts is None:
        assert sample.sample_prompts is not None
        requests = read_requests(sample.sample_prompts)
    else:
        name, paths = given_starts(sample)
        pairs = zip(sample.sample_texts, paths, strict=True)
        requests = [ClipRequest(text, path, default_mode(name)) for text, path in pairs]
    negative = sample.sample_negative_prompt
    return [
        replace(x, negative_prompt=negative) if x.negative_prompt is None else x for x in requests
    ]


@dataclass(frozen=True)
class RequestGroup:
    """Requests for clips of one size, sampled in the same number of steps.

    Attributes:
        numbers: index of each request among all requests.
        shape: size of the clips of this group.
        sampling: flags of sampling, with the number of steps of this group.
        draws: for each request (seed, number), the two numbers that determine its noise; see
            `groups_of`.
    """

    numbers: list[int]
    requests: list[ClipRequest]
    shape: SampleShape
    sampling: SampleConfig
    draws: list[tuple[int, int]]


def groups_of(
    requests: Sequence[ClipRequest], shape: SampleShape, sampling: SampleConfig
) -> list[RequestGroup]:
    """Group the requests with the same clip size and number of steps.

    A request that lacks a size, steps or a seed gets those of ``shape`` and ``sampling``. A seed
    and a number determine the noise. The number is the request's index, or 0 if the request has
    its own seed, so that the clip then does not depend on the request's position in the file.
    """
    groups = dict[tuple[Any, int], RequestGroup]()
    for number, request in enumerate(requests):
        height, width = request.size or (shape.height, shape.width)
        steps = request.steps or sampling.sample_steps
        own = replace(shape, height=height, width=width)
        empty = RequestGroup([], [], own, replace(sampling, sample_steps=steps), [])
        group = groups.setdefault(((height, width), steps), empty)
        group.numbers.append(number)
        group.requests.append(request)
        draw = (sampling.sample_seed, number) if request.seed is None else (request.seed, 0)
        group.draws.append(draw)
    return [*groups.values()]


def shape_of(sample: SampleConfig, manifest: Mapping[str, Any]) -> SampleShape:
    """Return the size of clips to sample, from the flags or the dataset's ``manifest``.

    Values that the flags leave out are those of the dataset's largest bucket.
    """
    buckets = [Bucket(**entry["shape"]) for entry in manifest["buckets"]]
    largest = max(buckets, key=lambda b: (b.height * b.width, b.num_frames, b))
    height, width = sample.sample_size or (largest.height, largest.width)
    frames = sample.sample_frames or largest.num_frames
    fps = sample.sample_fps or manifest["fps"]
    return SampleShape(frames, height, width, fps, encode_of(manifest))


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
    """Encode requests on the reporting rank (which prints the log); return them on all ranks.

    All ranks call this together. Codec and text encoder may be None except on the reporting
    rank. `encode_requests` explains ``null`` and ``conditions``.

    Raises:
        ConfigError, DataError: encoding failed on the reporting rank (raised on all ranks).
    """

    def encode() -> EncodedRequests:
        assert codec is not None and text_encoder is not None
        both = codec, text_encoder
        return encode_requests(requests, shape, *both, null=null, conditions=conditions)

    encoded = [on_reporting_rank(encode, "Encoding the prompts", context)]
    torch.distributed.broadcast_object_list(encoded, src=context.reporting_rank)
    assert encoded[0] is not None
    return encoded[0]


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
