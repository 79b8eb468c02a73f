"""What a codec is: between pixels and latents.

Pixels are ``[b, 3, f, H, W]`` float32 in [-1, 1]; latents ``[b, c, t, h, w]``. All codecs are
causal, ``t = (f - 1) / temporal + 1``: the first frame alone gives the first latent frame.

What decides latents and embeddings, as manifests keep it, and whether two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from megatron_ext.errors import ConfigError, DataError


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


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the model, without the versions and paths of who saved it."""
    incidental = ("transformers_version", "torch_dtype", "dtype")
    return {k: v for k, v in settings.items() if k[:1] != "_" and k not in incidental}


def compared(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The first difference of two identities in words, empty where they agree."""
    for name in sorted({*wanted, *found}):
        before, now = wanted.get(name), found.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            return compared(before, now)
        return f"`{name}` was {before!r}, but is {now!r}"
    return ""
