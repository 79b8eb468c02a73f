from __future__ import annotations

import pytest
import torch

from megatron_ext.config.encoding import CodecConfig
from megatron_ext.data.video.codecs import build_codec
from megatron_ext.data.video.patch_transform import cosine_basis, rotation
from megatron_ext.errors import ConfigError, DataError


@pytest.mark.parametrize(
    "config", [CodecConfig(), CodecConfig(codec_spatial=2, codec_shift=-0.5, codec_scale=0.7)]
)
def test_all_channels_are_inverted(config: CodecConfig) -> None:
    codec = build_codec(config)
    pixels = torch.rand(2, 3, 9, 16, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = codec.encode(pixels)
    assert latents.shape == (2, *codec.latent_shape(9, 16, 32))
    torch.testing.assert_close(codec.decode(latents), pixels, atol=1e-5, rtol=0)


def test_first_frame_alone_and_later_frames_do_not_leak() -> None:
    codec = build_codec(CodecConfig(codec_spatial=4, codec_channels=20))
    pixels = torch.rand(1, 3, 9, 16, 16, generator=torch.Generator().manual_seed(0))
    latents = codec.encode(pixels)
    torch.testing.assert_close(codec.encode(pixels[:, :, :1]), latents[:, :, :1])
    torch.testing.assert_close(codec.encode(pixels[:, :, :5]), latents[:, :, :2])


def test_fewer_channels_keep_constant_pictures_and_are_a_projection() -> None:
    codec = build_codec(CodecConfig(codec_channels=12))
    grey = torch.full((1, 3, 5, 16, 16), 0.3)
    torch.testing.assert_close(codec.decode(codec.encode(grey)), grey, atol=1e-5, rtol=0)
    noise = torch.randn(1, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    once = codec.encode(noise)[:, :, 1:]
    again = codec.encode(codec.decode(codec.encode(noise)))[:, :, 1:]
    torch.testing.assert_close(again, once, atol=1e-5, rtol=1e-5)


def test_matrices_are_orthogonal() -> None:
    for matrix in (cosine_basis(4, 2), rotation(48)):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(48, dtype=torch.float64))


def test_sizes_that_do_not_divide_are_refused() -> None:
    codec = build_codec(CodecConfig())
    with pytest.raises(ConfigError, match=r"frames \(16\) must be .* choose 13"):
        codec.latent_shape(16, 16, 16)
    with pytest.raises(ConfigError, match=r"width \(20\) must be a multiple .* \(8\)"):
        codec.latent_shape(17, 16, 20)
    with pytest.raises(DataError, match=r"have 5 channels, but the codec has 768"):
        codec.decode(torch.zeros(1, 5, 1, 2, 2))
    with pytest.raises(ConfigError, match=r"`codec_channels` \(769\) must lie between 1 and"):
        CodecConfig(codec_channels=769)
    with pytest.raises(ConfigError, match=r"must be `patch` or a local folder"):
        build_codec(CodecConfig(codec="/nowhere"))
