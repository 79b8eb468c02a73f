"""The first frame of a chunk through a codec."""

from __future__ import annotations

import torch

from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.data.codec import PatchCodec
from megatron_ext.video.streaming.state import CodecFirstFrame

CODEC = PatchCodec(CodecConfig(codec_spatial=2, codec_temporal=2))


def test_it_is_the_latent_of_the_last_pixel_frame() -> None:
    pixels = torch.rand(2, 3, 9, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = CODEC.encode(pixels).transpose(1, 2)
    assert latents.shape[:2] == (2, 5)
    image = CODEC.encode(pixels[:, :, -1:]).transpose(1, 2)
    got = CodecFirstFrame(CODEC)(latents.requires_grad_())
    assert got.shape == (2, 1, *latents.shape[2:]) and not got.requires_grad
    torch.testing.assert_close(got, image, rtol=0, atol=1e-5)
    # It is another latent than that of the frame in the video.
    assert not torch.allclose(got[:, 0], latents[:, -1], atol=0.1)


def test_it_keeps_the_type_of_latents() -> None:
    latents = torch.randn(1, 3, CODEC.channels, 2, 2).bfloat16()
    assert CodecFirstFrame(CODEC)(latents).dtype == torch.bfloat16
