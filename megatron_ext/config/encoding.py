"""From clips to what a video model is trained on: codec, text encoder, and how clips are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_ext.config.flags import flag
from megatron_ext.errors import ConfigError

PATCH = "patch"
HASHED = "hashed"
T5_CLIP = "t5-clip"
UMT5 = "umt5"
ENCODERS = (HASHED, T5_CLIP, UMT5)
HASHED_WIDTH = 64


@dataclass(frozen=True)
class CodecConfig:
    """Which codec, and the sizes of the built-in one.

    Raises:
        ConfigError: a size below 1, more channels than there are, a scale or shift of no use, or
            sizes of the patch codec given for a VAE.
    """

    codec: str = flag(PATCH, f"{PATCH}, or the folder of a diffusers video VAE")
    codec_spatial: int = flag(8, "pixels of a latent cell on each side (patch)", unit="pixels")
    codec_temporal: int = flag(4, "frames of a latent frame after the first (patch)", unit="frames")
    codec_channels: int | None = flag(
        None, "latent channels, the lowest space-time frequencies; default: all, no loss (patch)"
    )
    codec_shift: float = flag(0.0, "pixel value that becomes zero (patch)")
    codec_scale: float = flag(1.0, "factor on the latents, best 1 / their deviation (patch)")

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


@dataclass(frozen=True)
class TextEncoderConfig:
    """Which text encoder, and its sizes.

    Raises:
        ConfigError: an unknown name, folders that do not go with it, a size below 1, or sizes of
            hashed words given for models.
    """

    text_encoder: str = flag(HASHED, f"how captions are encoded; {UMT5} is Wan's", choices=ENCODERS)
    t5_path: str | None = flag(None, f"local folder of T5 ({T5_CLIP}) or umT5 ({UMT5})")
    clip_path: str | None = flag(None, f"local folder of CLIP ({T5_CLIP})")
    text_length: int = flag(512, "rows of an encoded caption; longer ones are cut", unit="tokens")
    text_width: int = flag(HASHED_WIDTH, f"width of the rows ({HASHED})")
    pooled_width: int = flag(HASHED_WIDTH, f"width of the pooled vector ({HASHED})")

    def __post_init__(self) -> None:
        if self.text_encoder not in ENCODERS:
            raise ConfigError(
                f"`text_encoder` ({self.text_encoder}) must be {HASHED}, {T5_CLIP} or {UMT5}; "
                "choose one."
            )
        for name in ("text_length", "text_width", "pooled_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` ({getattr(self, name)}) must be at least 1; raise it.")
        for name in ("text_width", "pooled_width"):
            if self.text_encoder != HASHED and getattr(self, name) != HASHED_WIDTH:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be left out with `text_encoder` "
                    f"{self.text_encoder}: the models decide; only {HASHED} takes it."
                )
        for name, encoders in (("t5_path", (T5_CLIP, UMT5)), ("clip_path", (T5_CLIP,))):
            path = getattr(self, name)
            if self.text_encoder not in encoders and path is not None:
                raise ConfigError(
                    f"`{name}` ({path}) has an effect only with `text_encoder` "
                    f"{' or '.join(encoders)}; choose it, or leave the path out."
                )
            if self.text_encoder in encoders and path is None:
                raise ConfigError(
                    f"`{name}` (None) must be a local folder when `text_encoder` is "
                    f"{self.text_encoder}; nothing is loaded from a hub, so give the path."
                )


@dataclass(frozen=True)
class EncodeConfig:
    """How clips become samples.

    Raises:
        ConfigError: a value out of range.
    """

    fps_cap: int = flag(
        24, "faster clips lose every other frame and so on", unit="frames per second"
    )
    temporal_crop: str = flag(
        "random", "which part of clips longer than their bucket", choices=("random", "start")
    )
    reference_lengths: tuple[int, ...] = flag(
        (1,),
        "pieces at both ends that are encoded by themselves: 1 for i2v, 9 and 17 for v2v",
        nargs="+",
        unit="latent frames",
    )
    clip_seed: int = flag(1234, "of buckets and crops")

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference_lengths", tuple(self.reference_lengths))
        if self.fps_cap < 1:
            raise ConfigError(f"`fps_cap` ({self.fps_cap}) must be at least 1; the usual is 24.")
        if self.temporal_crop not in ("random", "start"):
            raise ConfigError(
                f"`temporal_crop` ({self.temporal_crop}) must be random or start; choose one."
            )
        if self.clip_seed < 0:
            raise ConfigError(f"`clip_seed` ({self.clip_seed}) must be at least 0; raise it.")
        lengths = self.reference_lengths
        if any(length < 1 for length in lengths) or len(set(lengths)) < len(lengths):
            raise ConfigError(
                f"`reference_lengths` ({list(lengths)}) must be different numbers of latent frames "
                "of at least 1; 1 serves the i2v modes."
            )
