"""Flags of how clips are encoded for training: codec, text encoder, frame rate and crops."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_ext.config.flags import FINITE, NATURAL, SIZE, check_ranges, flag
from megatron_ext.errors import ConfigError

PATCH = "patch"
HASHED = "hashed"
T5_CLIP = "t5-clip"
UMT5 = "umt5"
FOLDERS = {HASHED: (), T5_CLIP: ("t5_path", "clip_path"), UMT5: ("t5_path",)}
"""Text encoders, and the options of the folders that each needs."""

HASHED_WIDTH = 64


@dataclass(frozen=True)
class CodecConfig:
    """The choice of a codec, and the sizes of the built-in patch codec.

    ConfigError is raised for a value out of range, for more channels than a patch has numbers, and
    for sizes of the patch codec that are given with a VAE.
    """

    codec: str = flag(PATCH, f"{PATCH}, or the folder of a diffusers video VAE")
    codec_spatial: int = flag(8, "pixels of a latent cell on each side (patch)", SIZE, "pixels")
    codec_temporal: int = flag(
        4, "frames of a latent frame after the first (patch)", SIZE, "frames"
    )
    codec_channels: int | None = flag(
        None,
        "latent channels, the lowest space-time frequencies; default: all, no loss (patch)",
        SIZE,
    )
    codec_shift: float = flag(0.0, "pixel value that becomes zero (patch)", FINITE)
    codec_scale: float = flag(
        1.0, "factor on the latents, best 1 / their deviation (patch)", FINITE
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        whole = 3 * self.codec_temporal * self.codec_spatial**2
        if self.codec_channels is not None and self.codec_channels > whole:
            raise ConfigError(
                f"`codec_channels` ({self.codec_channels}) must lie between 1 and 3 × temporal × "
                f"spatial² = {whole}; leave it out to keep everything."
            )
        if self.codec_scale == 0:
            raise ConfigError(
                f"`codec_scale` ({self.codec_scale}) must differ from 0; use 1 / standard "
                "deviation of the latents."
            )
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
    """The choice of a text encoder, its folders and its sizes.

    ConfigError is raised for an unknown name, a missing folder, a folder that the encoder does not
    use, a size below 1, and a width that is given although the encoder's models decide it.
    """

    text_encoder: str = flag(HASHED, "encoder of the captions", choices=tuple(FOLDERS))
    t5_path: str | None = flag(None, f"local folder of T5 ({T5_CLIP}) or UMT5 ({UMT5})")
    clip_path: str | None = flag(None, f"local folder of CLIP ({T5_CLIP})")
    text_length: int = flag(512, "rows of an encoded caption; longer ones are cut", SIZE, "tokens")
    text_width: int = flag(HASHED_WIDTH, f"width of the rows ({HASHED})", SIZE)
    pooled_width: int = flag(HASHED_WIDTH, f"width of the pooled vector ({HASHED})", SIZE)

    def __post_init__(self) -> None:
        if self.text_encoder not in FOLDERS:
            raise ConfigError(
                f"`text_encoder` ({self.text_encoder}) must be {HASHED}, {T5_CLIP} or {UMT5}; "
                "choose one."
            )
        check_ranges(self)
        for name in ("text_width", "pooled_width"):
            if self.text_encoder != HASHED and getattr(self, name) != HASHED_WIDTH:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be left out with `text_encoder` "
                    f"{self.text_encoder}: the models decide; only {HASHED} takes it."
                )
        for name in FOLDERS[T5_CLIP]:
            path, needed = getattr(self, name), name in FOLDERS[self.text_encoder]
            if not needed and path is not None:
                takes = " or ".join(kind for kind, names in FOLDERS.items() if name in names)
                raise ConfigError(
                    f"`{name}` ({path}) has an effect only with `text_encoder` {takes}; choose "
                    "it, or leave the path out."
                )
            if needed and path is None:
                raise ConfigError(
                    f"`{name}` (None) must be a local folder when `text_encoder` is "
                    f"{self.text_encoder}; nothing is loaded from a hub, so give the path."
                )


@dataclass(frozen=True)
class EncodeConfig:
    """Flags of how clips are cut into samples; a value out of range raises ConfigError."""

    fps_cap: int = flag(
        24,
        "highest frame rate; faster clips lose every other frame and so on",
        SIZE,
        "frames per second",
    )
    temporal_crop: str = flag(
        "random",
        "part that is taken of clips longer than their bucket",
        choices=("random", "start"),
    )
    reference_lengths: tuple[int, ...] = flag(
        (1,),
        "pieces at both ends that are encoded by themselves: 1 for i2v, 9 and 17 for v2v",
        SIZE,
        "latent frames",
        nargs="+",
    )
    clip_seed: int = flag(1234, "seed of buckets and crops", NATURAL)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference_lengths", tuple(self.reference_lengths))
        check_ranges(self)
        if self.temporal_crop not in ("random", "start"):
            raise ConfigError(
                f"`temporal_crop` ({self.temporal_crop}) must be random or start; choose one."
            )
        lengths = self.reference_lengths
        if len(set(lengths)) < len(lengths):
            raise ConfigError(
                f"`reference_lengths` ({list(lengths)}) must be different numbers of latent "
                "frames; 1 serves the i2v modes."
            )
