"""Encodes the captions and references of requests for clips as the training data was encoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.parallel.collectives import on_reporting_rank
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import MODES, ConditionConfig
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.conditions import (
    Section,
    Text,
    frame_masks,
    null_like,
    place_references,
    sections,
)
from megatron_ext.video.data.encode import caption_for
from megatron_ext.video.data.frames import decode, probe
from megatron_ext.video.data.geometry import ClipShape, subsampling
from megatron_ext.video.data.text_encoders import TextEncoder
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.groups import SampleShape
from megatron_ext.video.sampling.requests import ClipRequest


@dataclass(frozen=True)
class EncodedRequests:
    """P encoded requests, the input of the sampler, on the CPU.

    Attributes:
        latent_shape: shape of one clip, (c, t, h, w).
        text: encoded captions: tokens ``[P, l, d]`` and pooled vectors ``[P, e]``.
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]``, or the encoded negative
            prompts, ``[P, l, d]`` and ``[P, e]``.
        references: latents ``[P, c, t, h, w]`` and masks ``[P, t]``; None if no request has one.
    """

    latent_shape: tuple[int, int, int, int]
    text: Text
    null: Text
    references: References | None

    def __len__(self) -> int:
        return len(self.text.sequence)


def encode_requests(
    requests: Sequence[ClipRequest],
    shape: SampleShape,
    codec: VideoCodec,
    text_encoder: TextEncoder,
    *,
    null: Text | None = None,
    conditions: ConditionConfig | None = None,
) -> EncodedRequests:
    """Encode the requests' captions and references as the training data was encoded.

    Captions get words on the clip's frame rate and motion, like captions of the training data.
    References are resized to ``shape``, the frames and pixels of the clips.

    Args:
        codec, text_encoder: the encoders of the training data.
        null: the encoded empty caption of the training data; None encodes it here. A request's
            negative prompt replaces it for that request.
        conditions: flags of the training run, which set the number of frames that a v2v reference
            gives; None takes the defaults of the flags.

    Raises:
        ConfigError: the codec cannot encode the shape.
        DataError: a reference cannot be read, or a reference or the clips have fewer frames than
            the condition mode of a request needs (`ClipRequest.mode`).
    """
    latent_shape = codec.latent_shape(shape.num_frames, shape.height, shape.width)
    moving = shape.num_frames > 1
    fps = shape.fps if moving and shape.encode.fps_words else None
    captions = [
        caption_for(r.text, fps, r.motion if moving else None, text_encoder) for r in requests
    ]
    encoded = _encoded(text_encoder, captions)
    null = null or _encoded(text_encoder, [""])
    null = Text(null.sequence.cpu(), null.pooled.cpu())
    negatives = [request.negative_prompt for request in requests]
    if any(negatives):
        empty = null_like(null, encoded)
        null = Text(empty.sequence.clone(), empty.pooled.clone())
        for number, negative in enumerate(negatives):
            if negative:
                instead = _encoded(text_encoder, [negative])
                null.sequence[number] = instead.sequence[0]
                null.pooled[number] = instead.pooled[0]
    references = None
    if any(request.reference is not None for request in requests):
        conditions = conditions or ConditionConfig()
        modes = torch.tensor([MODES.index(request.mode) for request in requests])
        placed = [_placed(r, shape, latent_shape, codec, conditions) for r in requests]
        masks = frame_masks(modes, latent_shape[1], conditions)
        references = References(torch.stack(placed), masks)
    return EncodedRequests(latent_shape, encoded, null, references)


def _encoded(encoder: TextEncoder, captions: Sequence[str]) -> Text:
    """Return encoded captions; they are encoded one by one, which bounds the memory."""
    pairs = [encoder.encode([caption]) for caption in captions]
    return Text(*(torch.cat(parts).cpu() for parts in zip(*pairs, strict=True)))


@dataclass(frozen=True)
class ReferencePart:
    """The frames of a reference file that fill one section of a clip.

    Attributes:
        section: the latent frames of the clip that are filled.
        shape: number and size of the frames in the reference file, and its frame rate.
        first, interval: index in the file of the first frame taken, and how many frames further
            the next one is; fractions are allowed.
        count: number of frames taken.
    """

    section: Section
    shape: ClipShape
    first: int | float
    interval: int | float
    count: int


def reference_parts(
    request: ClipRequest,
    shape: SampleShape,
    codec: VideoCodec,
    conditions: ConditionConfig,
) -> list[ReferencePart]:
    """Return which frames of the reference file fill which part of the clip, as the mode needs.

    Only the header of the file is read.

    Raises:
        DataError: the reference cannot be read, or the reference or the clip is too short for the
            mode.
    """
    assert request.reference is not None
    latent_frames = codec.latent_shape(shape.num_frames, shape.height, shape.width)[1]
    header = probe(Clip(request.reference, request.text))
    # Take frames at the same rate as training does: that of the clips, or near it.
    exact = shape.fps if shape.encode.video_fps else None
    interval = subsampling(header.fps, shape.fps, exact)[0]
    parts = []
    for section in sections(request.mode, latent_frames, conditions):
        count = (section.length - 1) * codec.temporal + 1
        last = interval * (count - 1)
        if header.num_frames <= last:
            raise DataError(
                f"The reference {request.reference} has {header.num_frames} frame(s) of "
                f"{header.fps:g} per second, but the mode {request.mode} needs "
                f"{math.floor(last) + 1}; give a longer one, or take an i2v mode."
            )
        first = header.num_frames - 1 - last if section.start else 0
        parts.append(ReferencePart(section, header, first, interval, count))
    return parts


def _placed(
    request: ClipRequest,
    shape: SampleShape,
    latent_shape: tuple[int, int, int, int],
    codec: VideoCodec,
    conditions: ConditionConfig,
) -> Tensor:
    """Return latents ``[c, t, h, w]`` with a request's encoded reference frames, zero elsewhere."""
    placed = []
    if request.reference is not None:
        clip = Clip(request.reference, request.text)
        for part in reference_parts(request, shape, codec, conditions):
            pixels = decode(
                clip,
                part.first,
                part.interval,
                part.count,
                (shape.height, shape.width),
                shape=part.shape,
                blend=shape.encode.video_blend,
                background=shape.encode.video_background,
            )
            # Encode each section separately, as in training.
            placed.append((part.section, codec.encode(pixels[None])[0].cpu()))
    return place_references(placed, latent_shape, torch.float32)


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
