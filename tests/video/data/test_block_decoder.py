"""Latents that are decoded a stretch at a time, against decoding them at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.data.codec import PatchCodec
from megatron_ext.video.data.codecs import (
    FeatureCacheDecoder,
    OverlapDecoder,
    block_decoder,
    build_codec,
)
from tests.video.data.making import CODEC, write_vaes

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
    """That of HunyuanVideo normalizes over all frames that it is given."""
    codec = build_codec(CodecConfig(str(folders["AutoencoderKLHunyuanVideo"])))
    decoder = block_decoder(codec)
    assert isinstance(decoder, OverlapDecoder)
    parts = in_stretches(decoder, latents_of(codec), STRETCHES)
    assert [x.size(2) for x in parts] == [9, 12, 4, 20]


def test_latents_of_another_codec_are_refused() -> None:
    decoder = block_decoder(PatchCodec(CODEC))
    with pytest.raises(DataError, match=r"have 5 channels, but the codec has 24"):
        decoder(torch.zeros(1, 5, 3, 2, 2))
