"""Codecs by name: a local diffusers VAE, or a built-in codec without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.encoding import PATCH, CodecConfig
from megatron_ext.data.video.codec_base import VideoCodec, causal_shape, check_channels
from megatron_ext.data.video.identity import compared
from megatron_ext.data.video.patch_transform import band_order, cosine_basis, rotation
from megatron_ext.data.video.vae import DiffusersCodec
from megatron_ext.errors import ConfigError, DataError


class PatchCodec:
    """Space-time patches in a cosine basis, mixed by a fixed rotation; no weights, no training.

    A latent cell holds ``temporal`` frames of ``spatial²`` pixels; the first latent frame holds
    one frame, repeated. The transform is orthogonal, so with all channels it is exactly
    invertible, and with fewer it is the best linear one for its frequencies. It knows nothing of
    what videos look like: it is for tests, small experiments and data without a VAE.
    """

    def __init__(self, config: CodecConfig) -> None:
        self.config = config
        self.spatial, self.temporal = config.codec_spatial, config.codec_temporal
        features = 3 * self.temporal * self.spatial**2
        self.channels = config.codec_channels or features
        kept = band_order(self.temporal, self.spatial)[: self.channels]
        basis = cosine_basis(self.temporal, self.spatial, kept)
        self._matrix = (rotation(self.channels) @ basis).float()

    @property
    def identity(self) -> dict[str, Any]:
        return {**asdict(self.config), "codec": PATCH, "codec_channels": self.channels}

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """See `causal_shape`."""
        return causal_shape(self, num_frames, height, width)

    def encode(self, pixels: Tensor, *, number: int = 0, piece: str = "clip") -> Tensor:
        """See `VideoCodec.encode`; nothing is random."""
        b, _, f, height, width = pixels.shape
        _, t, h, w = self.latent_shape(f, height, width)
        first = pixels[:, :, :1].expand(-1, -1, self.temporal, -1, -1)
        frames = torch.cat([first, pixels[:, :, 1:]], dim=2).float() - self.config.codec_shift
        p, q = self.temporal, self.spatial
        cells = frames.reshape(b, 3, t, p, h, q, w, q).permute(0, 2, 4, 6, 1, 3, 5, 7)
        matrix = self._matrix.to(pixels.device)
        latents = cells.reshape(b, t, h, w, -1) @ matrix.T * self.config.codec_scale
        return latents.permute(0, 4, 1, 2, 3).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        """``[b, c, t, h, w]`` -> ``[b, 3, (t - 1) * temporal + 1, h * spatial, w * spatial]``.

        Raises:
            DataError: the latents have another number of channels.
        """
        check_channels(self, latents)
        b, _, t, h, w = latents.shape
        cells = latents.permute(0, 2, 3, 4, 1).float() / self.config.codec_scale
        p, q = self.temporal, self.spatial
        cells = (cells @ self._matrix.to(latents.device)).reshape(b, t, h, w, 3, p, q, q)
        frames = cells.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(b, 3, t * p, h * q, w * q)
        first = frames[:, :, :p].mean(dim=2, keepdim=True)
        return torch.cat([first, frames[:, :, p:]], dim=2) + self.config.codec_shift


def build_codec(
    config: CodecConfig, device: torch.device | None = None, seed: int = 0
) -> VideoCodec:
    """The codec of a configuration.

    Args:
        config: name and sizes.
        device: for a VAE; the patch codec computes where its input is.
        seed: of posterior samples.

    Raises:
        ConfigError: an unknown name, a folder without a usable VAE, or diffusers is missing.
    """
    if config.codec == PATCH:
        return PatchCodec(config)
    return DiffusersCodec(config.codec, device or torch.device("cpu"), seed)


def codec_from_manifest(
    manifest: Mapping[str, Any],
    codec_folder: str | None = None,
    device: torch.device | None = None,
    seed: int = 0,
) -> VideoCodec:
    """The codec that made the latents of a dataset, to decode samples or encode references.

    Args:
        manifest: of the dataset; see `shards.read_json`.
        codec_folder: of the VAE; the patch codec is rebuilt from the manifest alone.
        device: of a VAE.
        seed: of posterior samples.

    Raises:
        ConfigError: no folder for a VAE, a folder for the patch codec, or one of no use.
        DataError: the manifest names no codec, or another VAE than the folder's.
    """
    identity = manifest.get("codec")
    if not isinstance(identity, Mapping) or not isinstance(identity.get("codec"), str):
        raise DataError(
            f"The manifest must name its codec, but holds {identity!r}; make the data again with "
            "tools/preprocess_video.py."
        )
    if identity["codec"] != PATCH and codec_folder is None:
        raise ConfigError(
            f"The latents were made with the VAE {identity['codec']}, so decoding needs its local "
            "folder; give its path as `codec_folder`."
        )
    if identity["codec"] != PATCH:
        codec: VideoCodec = build_codec(CodecConfig(str(codec_folder)), device, seed)
        _compare(codec, identity, str(codec_folder))
        return codec
    if codec_folder is not None:
        raise ConfigError(
            f"`codec_folder` ({codec_folder}) has no effect: the latents were made with the codec "
            f"`{PATCH}`, which has no weights; leave it out."
        )
    try:
        return PatchCodec(CodecConfig(**identity))
    except (TypeError, ConfigError) as error:
        raise DataError(
            f"The manifest's codec ({dict(identity)}) cannot be used ({error}); make the data "
            "again with tools/preprocess_video.py."
        ) from None


def _compare(codec: VideoCodec, identity: Mapping[str, Any], folder: str) -> None:
    differing = compared(identity, codec.identity)
    if differing:
        raise DataError(
            f"The latents were not made with the VAE of `codec_folder` ({folder}): {differing}; "
            "give the folder of the VAE that preprocessed them."
        )
