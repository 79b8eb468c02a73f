"""The interface of video codecs, and a built-in codec without weights.

Pixels are ``[b, 3, f, H, W]`` float32 in [-1, 1]; latents are ``[b, c, t, h, w]``. All codecs are
causal: the first latent frame depends only on the first frame, and each further one encodes
`VideoCodec.temporal` frames, so ``t = (f - 1) / temporal + 1``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import PATCH, TILE_FLAGS, CodecConfig


class VideoCodec(ABC):
    """The interface of a codec for preprocessing, online encoding and sampling.

    Attributes:
        channels: number of latent channels, c.
        spatial: side of the square that a latent pixel encodes, in pixels.
        temporal: number of frames that a latent frame encodes; the first latent frame encodes one.
        identity: settings that determine the latents; a dataset stores them for comparison.
        images_only: whether the codec encodes single pictures only.
    """

    channels: int
    spatial: int
    temporal: int
    identity: dict[str, Any]
    images_only = False

    @property
    def facts(self) -> dict[str, Any]:
        """Return the numbers of the latents that a dataset stores beside the identity.

        They follow from it, but readers of the dataset need no codec to know them.
        """
        return {"temporal": self.temporal, "spatial": self.spatial}

    @abstractmethod
    def encode(
        self, pixels: Tensor, *, number: int = 0, piece: str = "clip", mean: bool = False
    ) -> Tensor:
        """Encode pixels ``[b, 3, f, H, W]`` in [-1, 1] as latents ``[b, c, t, h, w]`` float32.

        Random latents, such as posterior samples of a VAE, depend only on the pixels, the codec's
        seed, the clip's ``number`` in the list of clips, and ``piece``, a name that tells apart
        what is encoded from one clip: for example ``"clip"``, or ``"head1"`` for a reference. With
        ``mean``, the mean of the posterior is returned instead of a sample.
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents ``[b, c, t, h, w]`` to pixels ``[b, 3, f, H, W]`` float32.

        DataError is raised if c is not the codec's number of channels.
        """

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the shape ``(c, t, h, w)`` of a clip's latents.

        Raise ConfigError for a number of frames, a height or a width that the codec cannot encode.
        """
        if self.images_only and num_frames != 1:
            raise ConfigError(
                f"The number of frames ({num_frames}) must be 1, since the codec "
                f"({self.identity['codec']}) encodes pictures only; choose 1, or the codec of a "
                "video model."
            )
        if num_frames < 1 or (num_frames - 1) % self.temporal:
            raise ConfigError(
                f"The number of frames ({num_frames}) must be a multiple of the codec's temporal "
                f"factor plus 1 ({self.temporal}k + 1); choose "
                f"{max(num_frames - 1, 0) // self.temporal * self.temporal + 1}."
            )
        for name, size in (("height", height), ("width", width)):
            if size < 1 or size % self.spatial:
                raise ConfigError(
                    f"The {name} ({size}) must be a multiple of the codec's spatial factor "
                    f"({self.spatial}); choose another resolution or codec."
                )
        t = (num_frames - 1) // self.temporal + 1
        return self.channels, t, height // self.spatial, width // self.spatial

    def check_channels(self, latents: Tensor) -> None:
        """Raise DataError if c of latents ``[b, c, t, h, w]`` is not the codec's `channels`."""
        if latents.size(1) != self.channels:
            raise DataError(
                f"The latents have {latents.size(1)} channels, but the codec has {self.channels}; "
                "decode with the codec that made them."
            )


_ROTATION_SEED = 20250312
_COLOURS = ((1, 1, 1), (1, 0, -1), (1, -2, 1))
"""An orthogonal basis of colours over red, green, blue: brightness and two differences."""


class PatchCodec(VideoCodec):
    """A codec that needs no weights and no training: a fixed transform of space-time patches.

    A latent pixel encodes a patch of p = ``temporal`` frames of q x q pixels, q = ``spatial``. For
    the first latent frame, the first frame is repeated p times. A patch is flattened in the order
    colour, frame, row, column to ``3 * p * q * q`` values. The transform is a cosine basis followed
    by a rotation, so it is orthogonal: with all channels nothing is lost, with fewer the lowest
    frequencies are kept. The codec is meant for tests, and for small experiments without a VAE.
    """

    def __init__(self, config: CodecConfig) -> None:
        self.config = config
        self.spatial = config.codec_spatial
        self.temporal = config.codec_temporal
        self.channels = config.codec_channels or 3 * self.temporal * self.spatial**2
        kept = band_order(self.temporal, self.spatial)[: self.channels]
        basis = cosine_basis(self.temporal, self.spatial, kept)
        self._matrix = (rotation(self.channels) @ basis).float()
        settings = {k: v for k, v in asdict(config).items() if k not in TILE_FLAGS}
        self.identity = {**settings, "codec": PATCH, "codec_channels": self.channels}

    def encode(
        self, pixels: Tensor, *, number: int = 0, piece: str = "clip", mean: bool = False
    ) -> Tensor:
        b, _, f, height, width = pixels.shape
        _, t, h, w = self.latent_shape(f, height, width)
        first = pixels[:, :, :1].expand(-1, -1, self.temporal, -1, -1)
        frames = torch.cat([first, pixels[:, :, 1:]], dim=2).float() - self.config.codec_shift
        p = self.temporal
        q = self.spatial
        cells = frames.reshape(b, 3, t, p, h, q, w, q).permute(0, 2, 4, 6, 1, 3, 5, 7)
        matrix = self._matrix.to(pixels.device)
        latents = cells.reshape(b, t, h, w, -1) @ matrix.T * self.config.codec_scale
        return latents.permute(0, 4, 1, 2, 3).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        self.check_channels(latents)
        b, _, t, h, w = latents.shape
        cells = latents.permute(0, 2, 3, 4, 1).float() / self.config.codec_scale
        p = self.temporal
        q = self.spatial
        cells = (cells @ self._matrix.to(latents.device)).reshape(b, t, h, w, 3, p, q, q)
        frames = cells.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(b, 3, t * p, h * q, w * q)
        first = frames[:, :, :p].mean(dim=2, keepdim=True)
        return torch.cat([first, frames[:, :, p:]], dim=2) + self.config.codec_shift


def _cosines(n: int) -> Tensor:
    """Return the orthonormal DCT-II (Ahmed et al., 1974), ``[n, n]`` float64; rows are cosines."""
    k, x = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    waves = torch.cos(math.pi * k.double() * (x.double() + 0.5) / n)
    return waves * torch.where(k == 0, math.sqrt(1 / n), math.sqrt(2 / n))


def cosine_basis(temporal: int, spatial: int, kept: Tensor | None = None) -> Tensor:
    """Return an orthonormal cosine basis of flat patches, one basis vector a row, ``[3pqq, 3pqq]``.

    A patch has p = ``temporal`` frames of q x q pixels, q = ``spatial``. The result is float64.
    ``kept`` holds the indices of the rows to return; None returns all, which can take gigabytes.
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
    """Return the row indices of `cosine_basis` from low to high frequency, ``[3pqq]``."""
    t, y, x = (torch.arange(n).double() / n for n in (temporal, spatial, spatial))
    radius = t[:, None, None] ** 2 + y[:, None] ** 2 + x**2
    return radius.expand(3, -1, -1, -1).reshape(-1).argsort(stable=True)


def rotation(size: int) -> Tensor:
    """Return a fixed orthogonal matrix ``[size, size]`` float64, which mixes channels.

    It is Q of the QR decomposition of a Gaussian matrix. The diagonal of R is made positive, so
    that Q is unique. The random bits come from PCG64, which every release of numpy computes alike.
    """
    uniforms = np.random.PCG64(_ROTATION_SEED).random_raw(2 * size * size)
    u, v = ((uniforms >> np.uint64(11)).astype(np.float64) + 0.5).reshape(2, size, size) / 2.0**53
    gaussian = torch.from_numpy(np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v))
    q, r = torch.linalg.qr(gaussian)
    fixed: Tensor = q * torch.sign(torch.diagonal(r))
    return fixed
