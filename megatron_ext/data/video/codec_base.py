"""What a codec is: between pixels and latents.

Pixels are ``[b, 3, f, H, W]`` float32 in [-1, 1]; latents ``[b, c, t, h, w]``. All codecs are
causal, ``t = (f - 1) / temporal + 1``: the first frame alone gives the first latent frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

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
        ConfigError: a size below 1, more channels than there are, a scale or shift of no use, or
            sizes of the patch codec given for a VAE.
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
        if self.codec_scale == 0 or not math.isfinite(self.codec_scale):
            raise ConfigError(
                f"`codec_scale` ({self.codec_scale}) must be finite and differ from 0; use 1 / "
                "standard deviation of the latents."
            )
        if not math.isfinite(self.codec_shift):
            raise ConfigError(
                f"`codec_shift` ({self.codec_shift}) must be finite; 0 is the middle of the range."
            )
        self._refuse_sizes_of_a_vae()

    def _refuse_sizes_of_a_vae(self) -> None:
        given = [
            f"`{f.name}` ({getattr(self, f.name)})"
            for f in fields(self)
            if f.name != "codec" and getattr(self, f.name) != f.default
        ]
        if given and self.codec != PATCH:
            raise ConfigError(
                f"{' and '.join(given)} must be left out with `codec` {self.codec}: a VAE's own "
                f"configuration decides; only `{PATCH}` takes sizes."
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

    def encode(self, pixels: Tensor, *, number: int = 0, piece: str = "clip") -> Tensor:
        """``[b, 3, f, H, W]`` -> ``[b, c, t, h, w]`` float32.

        Args:
            pixels: in [-1, 1].
            number, piece: of the clip and of the part of it; where latents are random, the seed
                of the codec and these two decide them, whatever was encoded before.
        """
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


def check_channels(codec: VideoCodec, latents: Tensor) -> None:
    """Raises DataError where latents ``[b, c, t, h, w]`` are of another codec."""
    if latents.size(1) != codec.channels:
        raise DataError(
            f"The latents have {latents.size(1)} channels, but the codec has {codec.channels}; "
            "decode with the codec that made them."
        )
