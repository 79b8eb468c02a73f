"""Reads the reference frames of requests for clips, and encodes them as a network takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.video.config.run import MODES, ConditionConfig
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.conditions import (
    Section,
    frame_masks,
    pixel_masks,
    place_pixels,
    place_references,
    sections,
)
from megatron_ext.video.data.frames import decode, probe
from megatron_ext.video.data.geometry import ClipShape, subsampling
from megatron_ext.video.data.image_encoder import ImageEncoder
from megatron_ext.video.networks.network import DataNeeds
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.groups import SampleShape
from megatron_ext.video.sampling.requests import ClipRequest

Pieces = Sequence[tuple[Section, Tensor]]
"""Each section of a clip that its reference gives, with its pixels ``[3, f, H, W]``."""


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


def encode_references(
    requests: Sequence[ClipRequest],
    shape: SampleShape,
    codec: VideoCodec,
    conditions: ConditionConfig,
    *,
    needs: DataNeeds,
    image_encoder: ImageEncoder | None = None,
) -> References:
    """Encode the references of requests for clips of ``shape``, in the forms that a network takes.

    Args:
        needs: the forms: masked clips or reference frames, and the frames that are also embedded.
        image_encoder: embeds frames, if the network needs it.

    Raises:
        DataError: a reference cannot be read, or is too short for the condition mode.
    """
    latent_shape = codec.latent_shape(shape.num_frames, shape.height, shape.width)
    modes = torch.tensor([MODES.index(request.mode) for request in requests])
    given = [_pieces(request, shape, codec, conditions) for request in requests]
    masks = frame_masks(modes, latent_shape[1], conditions)
    embeds = None
    if image_encoder is not None and needs.image_places:
        embeds = torch.stack([_embedded(x, needs.image_places, image_encoder) for x in given])
    if not needs.masked:
        placed = [_placed(pieces, codec, latent_shape) for pieces in given]
        return References(torch.stack(placed), masks, image_embeds=embeds)
    whole = (1, 3, shape.num_frames, shape.height, shape.width)
    masked = []
    for pieces in given:
        pixels = place_pixels([(s, x[None]) for s, x in pieces], whole, codec.temporal)
        masked.append(codec.encode(pixels, mean=True)[0].cpu())
    pixel_mask = pixel_masks(modes, latent_shape[1], conditions, codec.temporal)
    none = torch.zeros(len(requests), *latent_shape)
    return References(none, masks, torch.stack(masked), pixel_mask, embeds)


def _pieces(
    request: ClipRequest, shape: SampleShape, codec: VideoCodec, conditions: ConditionConfig
) -> Pieces:
    """Read the frames that a request's reference gives; return none for a request without one."""
    if request.reference is None:
        return []
    clip = Clip(request.reference, request.text)
    return [
        (
            part.section,
            decode(
                clip,
                part.first,
                part.interval,
                part.count,
                (shape.height, shape.width),
                shape=part.shape,
                blend=shape.encode.video_blend,
                background=shape.encode.video_background,
            ),
        )
        for part in reference_parts(request, shape, codec, conditions)
    ]


def _placed(pieces: Pieces, codec: VideoCodec, latent_shape: tuple[int, ...]) -> Tensor:
    """Return latents ``[c, t, h, w]`` with the frames of a clip's references, zero elsewhere.

    Each section is encoded by itself, as in training, but by the mean instead of a random sample.
    """
    encoded = [(x, codec.encode(pixels[None], mean=True)[0].cpu()) for x, pixels in pieces]
    return place_references(encoded, latent_shape, torch.float32)


def _embedded(pieces: Pieces, places: Sequence[str], encoder: ImageEncoder) -> Tensor:
    """Return the embeddings ``[n * tokens, width]`` of the given frames at n ``places``.

    The places are those of `DataNeeds.image_places`. A frame that is not given is zero.
    """
    rows = []
    for place in places:
        sides = [section.side for section, _ in pieces]
        side = sides[0] if place == "first" and sides else place
        if side in sides:
            pixels = pieces[sides.index(side)][1]
            rows.append(encoder.encode(pixels[None, :, 0])[0].cpu())
        else:
            rows.append(torch.zeros(encoder.tokens, encoder.width))
    return torch.cat(rows)
