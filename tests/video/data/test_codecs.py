"""The patch codec, and latents decoded part by part, against decoding them at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.data.codec import PatchCodec, cosine_basis, rotation
from megatron_ext.video.data.codecs import (
    FeatureCacheDecoder,
    OverlapDecoder,
    block_decoder,
    build_codec,
)
from tests.video.data.making import CODEC, write_vaes


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


@pytest.mark.parametrize(("temporal", "spatial"), [(1, 2), (2, 4), (4, 2), (8, 2)])
def test_inverse_and_causality_of_other_patches(temporal: int, spatial: int) -> None:
    codec = build_codec(CodecConfig(codec_temporal=temporal, codec_spatial=spatial))
    pixels = torch.rand(1, 3, 2 * temporal + 1, 8, 12, generator=torch.Generator().manual_seed(0))
    latents = codec.encode(pixels)
    assert latents.shape == (1, 3 * temporal * spatial**2, 3, 8 // spatial, 12 // spatial)
    torch.testing.assert_close(codec.decode(latents), pixels, atol=1e-5, rtol=0)
    changed = pixels.clone()
    changed[:, :, 1:] += 1
    assert torch.equal(codec.encode(changed)[:, :, :1], latents[:, :, :1])
    # The transform is orthogonal: it keeps the energy of all frames, the first counted repeatedly.
    energy = pixels.square().sum() + (temporal - 1) * pixels[:, :, 0].square().sum()
    torch.testing.assert_close(latents.square().sum(), energy)


def test_what_was_encoded_before_can_be_decoded_for_ever() -> None:
    """The rotation is fixed: other numbers would make every stored latent useless."""
    assert rotation(3).tolist() == [pytest.approx(row, abs=1e-12) for row in ROTATION_OF_THREE]


ROTATION_OF_THREE = [
    [0.908295984389481, 0.418197189555119, -0.010464960111879],
    [-0.033019571207838, 0.046733290007737, -0.998361511438769],
    [0.417022916227866, -0.907153300304448, -0.056256351530770],
]


def test_rows_of_a_basis_by_themselves() -> None:
    rows = torch.tensor([5, 0, 47])
    assert torch.equal(cosine_basis(4, 2, rows), cosine_basis(4, 2)[rows])
    colours = cosine_basis(1, 1)
    assert torch.allclose(colours[0], torch.full((3,), 3**-0.5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"codec_spatial": 0}, r"`--codec-spatial` \(0\) must be at least 1; 8 is the default"),
        ({"codec_scale": 0.0}, r"`codec_scale` \(0.0\) must differ from 0; use 1 /"),
        ({"codec_scale": float("nan")}, r"`--codec-scale` \(nan\) must be a finite number"),
        ({"codec_shift": float("inf")}, r"`--codec-shift` \(inf\) must be a finite number"),
    ],
)
def test_options_of_no_use(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        CodecConfig(**wrong)  # type: ignore[arg-type]


STRETCHES = (3, 3, 1, 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_vaes(tmp_path_factory.mktemp("vaes"))


def latents_of(codec: Any, frames: int = sum(STRETCHES)) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, codec.channels, frames, 4, 6, generator=generator)


def in_stretches(decoder: Any, latents: Tensor, stretches: Sequence[int]) -> list[Tensor]:
    return [decoder(part) for part in latents.split(list(stretches), dim=2)]


@pytest.mark.parametrize("temporal", [1, 4])
def test_the_patch_codec_is_exact(temporal: int) -> None:
    codec = PatchCodec(CodecConfig(codec_spatial=4, codec_temporal=temporal, codec_channels=24))
    latents = latents_of(codec)
    parts = in_stretches(block_decoder(codec), latents, STRETCHES)
    assert [x.size(2) for x in parts] == [2 * temporal + 1, 3 * temporal, temporal, 5 * temporal]
    torch.testing.assert_close(torch.cat(parts, dim=2), codec.decode(latents), atol=1e-6, rtol=0)


def test_the_vae_of_wan_is_exact_whatever_else_it_does(folders: dict[str, Path]) -> None:
    codec = build_codec(CodecConfig(str(folders["AutoencoderKLWan"])))
    latents = latents_of(codec)
    decoder, other = block_decoder(codec), block_decoder(codec)
    assert isinstance(decoder, FeatureCacheDecoder)
    parts = []
    for part in latents.split(list(STRETCHES), dim=2):
        parts.append(decoder(part))
        other(-part)
        codec.decode(part)
        codec.encode(torch.zeros(1, 3, 5, 32, 48))
    assert [x.size(2) for x in parts] == [9, 12, 4, 20]
    torch.testing.assert_close(torch.cat(parts, dim=2), codec.decode(latents), atol=1e-5, rtol=0)


def test_the_vae_of_wan_2_2_is_exact_too(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(
        base_dim=8, decoder_base_dim=8, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4, is_residual=True, in_channels=12,
        out_channels=12, patch_size=2, scale_factor_spatial=16,
    ).save_pretrained(tmp_path)  # fmt: skip
    codec = build_codec(CodecConfig(str(tmp_path)))
    latents = latents_of(codec, 6)
    parts = in_stretches(block_decoder(codec), latents, (3, 3))
    torch.testing.assert_close(torch.cat(parts, dim=2), codec.decode(latents), atol=1e-5, rtol=0)


class ReachingCodec:
    """Each frame is a sum over its latent frame and those before, as far as it reaches."""

    channels, spatial, temporal = 3, 1, 2

    def __init__(self, reach: int) -> None:
        self.reach = reach

    def decode(self, latents: Tensor) -> Tensor:
        before = latents.new_zeros(*latents.shape[:2], self.reach, *latents.shape[3:])
        padded = torch.cat([before, latents], dim=2)
        shifted = padded.unfold(2, self.reach + 1, 1) * torch.arange(1.0, self.reach + 2)
        return shifted.sum(-1).repeat_interleave(2, dim=2)[:, :, 1:]


def test_other_codecs_are_exact_where_the_overlap_is_what_they_look_back_at() -> None:
    codec: Any = ReachingCodec(reach=4)
    latents = latents_of(codec)
    want, errors = codec.decode(latents), []
    for overlap in (1, 3, 4, 20):
        parts = in_stretches(OverlapDecoder(codec, overlap), latents, STRETCHES)
        assert [x.size(2) for x in parts] == [5, 6, 2, 10]
        errors.append(float((torch.cat(parts, dim=2) - want).abs().max()))
    assert errors[0] > 1 and errors[1] > 1 and max(errors[2:]) < 1e-5


def test_a_vae_that_is_not_quite_causal_is_decoded_with_overlap(folders: dict[str, Path]) -> None:
    """HunyuanVideo's normalizes over all frames that it is given."""
    codec = build_codec(CodecConfig(str(folders["AutoencoderKLHunyuanVideo"])))
    decoder = block_decoder(codec)
    assert isinstance(decoder, OverlapDecoder)
    parts = in_stretches(decoder, latents_of(codec), STRETCHES)
    assert [x.size(2) for x in parts] == [9, 12, 4, 20]


def test_latents_of_another_codec_are_refused() -> None:
    decoder = block_decoder(PatchCodec(CODEC))
    with pytest.raises(DataError, match=r"have 5 channels, but the codec has 24"):
        decoder(torch.zeros(1, 5, 3, 2, 2))
