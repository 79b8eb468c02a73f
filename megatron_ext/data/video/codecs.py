"""Between pixels and latents: a local diffusers VAE, or a built-in codec without weights.

Pixels are ``[b, 3, f, H, W]`` float32 in [-1, 1]; latents ``[b, c, t, h, w]``. Both kinds are
causal where ``t = (f - 1) / temporal + 1``: the first frame alone gives the first latent frame.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ext.data.video.patch_transform import band_order, cosine_basis, rotation
from megatron_ext.errors import ConfigError, DataError

PATCH = "patch"


@dataclass(frozen=True)
class CodecConfig:
    """Which codec, and the sizes of the built-in one.

    Attributes:
        codec: ``patch``, or the folder of a diffusers video VAE.
        codec_spatial: pixels of a latent cell on each side (patch codec).
        codec_temporal: frames of a latent frame after the first (patch codec).
        codec_channels: channels c; None keeps all ``3 * temporal * spatial²``, without loss; fewer
            keep the lowest space-time frequencies only (patch codec).
        codec_shift: grey level that becomes zero, in the range of pixels (patch codec).
        codec_scale: factor on the latents, best 1 / their standard deviation (patch codec).

    Raises:
        ConfigError: a size below 1, or more channels than there are.
    """

    codec: str = PATCH
    codec_spatial: int = 8
    codec_temporal: int = 4
    codec_channels: int | None = None
    codec_shift: float = 0.0
    codec_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("codec_spatial", "codec_temporal"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be at least 1; 1 leaves this side "
                    "as it is."
                )
        whole = 3 * self.codec_temporal * self.codec_spatial**2
        if self.codec_channels is not None and not 1 <= self.codec_channels <= whole:
            raise ConfigError(
                f"`codec_channels` ({self.codec_channels}) must lie between 1 and 3 × temporal × "
                f"spatial² = {whole}; leave it out to keep everything."
            )
        if self.codec_scale == 0:
            raise ConfigError(
                "`codec_scale` (0) must differ from 0; use 1 / standard deviation of the latents."
            )


class VideoCodec(Protocol):
    """What preprocessing, online encoding and sampling need of a codec."""

    channels: int
    spatial: int
    temporal: int

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the latents; stored beside them and compared."""
        ...

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """``(c, t, h, w)`` of a clip; ConfigError where the sizes do not divide."""
        ...

    def encode(self, pixels: Tensor) -> Tensor:
        """``[b, 3, f, H, W]`` -> ``[b, c, t, h, w]`` float32."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """``[b, c, t, h, w]`` -> ``[b, 3, f, H, W]`` float32."""
        ...


def causal_shape(
    codec: VideoCodec, num_frames: int, height: int, width: int
) -> tuple[int, int, int, int]:
    """``(c, t, h, w)``, t = (f - 1) / temporal + 1.

    Raises:
        ConfigError: the sizes do not divide.
    """
    if num_frames < 1 or (num_frames - 1) % codec.temporal:
        raise ConfigError(
            f"The number of frames ({num_frames}) must be a multiple of the codec's temporal "
            f"factor plus 1 ({codec.temporal}k + 1); choose "
            f"{max(num_frames - 1, 0) // codec.temporal * codec.temporal + 1}."
        )
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % codec.spatial:
            raise ConfigError(
                f"The {name} ({size}) must be a multiple of the codec's spatial factor "
                f"({codec.spatial}); choose another resolution or codec."
            )
    t = (num_frames - 1) // codec.temporal + 1
    return codec.channels, t, height // codec.spatial, width // codec.spatial


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
        basis = cosine_basis(self.temporal, self.spatial)
        kept = basis[band_order(self.temporal, self.spatial)[: self.channels]]
        self._matrix = (rotation(self.channels) @ kept).float()

    @property
    def identity(self) -> dict[str, Any]:
        return {**asdict(self.config), "codec": PATCH, "codec_channels": self.channels}

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """See `causal_shape`."""
        return causal_shape(self, num_frames, height, width)

    def encode(self, pixels: Tensor) -> Tensor:
        """``[b, 3, f, H, W]`` -> ``[b, c, t, h, w]``."""
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
        b, c, t, h, w = latents.shape
        if c != self.channels:
            raise DataError(
                f"The latents have {c} channels, but the codec has {self.channels}; decode with "
                "the codec that made them."
            )
        cells = latents.permute(0, 2, 3, 4, 1).float() / self.config.codec_scale
        p, q = self.temporal, self.spatial
        cells = (cells @ self._matrix.to(latents.device)).reshape(b, t, h, w, 3, p, q, q)
        frames = cells.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(b, 3, t * p, h * q, w * q)
        first = frames[:, :, :p].mean(dim=2, keepdim=True)
        return torch.cat([first, frames[:, :, p:]], dim=2) + self.config.codec_shift


class DiffusersCodec:
    """A video VAE of diffusers (AutoencoderKLHunyuanVideo, AutoencoderKLWan, ...) from a folder.

    The latents are a posterior sample, normalized as the VAE's own configuration says: ``(z -
    mean) / std`` for each channel, or ``scaling_factor * (z - shift_factor)``.

    Args:
        folder: with ``config.json`` and the weights; nothing is fetched.
        device: where it computes.
        seed: of the posterior samples; a clip's sample depends on its order of encoding.
    """

    def __init__(self, folder: str, device: torch.device, seed: int = 0) -> None:
        settings = _read_config(folder)
        self.folder, self.device = folder, device
        self._settings = settings
        self._vae = _load_vae(folder, settings).to(device).eval().requires_grad_(False)
        self.channels = int(_first(settings, "latent_channels", "z_dim", folder=folder))
        self.spatial = int(
            _first(settings, "spatial_compression_ratio", "scale_factor_spatial", folder=folder)
        )
        self.temporal = int(
            _first(settings, "temporal_compression_ratio", "scale_factor_temporal", folder=folder)
        )
        self._generator = torch.Generator(device).manual_seed(seed)
        self._mean, self._std = self._statistics()

    @property
    def identity(self) -> dict[str, Any]:
        return {"codec": self._settings["_class_name"], "config": self._settings}

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the raw latents, ``[c, 1, 1, 1]``."""
        means, stds = self._settings.get("latents_mean"), self._settings.get("latents_std")
        if means is None or stds is None:
            means = [self._settings.get("shift_factor") or 0.0] * self.channels
            stds = [1 / (self._settings.get("scaling_factor") or 1.0)] * self.channels
        shape = (self.channels, 1, 1, 1)
        return tuple(  # type: ignore[return-value]
            torch.tensor(values, device=self.device).reshape(shape) for values in (means, stds)
        )

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """See `causal_shape`."""
        return causal_shape(self, num_frames, height, width)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """``[b, 3, f, H, W]`` -> ``[b, c, t, h, w]`` float32."""
        self.latent_shape(*pixels.shape[2:])
        given = pixels.to(self.device, self._vae.dtype)
        sample: Tensor = self._vae.encode(given).latent_dist.sample(generator=self._generator)
        return (sample.float() - self._mean) / self._std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """``[b, c, t, h, w]`` -> ``[b, 3, f, H, W]`` float32."""
        raw = latents.to(self.device).float() * self._std + self._mean
        decoded: Tensor = self._vae.decode(raw.to(self._vae.dtype)).sample
        return decoded.float()


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


def _read_config(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    try:
        settings = dict(json.loads(path.read_bytes()))
        settings["_class_name"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"`codec` ({folder}) must be `{PATCH}` or a local folder with a diffusers VAE, but "
            f"{path} cannot be used ({error!r}); correct the path."
        ) from None
    return settings


def _load_vae(folder: str, settings: dict[str, Any]) -> Any:
    try:
        import diffusers
    except ImportError:
        raise ConfigError(
            f"`codec` ({folder}) needs the package diffusers, which is not installed; run `pip "
            f"install diffusers`, or use `{PATCH}`."
        ) from None
    kind = getattr(diffusers, settings["_class_name"], None)
    if kind is None:
        raise ConfigError(
            f"`codec` ({folder}) is a {settings['_class_name']}, which the installed diffusers "
            "does not have; install a newer one."
        )
    return kind.from_pretrained(folder, local_files_only=True)


def _first(settings: dict[str, Any], *names: str, folder: str) -> Any:
    for name in names:
        if settings.get(name) is not None:
            return settings[name]
    raise ConfigError(
        f"`codec` ({folder}) must be a causal video VAE, but its config.json has neither of "
        f"{', '.join(names)}; use another VAE."
    )
