"""The interface of video codecs, a built-in codec without weights, and the video VAEs of diffusers.

Pixels are ``[b, 3, f, H, W]`` float32 in [-1, 1]; latents are ``[b, c, t, h, w]``. All codecs are
causal: the first latent frame depends only on the first frame, and each further one encodes
`VideoCodec.temporal` frames, so ``t = (f - 1) / temporal + 1``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import PATCH, CodecConfig
from megatron_ext.video.data.randomness import generator


class VideoCodec(ABC):
    """The interface of a codec for preprocessing, online encoding and sampling.

    Attributes:
        channels: number of latent channels, c.
        spatial: side of the square that a latent pixel encodes, in pixels.
        temporal: number of frames that a latent frame encodes; the first latent frame encodes one.
        identity: settings that determine the latents; a dataset stores them for comparison.
    """

    channels: int
    spatial: int
    temporal: int
    identity: dict[str, Any]

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


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config.json that describe the model itself.

    Entries whose names begin with ``_``, the version of transformers and the dtype are left out.
    """
    incidental = ("transformers_version", "torch_dtype", "dtype")
    return {k: v for k, v in settings.items() if k[:1] != "_" and k not in incidental}


def compared(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Describe the first difference between two mappings of settings; return "" if they agree.

    The result is a clause for an error message, such as "`channels` was 4, but is 8".
    """
    for name in sorted({*earlier, *current}):
        before = earlier.get(name)
        now = current.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            return compared(before, now)
        return f"`{name}` was {before!r}, but is {now!r}"
    return ""


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
        self.identity = {**asdict(config), "codec": PATCH, "codec_channels": self.channels}

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


class DiffusersCodec(VideoCodec):
    """A video VAE of diffusers (AutoencoderKLHunyuanVideo, AutoencoderKLWan, ...) from a folder.

    The latents are a posterior sample z, normalized as in diffusers' pipelines. If the VAE's
    configuration has a mean and a std, the latents are ``scaling_factor * (z - mean) / std`` for
    each channel, otherwise ``scaling_factor * (z - shift_factor)``.

    Args:
        folder: the folder of ``config.json`` and the weights; nothing is downloaded.
        seed: seed of the posterior samples.

    Raises:
        ConfigError: the folder holds no causal video VAE, or diffusers is missing.
    """

    def __init__(self, folder: str, device: torch.device, seed: int = 0) -> None:
        settings = read_config(folder)
        self.identity = {"codec": settings["_class_name"], "config": public(settings)}
        self.vae = _load_vae(folder, settings["_class_name"]).to(device).eval()
        self.vae.requires_grad_(False)
        self.folder = folder
        self.device = device
        self._seed = seed
        self.channels = self._number("latent_channels", "z_dim")
        self.spatial = self._number("spatial_compression_ratio", "scale_factor_spatial")
        self.temporal = self._number("temporal_compression_ratio", "scale_factor_temporal")
        self._mean, self._std = self._statistics()

    def _number(self, *names: str) -> int:
        """Return the value of the first of ``names`` under which the VAE has a number.

        A name is looked up in the VAE's configuration, then among its attributes, since old
        configurations lack some names. ConfigError is raised if all ``names`` are missing.
        """
        for name in names:
            value = self.vae.config.get(name) or getattr(self.vae, name, None)
            if value is not None:
                return int(value)
        raise ConfigError(
            f"`codec` ({self.folder}) must be a causal video VAE, but it has neither of "
            f"{', '.join(names)}; use another VAE."
        )

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return the mean and deviation that normalize raw latents, ``[c, 1, 1, 1]`` each.

        Normalized latents are ``(raw - mean) / deviation``. The deviation is the standard deviation
        divided by the VAE's scaling factor.
        """
        config = self.vae.config
        means = config.get("latents_mean")
        stds = config.get("latents_std")
        if means is None or stds is None:
            means = [config.get("shift_factor") or 0.0] * self.channels
            stds = [1.0] * self.channels
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=self.device).reshape(-1, 1, 1, 1)
            for values in (means, stds)
        )
        return mean, std / (config.get("scaling_factor") or 1.0)

    @torch.no_grad()
    def encode(
        self, pixels: Tensor, *, number: int = 0, piece: str = "clip", mean: bool = False
    ) -> Tensor:
        shape = (len(pixels), *self.latent_shape(*pixels.shape[2:]))
        posterior = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist
        if tuple(posterior.mean.shape) != shape:
            raise ConfigError(
                f"`codec` ({self.folder}) gives latents of shape {tuple(posterior.mean.shape)}, "
                f"but a causal VAE gives {shape}; use another VAE."
            )
        if mean:
            middle: Tensor = posterior.mean.float()
            return (middle - self._mean) / self._std
        # Noise depends on the number of the clip, not on the order or the number of processes.
        draws = generator(self._seed, number, f"posterior {piece}")
        noise = torch.from_numpy(draws.standard_normal(shape, dtype=np.float32))
        sample: Tensor = posterior.mean.float() + posterior.std.float() * noise.to(self.device)
        return (sample - self._mean) / self._std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        self.check_channels(latents)
        decoded: Tensor = self.vae.decode(self.raw(latents)).sample
        return decoded.float()

    def raw(self, latents: Tensor) -> Tensor:
        """Undo the normalization of latents ``[b, c, t, h, w]``.

        The result is on the VAE's device and has the VAE's dtype.
        """
        raw: Tensor = latents.to(self.device).float() * self._std + self._mean
        return raw.to(self.vae.dtype)


def read_config(folder: str) -> dict[str, Any]:
    """Return the content of the config.json in the folder of a VAE.

    ConfigError is raised if the file is missing, cannot be read, or does not name the VAE's class.
    """
    path = Path(folder) / "config.json"
    try:
        settings = read_json_object(path, not_finite=True)
        reason = None if isinstance(settings.get("_class_name"), str) else "it names no class"
    except UnreadableFile as error:
        reason = error.reason
    if reason is not None:
        raise ConfigError(
            f"`codec` ({folder}) must be `{PATCH}` or a local folder with a diffusers VAE, but "
            f"{path} cannot be used ({reason}); correct the path."
        )
    return settings


def _load_vae(folder: str, name: str) -> Any:
    try:
        import diffusers
    except ImportError:
        raise ConfigError(
            f"`codec` ({folder}) needs the package diffusers, which is not installed; run `pip "
            f"install diffusers`, or use `{PATCH}`."
        ) from None
    kind = getattr(diffusers, name, None) if str(name).startswith("Autoencoder") else None
    if kind is None:
        raise ConfigError(
            f"`codec` ({folder}) is of the class {name}, which is no VAE of the installed "
            "diffusers; give the folder of a VAE, or install a newer diffusers."
        )
    try:
        vae, info = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    # Damaged weights raise errors of safetensors, pickle or torch, which have no common class.
    except Exception as error:
        raise ConfigError(
            f"`codec` ({folder}) holds an {name} whose weights cannot be loaded ({error}); copy "
            "the whole folder again."
        ) from error
    if info["missing_keys"]:
        raise ConfigError(
            f"`codec` ({folder}) lacks the weights {', '.join(sorted(info['missing_keys']))}; copy "
            "the whole folder again."
        )
    return vae
