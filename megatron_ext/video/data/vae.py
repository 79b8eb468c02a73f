"""Video VAEs of diffusers, from local folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import PATCH
from megatron_ext.video.data.codec import causal_shape, check_channels, public
from megatron_ext.video.data.randomness import generator


class DiffusersCodec:
    """A video VAE of diffusers (AutoencoderKLHunyuanVideo, AutoencoderKLWan, ...) from a folder.

    The latents are a posterior sample, normalized as the VAE's own configuration says: ``(z - mean)
    / std`` for each channel, times ``scaling_factor``, as diffusers' pipelines do; a VAE without
    these numbers has ``scaling_factor * (z - shift_factor)``.

    Args:
        folder: holds ``config.json`` and the weights; nothing is fetched.
        device: where it computes.
        seed: seed of the posterior samples.

    Raises:
        ConfigError: the folder holds no causal video VAE, or diffusers is missing.
    """

    def __init__(self, folder: str, device: torch.device, seed: int = 0) -> None:
        self._settings = _read_config(folder)
        self._vae = _load_vae(folder, self._settings).to(device).eval().requires_grad_(False)
        self.folder, self.device, self._seed = folder, device, seed
        self.channels = self._number("latent_channels", "z_dim")
        self.spatial = self._number("spatial_compression_ratio", "scale_factor_spatial")
        self.temporal = self._number("temporal_compression_ratio", "scale_factor_temporal")
        self._mean, self._std = self._statistics()

    @property
    def identity(self) -> dict[str, Any]:
        return {"codec": self._settings["_class_name"], "config": public(self._settings)}

    def _number(self, *names: str) -> int:
        """Return a number of the loaded VAE, which knows the defaults that an old config.json
        leaves out.
        """
        for name in names:
            value = self._vae.config.get(name) or getattr(self._vae, name, None)
            if value is not None:
                return int(value)
        raise ConfigError(
            f"`codec` ({self.folder}) must be a causal video VAE, but it has neither of "
            f"{', '.join(names)}; use another VAE."
        )

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the raw latents, ``[c, 1, 1, 1]``."""
        config = self._vae.config
        means, stds = config.get("latents_mean"), config.get("latents_std")
        if means is None or stds is None:
            means, stds = [config.get("shift_factor") or 0.0] * self.channels, [1.0] * self.channels
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=self.device).reshape(-1, 1, 1, 1)
            for values in (means, stds)
        )
        return mean, std / (config.get("scaling_factor") or 1.0)

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return causal_shape(self, num_frames, height, width)

    @torch.no_grad()
    def encode(self, pixels: Tensor, *, number: int = 0, piece: str = "clip") -> Tensor:
        wanted = (len(pixels), *self.latent_shape(*pixels.shape[2:]))
        posterior = self._vae.encode(pixels.to(self.device, self._vae.dtype)).latent_dist
        if tuple(posterior.mean.shape) != wanted:
            raise ConfigError(
                f"`codec` ({self.folder}) gives latents of shape {tuple(posterior.mean.shape)}, "
                f"but a causal VAE gives {wanted}; use another VAE."
            )
        # Drawn by number, so that neither the order nor the number of processes matters.
        draws = generator(self._seed, number, f"posterior {piece}")
        noise = torch.from_numpy(draws.standard_normal(wanted, dtype=np.float32))
        sample = posterior.mean.float() + posterior.std.float() * noise.to(self.device)
        latents: Tensor = (sample - self._mean) / self._std
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        check_channels(self, latents)
        decoded: Tensor = self._vae.decode(self.raw(latents)).sample
        return decoded.float()

    @property
    def vae(self) -> Any:
        """Return the VAE of diffusers."""
        return self._vae

    def raw(self, latents: Tensor) -> Tensor:
        """Return latents ``[b, c, t, h, w]`` as the VAE has them, in its type and on its device."""
        raw: Tensor = latents.to(self.device).float() * self._std + self._mean
        return raw.to(self._vae.dtype)


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
    name = settings["_class_name"]
    kind = getattr(diffusers, name, None) if str(name).startswith("Autoencoder") else None
    if kind is None:
        raise ConfigError(
            f"`codec` ({folder}) is of the class {name}, which is no VAE of the installed "
            "diffusers; give the folder of a VAE, or install a newer diffusers."
        )
    try:
        vae, info = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    # Broken weights give errors of safetensors, pickle and torch, which share no class.
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
