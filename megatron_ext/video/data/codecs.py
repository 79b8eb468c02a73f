"""Codecs by name: a local diffusers VAE, or a built-in codec without weights.

The orthogonal transform of the patch codec: cosines over a patch, then a fixed rotation.

A patch is flattened as colour, frame, row, column, ``3 * p * q * q`` values.

Latents of a long video to pixels, a stretch at a time, with memory that does not grow.

A codec is causal, so that pixels need no latents to come, but those that went before: how many
decides whether a stretch can be decoded exactly.

- The patch codec looks at each latent frame by itself: exact.
- Wan's VAE keeps, for every convolution, the two frames before: exact, and nothing is done twice.
- Another VAE decodes `OVERLAP` latent frames before the stretch once more, which is exact only if
  it looks no farther back. HunyuanVideo's does, and its norms take in all frames that it is given,
  so that the pixels come close to those of a whole decoding, but are not the same.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import PATCH, CodecConfig
from megatron_ext.video.data.codec_base import VideoCodec, causal_shape, check_channels, compared
from megatron_ext.video.data.vae import DiffusersCodec

_ROTATION_SEED = 20250312
_COLOURS = ((1, 1, 1), (1, 0, -1), (1, -2, 1))
"""Brightness and two differences, orthogonal to each other."""


def _cosines(n: int) -> Tensor:
    """The orthonormal DCT-II (Ahmed et al., 1974), ``[n, n]`` float64, frequency by place."""
    k, x = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    waves = torch.cos(math.pi * k.double() * (x.double() + 0.5) / n)
    return waves * torch.where(k == 0, math.sqrt(1 / n), math.sqrt(2 / n))


def cosine_basis(temporal: int, spatial: int, kept: Tensor | None = None) -> Tensor:
    """Orthonormal rows over a patch, ``[3pqq, 3pqq]`` float64, or only some of them.

    Args:
        temporal, spatial: p and q.
        kept: numbers of the rows wanted, ``[k]`` int64: all of them for large patches would take
            gigabytes.
    """
    colours = torch.tensor(_COLOURS, dtype=torch.float64)
    colours /= colours.norm(dim=1, keepdim=True)
    side = _cosines(spatial)
    sizes = (3, temporal, spatial, spatial)
    numbers = torch.arange(math.prod(sizes)) if kept is None else kept
    axes = (colours, _cosines(temporal), side, side)
    rows = [w[n] for w, n in zip(axes, torch.unravel_index(numbers, sizes), strict=True)]
    return torch.einsum("nc,nt,ny,nx->nctyx", *rows).reshape(len(numbers), -1)


def band_order(temporal: int, spatial: int) -> Tensor:
    """Rows of `cosine_basis` from low to high frequency, ``[3pqq]`` int64; ties in their order."""
    t, y, x = (torch.arange(n).double() / n for n in (temporal, spatial, spatial))
    radius = t[:, None, None] ** 2 + y[:, None] ** 2 + x**2
    return radius.expand(3, -1, -1, -1).reshape(-1).argsort(stable=True)


def rotation(size: int) -> Tensor:
    """A fixed orthogonal matrix ``[size, size]`` float64, which spreads energy over channels.

    The Q of a Gaussian matrix, with the signs that make it unique. Its bits come from numpy's
    PCG64, which no release changes.
    """
    uniforms = np.random.PCG64(_ROTATION_SEED).random_raw(2 * size * size)
    u, v = ((uniforms >> np.uint64(11)).astype(np.float64) + 0.5).reshape(2, size, size) / 2.0**53
    gaussian = torch.from_numpy(np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v))
    q, r = torch.linalg.qr(gaussian)
    fixed: Tensor = q * torch.sign(torch.diagonal(r))
    return fixed


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


OVERLAP = 9
"""Latent frames that are decoded again with the next stretch, where no exact way is known."""

_WAN = "AutoencoderKLWan"

BlockDecoder = Callable[[Tensor], Tensor]
"""Takes the next latents ``[b, c, t, h, w]`` of its videos, gives their pixels ``[b, 3, f, H, W]``:
``f = t * temporal``, but ``(t - 1) * temporal + 1`` at the beginning."""


def block_decoder(codec: VideoCodec) -> BlockDecoder:
    """A decoder that begins with the first frame of videos; see the top of this file."""
    if isinstance(codec, PatchCodec):
        # Behind another frame, so that none but the first of all is taken for an image.
        return OverlapDecoder(codec, overlap=1)
    if isinstance(codec, DiffusersCodec) and type(codec.vae).__name__ == _WAN:
        return FeatureCacheDecoder(codec)
    return OverlapDecoder(codec)


class OverlapDecoder:
    """Decodes each stretch behind the last latent frames before it.

    Args:
        codec: any.
        overlap: latent frames before a stretch, 1 or more.
    """

    def __init__(self, codec: VideoCodec, overlap: int = OVERLAP) -> None:
        self._codec, self._overlap = codec, overlap
        self._before: Tensor | None = None

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """See `BlockDecoder`.

        Raises:
            DataError: the latents have another number of channels.
        """
        check_channels(self._codec, latents)
        before, num_new = self._before, latents.size(2)
        known = latents if before is None else torch.cat([before, latents], dim=2)
        self._before = known[:, :, -self._overlap :].clone()
        pixels = self._codec.decode(known)
        return pixels if before is None else pixels[:, :, -num_new * self._codec.temporal :]


class FeatureCacheDecoder:
    """Decodes latent frame by latent frame through the feature cache of diffusers' Wan VAE.

    The cache belongs to this object, so that other use of the VAE in between does no harm.

    Args:
        codec: with an AutoencoderKLWan.
    """

    def __init__(self, codec: DiffusersCodec) -> None:
        self._codec, self._vae = codec, codec.vae
        self._vae.clear_cache()
        self._features = self._vae._feat_map  # the VAE takes a new list each time that it is used
        # Versions of diffusers that know Wan 2.2 ask for it.
        takes_first = "first_chunk" in inspect.signature(self._vae.decoder.forward).parameters
        self._first: dict[str, bool] = {"first_chunk": True} if takes_first else {}

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """See `BlockDecoder`.

        Raises:
            DataError: the latents have another number of channels.
        """
        check_channels(self._codec, latents)
        entering = self._vae.post_quant_conv(self._codec.raw(latents))
        frames = []
        for frame in entering.split(1, dim=2):
            frames.append(
                self._vae.decoder(frame, feat_cache=self._features, feat_idx=[0], **self._first)
            )
            self._first = {}
        pixels = torch.cat(frames, dim=2)
        patch = self._vae.config.get("patch_size")
        if patch is not None:
            from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

            pixels = unpatchify(pixels, patch_size=patch)
        return pixels.float().clamp(-1, 1)
