"""Prepares the prompts of a run for sampling: their requests, grouped and encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.parallel.collectives import on_reporting_rank
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import ConditionConfig, SampleConfig
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.sampling.encoding import EncodedRequests, encode_on_reporting_rank
from megatron_ext.video.sampling.groups import RequestGroup, SampleShape, groups_of, shape_of
from megatron_ext.video.sampling.requests import ClipRequest, requests_of
from megatron_ext.video.sampling.source import source_of


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


def encode_prompts(config: RunConfig, context: ParallelContext) -> EncodedPrompts:
    """Read and encode a run's prompts; all ranks call this together.

    The text encoder is freed when it returns. With ``--sample-offload`` so is the codec, which is
    then built again for decoding.

    Raises:
        ConfigError, DataError: prompts, references or encoders are unusable (raised on all ranks).
    """
    # It may be called before there is a run, which has the device.
    device = torch.empty(0, device=torch.cuda.current_device()).device
    sample = config.section(SampleConfig)
    requests = requests_of(sample)
    source = source_of(config)
    shape = shape_of(sample, source.manifest)
    groups = groups_of(requests, shape, sample)
    built = partial(on_reporting_rank, partial(source.codec, device), "Building the codec", context)
    codec = built()
    encoder = partial(source.text_encoder, device)
    text_encoder = on_reporting_rank(encoder, "Building the text encoder", context)
    needs = network_of(config).needs
    image_encoder = None
    if needs.image_places:
        image_encoder = on_reporting_rank(
            partial(source.image_encoder, device), "Building the image encoder", context
        )
    # Data that is encoded on access opens its lists of clips again to encode the empty caption.
    null = source.null
    encoded = [
        encode_on_reporting_rank(
            group.requests,
            group.shape,
            codec,
            text_encoder,
            context,
            null=null,
            conditions=config.section(ConditionConfig),
            needs=needs,
            image_encoder=image_encoder,
        )
        for group in groups
    ]
    kept = codec
    again = built if sample.sample_offload else lambda: kept
    return EncodedPrompts(requests, shape, groups, encoded, again)
