"""Prepares the prompts of a run for sampling: their requests, grouped and encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.parallel.collectives import on_reporting_rank
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.config.run import ConditionConfig, SampleConfig
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.setup import manifest_of, null_text_of
from megatron_ext.video.data.text_encoders import text_encoder_from_manifest
from megatron_ext.video.sampling.encoding import EncodedRequests, encode_on_reporting_rank
from megatron_ext.video.sampling.generate import build_codec_of
from megatron_ext.video.sampling.groups import RequestGroup, SampleShape, groups_of, shape_of
from megatron_ext.video.sampling.requests import ClipRequest, requests_of


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of a run, encoded, and the codec that decodes their clips.

    Attributes:
        requests: all requests in their order.
        shape: size and frame rate of clips whose request has no size.
        groups, encoded: the groups of requests, and what each of them is encoded to.
        codec: returns the codec; on other ranks than the reporting rank it returns None.
    """

    requests: list[ClipRequest]
    shape: SampleShape
    groups: list[RequestGroup]
    encoded: list[EncodedRequests]
    codec: Callable[[], VideoCodec | None]


def encode_prompts(
    config: RunConfig, context: ParallelContext, device: torch.device
) -> EncodedPrompts:
    """Read and encode a run's prompts; all ranks call this together.

    The text encoder is freed when it returns. With ``--sample-offload`` so is the codec, which is
    then built again for decoding.

    Raises:
        ConfigError, DataError: prompts, references or encoders are unusable (raised on all ranks).
    """
    sample = config.section(SampleConfig)
    requests = requests_of(sample)
    manifest = manifest_of(config)
    shape = shape_of(sample, manifest)
    groups = groups_of(requests, shape, sample)
    build = partial(build_codec_of, config.section(CodecConfig), manifest, device)
    built = partial(on_reporting_rank, build, "Building the codec", context)
    codec = built()
    flags = config.section(TextEncoderConfig)
    encoder = partial(
        text_encoder_from_manifest,
        manifest,
        flags.t5_path,
        flags.clip_path,
        llama_path=flags.llama_path,
        device=device,
    )
    text_encoder = on_reporting_rank(encoder, "Building the text encoder", context)
    text, pooled = null_text_of(config, manifest)
    encoded = [
        encode_on_reporting_rank(
            group.requests,
            group.shape,
            codec,
            text_encoder,
            context,
            null=Text(text[None].float(), pooled[None].float()),
            conditions=config.section(ConditionConfig),
        )
        for group in groups
    ]
    kept = codec
    again = built if sample.sample_offload else lambda: kept
    return EncodedPrompts(requests, shape, groups, encoded, again)
