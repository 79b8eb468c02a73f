"""The first frame of a chunk, encoded anew by the video codec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.data.video.codec_base import VideoCodec


@dataclass(frozen=True)
class CodecFirstFrame:
    """Decodes latents and encodes their last pixel frame as an image; a `FirstFrame`.

    Attributes:
        codec: causal in time, so that an image is one latent frame.
    """

    codec: VideoCodec

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """``[b, 1, c, h, w]`` of the newest of ``[b, t, c, h, w]``."""
        pixels = self.codec.decode(latents.float().transpose(1, 2))
        return self.codec.encode(pixels[:, :, -1:]).transpose(1, 2).to(latents)
