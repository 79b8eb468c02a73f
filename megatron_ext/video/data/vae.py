"""The VAEs of diffusers as codecs, for videos and for pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.disk.reading import UnreadableFile, read_json_object, shortened
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import PATCH, CodecConfig
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.model_folders import advice_for, loaded, public, variant_of
from megatron_ext.video.data.randomness import generator
from megatron_ext.video.data.tiles import TileFunction, frames_in_tiles, in_tiles

_OF_PICTURES = ("AutoencoderKL", "AutoencoderDC")
"""The classes that encode pictures. Their scaling factor differs from model to model, so that the
default of the class, which is that of Stable Diffusion, is no use."""
WAN = "AutoencoderKLWan"


class DiffusersCodec(VideoCodec):
    """A VAE of diffusers (AutoencoderKLWan, AutoencoderKL, AutoencoderDC, ...) from a folder.

    The latents are a posterior sample z, normalized as in diffusers' pipelines. If the VAE has a
    mean and a std, the latents are ``scaling_factor * (z - mean) / std`` for each channel,
    otherwise ``scaling_factor * (z - shift_factor)``. A VAE without a posterior gives z itself.

    Args:
        config: flags that give the folder of ``config.json`` and the weights, and the tiles.
            Nothing is downloaded.
        seed: seed of the posterior samples.

    Raises:
        ConfigError: the folder holds no VAE that can be used, its tiles do not fit it, or diffusers
            is missing.
    """

    def __init__(self, config: CodecConfig, device: torch.device, seed: int = 0) -> None:
        folder = config.codec
        settings = read_config(folder)
        self._kind = settings["_class_name"]
        self.identity = {"codec": self._kind, "config": public(settings)}
        self.vae = _load_vae(folder, self._kind).to(device).eval()
        self.vae.requires_grad_(False)
        self.folder = folder
        self.device = device
        self._seed = seed
        self.images_only = self._kind in _OF_PICTURES
        self.channels = self._number("latent_channels", "z_dim")
        if self.images_only:
            self.temporal = 1
            blocks = self.vae.config.get("block_out_channels") or ()
            self.spatial = int(
                getattr(self.vae, "spatial_compression_ratio", 2 ** (len(blocks) - 1))
            )
        else:
            self.spatial = self._number("spatial_compression_ratio", "scale_factor_spatial")
            self.temporal = self._number("temporal_compression_ratio", "scale_factor_temporal")
        self._mean, self._std = self._statistics()
        self._tile = self._checked_tile(config.codec_tile)
        self._tile_frames = self._checked_tile_frames(config.codec_tile_frames)
        if self._tile_frames is not None and hasattr(self.vae, "use_framewise_encoding"):
            # HunyuanVideo's VAE would divide the parts again, into parts of its own.
            self.vae.use_framewise_encoding = False
            self.vae.use_framewise_decoding = False

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
            f"`--codec` ({self.folder}) must be a causal video VAE, {' or '.join(_OF_PICTURES)}, "
            f"but is an {self._kind} with neither of {', '.join(names)}; use another VAE."
        )

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return the mean and deviation that normalize raw latents, ``[c, 1, 1, 1]`` each.

        Normalized latents are ``(raw - mean) / deviation``. The deviation is the standard deviation
        divided by the VAE's scaling factor.
        """
        config = self.vae.config
        names = ("latents_mean", "latents_std")
        # The VAE of LTX keeps them among its weights.
        given = [config[x] if x in config else getattr(self.vae, x, None) for x in names]
        if any(values is None for values in given):
            given = [[config.get("shift_factor") or 0.0] * self.channels, [1.0] * self.channels]
        mean, std = map(self._by_channel, names, given)
        if not (std > 0).all():
            raise ConfigError(
                f"`--codec` ({self.folder}) has `latents_std` {std.flatten().tolist()}, which must "
                "be above 0; correct its config.json."
            )
        return mean, std / (config.get("scaling_factor") or 1.0)

    def _by_channel(self, name: str, values: Any) -> Tensor:
        """Return numbers of the VAE's configuration, ``[c, 1, 1, 1]``; raise ConfigError if wrong.

        ``name`` is their entry.
        """
        numbers = values.tolist() if isinstance(values, Tensor) else values
        if (
            not isinstance(numbers, list | tuple)
            or len(numbers) != self.channels
            or not all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
        ):
            raise ConfigError(
                f"`--codec` ({self.folder}) has `{name}` {shortened(numbers)}, which must be a "
                f"number for each of its {self.channels} latent channels; correct its config.json."
            )
        column = torch.tensor(numbers, dtype=torch.float32, device=self.device)
        return column.reshape(-1, 1, 1, 1)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            **super().facts,
            "mean": self._mean.flatten().tolist(),
            "std": self._std.flatten().tolist(),
        }

    def _checked_tile(self, tile: int | None) -> int | None:
        if tile is not None and (tile % self.spatial or tile < 2 * self.spatial):
            raise ConfigError.about(
                "--codec-tile",
                tile,
                f"must be a multiple of the VAE's spatial factor ({self.spatial}), and at least "
                f"{2 * self.spatial}",
                f"use {max(2, round(tile / self.spatial)) * self.spatial}",
            )
        return tile

    def _checked_tile_frames(self, frames: int | None) -> int | None:
        """Return the latent frames of a part in time; raise ConfigError if the VAE takes none."""
        if frames is None:
            return None
        if self.images_only or self._kind == WAN:
            why = "encodes pictures only" if self.images_only else "computes frame after frame"
            raise ConfigError.about(
                "--codec-tile-frames",
                frames,
                f"has no effect, since the VAE ({self._kind}) {why}",
                "leave it out",
            )
        latents = (frames - 1) // self.temporal + 1
        if (frames - 1) % self.temporal or latents < 2:
            raise ConfigError.about(
                "--codec-tile-frames",
                frames,
                f"must be a multiple of the VAE's temporal factor plus 1 ({self.temporal}k + 1), "
                f"and at least {self.temporal + 1}",
                f"use {max(1, latents - 1) * self.temporal + 1}",
            )
        return latents

    @contextmanager
    def untiled(self) -> Iterator[None]:
        """Compute without tiles within a ``with`` block."""
        kept = self._tile, self._tile_frames
        self._tile = None
        self._tile_frames = None
        try:
            yield
        finally:
            self._tile, self._tile_frames = kept

    @property
    def largest_whole(self) -> tuple[int, int, int] | None:
        """Return the frames, height and width up to which clips are computed as a whole.

        Return None if all are, because no tiles are asked for.
        """
        if self._tile is None and self._tile_frames is None:
            return None
        side = self._tile or 1 << 30
        frames = 1 << 30 if self._tile_frames is None else (self._tile_frames - 1) * self.temporal
        return frames + 1, side, side

    def over_tiles(self, compute: TileFunction, tensor: Tensor, *, decodes: bool) -> Tensor:
        """Return ``compute`` of pixels or latents ``[..., h, w]``, on the tiles of frames."""
        if self._tile is None:
            return compute(tensor, 0)
        cells = self._tile // self.spatial
        overlap = max(1, cells // 4)
        unit = 1 if decodes else self.spatial
        ratio = Fraction(self.spatial) if decodes else Fraction(1, self.spatial)
        return in_tiles(compute, tensor, tile=cells * unit, overlap=overlap * unit, ratio=ratio)

    def _over_all_tiles(
        self, compute: Callable[[Tensor], Tensor], tensor: Tensor, *, decodes: bool
    ) -> Tensor:
        """Return ``compute`` of a tensor ``[b, c, f, h, w]``, on tiles and on parts in time."""
        spread = partial(self.over_tiles, lambda part, _: compute(part), decodes=decodes)
        if self._tile_frames is None:
            return spread(tensor)
        return frames_in_tiles(
            spread,
            tensor,
            tile=self._tile_frames,
            overlap=max(1, self._tile_frames // 4),
            temporal=self.temporal,
            decodes=decodes,
        )

    def _posterior(self, pixels: Tensor) -> Tensor:
        """Return mean and deviation of the raw latents, ``[b, 2c, t, h, w]``.

        The deviation is zero if the VAE is deterministic.
        """
        given = pixels.to(self.device, self.vae.dtype)
        encoded = self.vae.encode(given[:, :, 0] if self.images_only else given)
        if hasattr(encoded, "latent_dist"):
            posterior = encoded.latent_dist
            moments = torch.cat([posterior.mean, posterior.std.expand_as(posterior.mean)], dim=1)
        else:
            moments = torch.cat([encoded.latent, torch.zeros_like(encoded.latent)], dim=1)
        return (moments[:, :, None] if self.images_only else moments).float()

    @torch.no_grad()
    def encode(
        self, pixels: Tensor, *, number: int = 0, piece: str = "clip", mean: bool = False
    ) -> Tensor:
        shape = (len(pixels), *self.latent_shape(*pixels.shape[2:]))
        middle, deviation = self._over_all_tiles(self._posterior, pixels, decodes=False).chunk(2, 1)
        if tuple(middle.shape) != shape:
            raise ConfigError(
                f"`--codec` ({self.folder}) gives latents of shape {tuple(middle.shape)}, "
                f"but a causal VAE gives {shape}; use another VAE."
            )
        if mean:
            return (middle - self._mean) / self._std
        # Noise depends on the number of the clip, not on the order or the number of processes.
        draws = generator(self._seed, number, f"posterior {piece}")
        noise = torch.from_numpy(draws.standard_normal(shape, dtype=np.float32))
        sample: Tensor = middle + deviation * noise.to(self.device)
        return (sample - self._mean) / self._std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        self.check_channels(latents)
        return self._over_all_tiles(self._decoded, self.raw(latents), decodes=True)

    def _decoded(self, raw: Tensor) -> Tensor:
        decoded: Tensor = self.vae.decode(raw[:, :, 0] if self.images_only else raw).sample
        return (decoded[:, :, None] if self.images_only else decoded).float()

    def raw(self, latents: Tensor) -> Tensor:
        """Undo the normalization of latents ``[b, c, t, h, w]``.

        The result is on the VAE's device and has the VAE's dtype.
        """
        raw: Tensor = latents.to(self.device).float() * self._std + self._mean
        return raw.to(self.vae.dtype)


def needs_tiles(codec: VideoCodec, bucket: Bucket) -> bool:
    """Return whether the codec encodes clips of a bucket in several tiles."""
    if not isinstance(codec, DiffusersCodec) or codec.largest_whole is None:
        return False
    frames, height, width = codec.largest_whole
    return bucket.num_frames > frames or bucket.height > height or bucket.width > width


def seam_report(codec: VideoCodec, pixels: Tensor) -> str:
    """Return a line that says how far the codec's tiles change the latents of a large clip.

    A part of ``pixels`` ``[1, 3, f, H, W]``, two tiles beside or below each other, is encoded with
    tiles and as a whole.
    """
    assert isinstance(codec, DiffusersCodec) and codec.largest_whole is not None
    frames, height, width = codec.largest_whole
    if pixels.size(-1) > width:
        width *= 2
    else:
        height *= 2
    part = pixels[:, :, : 2 * frames - 1, :height, :width]
    tiled = codec.encode(part, mean=True)
    try:
        with codec.untiled():
            whole = codec.encode(part, mean=True)
    except torch.OutOfMemoryError:
        return "How far tiles change latents is not measured: two tiles together exceed the memory."
    difference = (tiled - whole).abs() / whole.std()
    return (
        f"Tiles change latents by {difference.mean():.2%} of their deviation on average, by "
        f"{difference.max():.1%} at most, measured on {' x '.join(map(str, part.shape[2:]))} "
        "(frames, height, width) of the first clip that needs them."
    )


def read_config(folder: str) -> dict[str, Any]:
    """Return the content of the config.json in the folder of a VAE.

    ConfigError is raised if the file is missing, cannot be read, does not name the VAE's class, or
    lacks a number that decides what the latents are.
    """
    path = Path(folder) / "config.json"
    advice = advice_for(folder) or "correct the path"
    try:
        settings = read_json_object(path, not_finite=True)
        reason = None if isinstance(settings.get("_class_name"), str) else "it names no class"
    except UnreadableFile as error:
        reason = error.reason
    if Path(folder).is_file():
        reason = "a single file has no settings"
        advice = "let diffusers' `from_single_file` read it, and save it as a folder"
        if (Path(folder).parent / "config.json").is_file():
            advice = f"give the folder, {Path(folder).parent}"
    if reason is not None:
        raise ConfigError(
            f"`--codec` ({folder}) must be `{PATCH}` or a local folder with a diffusers VAE, but "
            f"{path} cannot be used ({reason}); {advice}."
        )
    name = settings["_class_name"]
    if name in _OF_PICTURES and not _is_number(settings.get("scaling_factor")):
        raise ConfigError(
            f"`--codec` ({folder}) is an {name} whose config.json has the `scaling_factor` "
            f"{settings.get('scaling_factor')!r}, which must be a number other than 0; write that "
            "of the model into it."
        )
    return settings


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value != 0


def _load_vae(folder: str, name: str) -> Any:
    try:
        import diffusers
    except ImportError:
        raise ConfigError(
            f"`--codec` ({folder}) needs the package diffusers, which is not installed; run `pip "
            f"install diffusers`, or use `{PATCH}`."
        ) from None
    kind = getattr(diffusers, name, None) if str(name).startswith("Autoencoder") else None
    if kind is None:
        raise ConfigError(
            f"`--codec` ({folder}) is of the class {name}, which is no VAE of the installed "
            "diffusers; give the folder of a VAE, or install a newer diffusers."
        )
    variant = variant_of(folder, ("diffusion_pytorch_model",))
    load = partial(
        kind.from_pretrained,
        folder,
        local_files_only=True,
        output_loading_info=True,
        variant=variant,
    )
    vae = loaded("--codec", folder, load, f"holds an {name} whose weights cannot be loaded")
    if vae.config.get("timestep_conditioning"):
        raise ConfigError(
            f"`--codec` ({folder}) is an {name} that decodes by a timestep, which is not "
            "supported; use one without `timestep_conditioning`."
        )
    return vae
