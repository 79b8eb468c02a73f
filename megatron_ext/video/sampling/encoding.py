"""Encodes the captions and references of requests for clips as the training data was encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.parallel.collectives import on_reporting_rank
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import ConditionConfig
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.conditions import Text, null_like
from megatron_ext.video.data.encode import caption_for
from megatron_ext.video.data.image_encoder import ImageEncoder
from megatron_ext.video.data.text_encoders import TextEncoder
from megatron_ext.video.networks.network import DataNeeds
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.groups import SampleShape
from megatron_ext.video.sampling.references import encode_references
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
    needs: DataNeeds | None = None,
    image_encoder: ImageEncoder | None = None,
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
        needs: the forms in which the network takes references; None for frames encoded alone.
        image_encoder: embeds reference frames, if the network needs it.

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
        # All requests may have that of the flag, so each text is encoded once.
        instead = {x: _encoded(text_encoder, [x]) for x in dict.fromkeys(negatives) if x}
        for number, negative in enumerate(negatives):
            if negative:
                null.sequence[number] = instead[negative].sequence[0]
                null.pooled[number] = instead[negative].pooled[0]
    references = None
    needs = needs or DataNeeds()
    given = any(request.reference is not None for request in requests)
    if given or needs.masked or needs.image_places:
        references = encode_references(
            requests,
            shape,
            codec,
            conditions or ConditionConfig(),
            needs=needs,
            image_encoder=image_encoder,
        )
    return EncodedRequests(latent_shape, encoded, null, references)


def _encoded(encoder: TextEncoder, captions: Sequence[str]) -> Text:
    """Return encoded captions; they are encoded one by one, which bounds the memory."""
    pairs = [encoder.encode([caption]) for caption in captions]
    return Text(*(torch.cat(parts).cpu() for parts in zip(*pairs, strict=True)))


def encode_on_reporting_rank(
    requests: Sequence[ClipRequest],
    shape: SampleShape,
    codec: VideoCodec | None,
    text_encoder: TextEncoder | None,
    context: ParallelContext,
    **options: Any,
) -> EncodedRequests:
    """Encode requests on the reporting rank (which prints the log); return them on all ranks.

    All ranks call this together. Codec and text encoder may be None except on the reporting
    rank. `encode_requests` explains the ``options``.

    Raises:
        ConfigError, DataError: encoding failed on the reporting rank (raised on all ranks).
    """

    def encode() -> EncodedRequests:
        assert codec is not None and text_encoder is not None
        return encode_requests(requests, shape, codec, text_encoder, **options)

    encoded = [on_reporting_rank(encode, "Encoding the prompts", context)]
    torch.distributed.broadcast_object_list(encoded, src=context.reporting_rank)
    assert encoded[0] is not None
    return encoded[0]
