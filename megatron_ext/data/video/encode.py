"""From a planned clip to its sample: decoded, encoded, with its references and its caption.

The one way for preprocessing and for encoding in the data loader, so that both give the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.config.encoding import EncodeConfig
from megatron_ext.data.video.assign import ClipShape, first_frame, subsampling
from megatron_ext.data.video.clips import Clip, decode, with_suffix
from megatron_ext.data.video.codec_base import VideoCodec
from megatron_ext.data.video.geometry import Bucket
from megatron_ext.data.video.text_encoders import TextEncoder


@dataclass(frozen=True)
class PlannedClip:
    """A clip with its place.

    Attributes:
        number: in its list.
        clip, shape: what it is.
        bucket: what becomes of it.
    """

    number: int
    clip: Clip
    shape: ClipShape
    bucket: Bucket


@dataclass(frozen=True)
class VideoSample:
    """What training needs of one clip.

    Attributes:
        latents: ``[c, t, h, w]``.
        text: embeddings of the caption, ``[l, d]``.
        pooled: one embedding of it, ``[e]``.
        references: latents of pieces that were encoded by themselves, ``[c, k, h, w]``, by
            `reference_name`; pieces that a clip is too short for are missing.
        fps: frames per second; 0 for an image.
        number: of the clip in its list.
        caption: as the text encoder got it.
    """

    latents: Tensor
    text: Tensor
    pooled: Tensor
    references: dict[str, Tensor]
    fps: int
    number: int
    caption: str


def reference_name(side: str, num_frames: int) -> str:
    """``head1`` or ``tail9``: the side of the clip and the latent frames of the piece."""
    return f"{side}{num_frames}"


class ClipEncoder:
    """Turns planned clips into samples."""

    def __init__(self, config: EncodeConfig, codec: VideoCodec, text_encoder: TextEncoder) -> None:
        self.config, self.codec, self.text_encoder = config, codec, text_encoder

    def sample(self, planned: PlannedClip, epoch: int = 0) -> VideoSample:
        """Reads, encodes and describes one clip.

        Raises:
            DataError: the file cannot be read.
        """
        pixels = self._pixels(planned, epoch)[None]
        fps = subsampling(planned.shape.fps, self.config.fps_cap)[1]
        caption = self.caption(planned)
        text, pooled = self.text_encoder.encode([caption])
        latents = self.codec.encode(pixels, number=planned.number)
        return VideoSample(
            latents=latents[0].cpu(),
            text=text[0].cpu(),
            pooled=pooled[0].cpu(),
            references=self._references(pixels, latents.size(2), planned.number),
            fps=fps if planned.bucket.num_frames > 1 else 0,
            number=planned.number,
            caption=caption,
        )

    def caption(self, planned: PlannedClip) -> str:
        """The caption with its suffix."""
        fps = subsampling(planned.shape.fps, self.config.fps_cap)[1]
        moving = planned.bucket.num_frames > 1
        motion = planned.clip.motion if moving else None
        return with_suffix(planned.clip.caption, fps if moving else None, motion)

    def _pixels(self, planned: PlannedClip, epoch: int) -> Tensor:
        config, bucket = self.config, planned.bucket
        interval = subsampling(planned.shape.fps, config.fps_cap)[0]
        first = 0
        if config.temporal_crop == "random":
            first = first_frame(
                planned.shape, bucket.num_frames, planned.number,
                seed=config.clip_seed, epoch=epoch, fps_cap=config.fps_cap,
            )  # fmt: skip
        size = (bucket.height, bucket.width)
        return decode(planned.clip, first, interval, bucket.num_frames, size)

    def _references(self, pixels: Tensor, num_latent_frames: int, number: int) -> dict[str, Tensor]:
        """Pieces at both ends, from their own frames alone, so that no later frame leaks in."""
        found = {}
        for length in self.config.reference_lengths:
            if length >= num_latent_frames:
                continue
            frames = (length - 1) * self.codec.temporal + 1
            for side, piece in (("head", pixels[:, :, :frames]), ("tail", pixels[:, :, -frames:])):
                name = reference_name(side, length)
                found[name] = self.codec.encode(piece, number=number, piece=name)[0].cpu()
        return found


def reference_names(lengths: Sequence[int]) -> tuple[str, ...]:
    """Names of all references of a configuration."""
    return tuple(reference_name(side, n) for n in lengths for side in ("head", "tail"))
