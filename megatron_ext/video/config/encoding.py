"""Flags that say how clips are encoded for training: codec, text encoder, frame rate and crops."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_ext.config.flags import FINITE, NATURAL, SIZE, Range, check_ranges, flag
from megatron_ext.errors import ConfigError, DataError

PATCH = "patch"
HASHED = "hashed"
T5_CLIP = "t5-clip"
UMT5 = "umt5"
LLAMA_CLIP = "llama-clip"
FOLDERS = {
    HASHED: (),
    T5_CLIP: ("t5_path", "clip_path"),
    UMT5: ("t5_path",),
    LLAMA_CLIP: ("llama_path", "clip_path"),
}
"""The fields that name folders of pretrained models, by the text encoder that needs them."""

HASHED_WIDTH = 64


def spelled(field: str) -> str:
    """Return the flag of a field that says how clips are encoded, such as ``--t5-path``."""
    return f"--{field.replace('_', '-')}"


TILE_FLAGS = ("codec_tile", "codec_tile_frames")
"""The fields of `CodecConfig` that say how a VAE computes, not what its latents are."""


@dataclass(frozen=True)
class CodecConfig:
    """The flags that choose a codec: a VAE and its tiles, or the patch codec and its sizes.

    ConfigError is raised for a value out of range, for more latent channels than a patch has
    values, and for flags of the one codec that are given with the other.
    """

    codec: str = flag(PATCH, f"{PATCH}, or the folder of a VAE of diffusers")
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
    codec_tile: int | None = flag(
        None,
        "side of the square tiles in which a VAE computes large frames, which saves memory; "
        "neighbours overlap by a quarter; default: whole frames",
        SIZE,
        "pixels",
    )
    codec_tile_frames: int | None = flag(
        None,
        "frames of the parts in which a VAE computes long clips, which saves memory; neighbours "
        "overlap by a quarter; default: as the VAE does it by itself",
        SIZE,
        "frames",
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
                f"`--codec-scale` ({self.codec_scale}) must differ from 0; use 1 / standard "
                "deviation of the latents."
            )
        given = {
            f.name: f"`{spelled(f.name)}` ({getattr(self, f.name)})"
            for f in fields(self)
            if f.name != "codec" and getattr(self, f.name) != f.default
        }
        sizes = [text for name, text in given.items() if name not in TILE_FLAGS]
        if sizes and self.codec != PATCH:
            raise ConfigError(
                f"{' and '.join(sizes)} must be left out with `--codec {self.codec}`: a VAE's own "
                f"configuration decides; only `{PATCH}` takes sizes."
            )
        if self.codec == PATCH and len(given) > len(sizes):
            named = " and ".join(text for name, text in given.items() if name in TILE_FLAGS)
            raise ConfigError(
                f"{named} must be left out with `--codec {PATCH}`, which computes every patch by "
                "itself; only a VAE needs tiles."
            )


@dataclass(frozen=True)
class TextEncoderConfig:
    """The flags that choose a text encoder, its folders and its sizes.

    ConfigError is raised for an unknown name, a missing folder, a folder that the encoder does not
    use, a size below 1, and a width that is given although the encoder's models decide it.
    """

    text_encoder: str = flag(HASHED, "encoder of the captions", choices=tuple(FOLDERS))
    t5_path: str | None = flag(None, f"local folder of T5 ({T5_CLIP}) or UMT5 ({UMT5})")
    clip_path: str | None = flag(None, f"local folder of CLIP ({T5_CLIP} and {LLAMA_CLIP})")
    text_length: int = flag(512, "rows of an encoded caption; longer ones are cut", SIZE, "tokens")
    text_width: int = flag(HASHED_WIDTH, f"width of the rows ({HASHED})", SIZE)
    pooled_width: int = flag(HASHED_WIDTH, f"width of the pooled vector ({HASHED})", SIZE)
    llama_path: str | None = flag(None, f"local folder of Llama ({LLAMA_CLIP})")

    def __post_init__(self) -> None:
        if self.text_encoder not in FOLDERS:
            raise ConfigError(
                f"`--text-encoder` ({self.text_encoder}) must be {', '.join([*FOLDERS][:-1])} or "
                f"{LLAMA_CLIP}; choose one."
            )
        check_ranges(self)
        for name in ("text_width", "pooled_width"):
            if self.text_encoder != HASHED and getattr(self, name) != HASHED_WIDTH:
                raise ConfigError(
                    f"`{spelled(name)}` ({getattr(self, name)}) must be left out with "
                    f"`--text-encoder {self.text_encoder}`: the models decide; only {HASHED} takes "
                    "it."
                )
        for name in dict.fromkeys(name for names in FOLDERS.values() for name in names):
            path = getattr(self, name)
            needed = name in FOLDERS[self.text_encoder]
            if not needed and path is not None:
                takes = " or ".join(kind for kind, names in FOLDERS.items() if name in names)
                raise ConfigError(
                    f"`{spelled(name)}` ({path}) has an effect only with `--text-encoder` {takes}; "
                    "choose it, or leave the path out."
                )
            if needed and path is None:
                raise ConfigError(
                    f"`{spelled(name)}` is missing, which `--text-encoder {self.text_encoder}` "
                    "needs: a local folder, since nothing is loaded from a hub; give the path."
                )


@dataclass(frozen=True)
class ImageEncoderConfig:
    """The flag that gives the folder of the image encoder, which some networks need."""

    image_encoder: str | None = flag(
        None,
        "local folder of CLIP's vision model, for networks that are given an embedding of the "
        "first frame, such as Wan 2.1's image-to-video; default: none",
    )


MASKED = ("head", "tail", "loop", "middle", "none")
"""The values of --masked-references."""

WINDOWS = ("first", "uniform", "all", "scenes")
UNIFORM_WINDOWS = 4
"""The default of --video-window-count (most windows of a clip) with --video-windows uniform."""
SCENE_THRESHOLD = 0.3
"""The default of --video-scene-threshold: a greater change between frames begins a new scene.

FFmpeg scores the change from 0 (none) to 1."""

WHITE = "white"
_COLOURS = {WHITE: (255, 255, 255), "black": (0, 0, 0), "grey": (128, 128, 128)}
_HEX = re.compile(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})")


def colour_of(text: str) -> tuple[int, int, int]:
    """Return (red, green, blue) of a colour: ``white``, ``black``, ``grey`` or ``#RRGGBB``.

    Another text raises ConfigError.
    """
    if text in _COLOURS:
        return _COLOURS[text]
    match = _HEX.fullmatch(text)
    if match is None:
        raise ConfigError.about(
            "--video-background",
            text,
            f"must be {', '.join(_COLOURS)} or a colour such as #8090a0",
            "correct it",
        )
    red, green, blue = (int(part, 16) for part in match.groups())
    return red, green, blue


@dataclass(frozen=True)
class EncodeConfig:
    """The flags that say how samples are cut from clips: frame rate, windows, reference lengths.

    A value out of range raises ConfigError.
    """

    fps_cap: int = flag(
        24,
        "highest frame rate; faster clips lose every other frame and so on",
        SIZE,
        "frames per second",
    )
    video_fps: float | None = flag(
        None,
        "exact frame rate of all clips, whatever theirs: the frames nearest in time; default: "
        "whole strides below --fps-cap",
        Range(0, 1000, above=True),
        "frames per second",
        advice="use the rate of the model, such as 16 or 24",
    )
    video_blend: bool = flag(
        False, "with --video-fps, mix the two frames around a time instead of the nearer one"
    )
    video_background: str = flag(
        WHITE, "colour under transparent pictures and clips: white, black, grey or #RRGGBB"
    )
    fps_words: bool = flag(
        True, "end captions with the frame rate, such as '24 FPS.'; Wan's own captions have none"
    )
    temporal_crop: str = flag(
        "random",
        "part that is taken of clips longer than their bucket",
        choices=("random", "start"),
    )
    video_windows: str | None = flag(
        None,
        "samples of a long clip: the first window, some that lie evenly in it, all, or one at the "
        "beginning of each scene; default: one sample, by --temporal-crop",
        choices=WINDOWS,
    )
    video_window_frames: int | None = flag(
        None,
        "longest window, at the frame rate of samples; default: the longest bucket that fits",
        SIZE,
        "frames",
    )
    video_window_stride: int | None = flag(
        None,
        "from the beginning of a window to that of the next one, with --video-windows all; "
        "default: its length",
        SIZE,
        "frames",
    )
    video_window_count: int | None = flag(
        None,
        "most windows of a clip; default: 4 with --video-windows uniform, else no limit",
        SIZE,
        "windows",
    )
    video_scene_threshold: float | None = flag(
        None,
        "change between two frames from which on a scene begins, as FFmpeg scores it, with "
        "--video-windows scenes; default: 0.3",
        Range(0, 1),
    )
    reference_lengths: tuple[int, ...] = flag(
        (1,),
        "pieces at both ends that are encoded by themselves: 1 for i2v, 9 and 17 for v2v",
        SIZE,
        "latent frames",
        nargs="+",
    )
    middle_reference: bool = flag(
        False, "also encode the frame in the middle of a clip by itself: for i2v_middle"
    )
    masked_references: tuple[str, ...] | None = flag(
        None,
        "frames for which a copy of the clip is encoded whose other pixels are zero, as networks "
        "take them that are given frames by channels, such as Wan's image-to-video: head and tail "
        "of --reference-lengths, loop (both ends), middle, or none (t2v); default: no copies",
        choices=MASKED,
        nargs="+",
    )
    clip_seed: int = flag(1234, "seed of buckets and crops", NATURAL)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference_lengths", tuple(self.reference_lengths))
        masked = tuple(self.masked_references or ())
        object.__setattr__(self, "masked_references", masked or None)
        check_ranges(self)
        if self.temporal_crop not in ("random", "start"):
            raise ConfigError(
                f"`temporal_crop` ({self.temporal_crop}) must be random or start; choose one."
            )
        colour_of(self.video_background)
        self._check_windows()
        default_cap = next(field.default for field in fields(self) if field.name == "fps_cap")
        if self.video_fps is not None and self.fps_cap != default_cap:
            raise ConfigError.about(
                "--fps-cap",
                self.fps_cap,
                f"has no effect with `--video-fps` ({self.video_fps:g}), which gives the rate "
                "of all clips",
                "leave one of them out",
            )
        if self.video_blend and self.video_fps is None:
            raise ConfigError.about(
                "--video-blend",
                None,
                "needs `--video-fps`, without which whole strides take frames as they are",
                "give the rate, or leave it out",
            )
        if unknown := [word for word in masked if word not in MASKED]:
            raise ConfigError.about(
                "--masked-references",
                unknown[0],
                f"must be {', '.join(MASKED[:-1])} or {MASKED[-1]}",
                "correct it",
            )
        if len(set(masked)) < len(masked):
            raise ConfigError.about(
                "--masked-references",
                " ".join(masked),
                "names frames twice",
                "name them once",
            )
        lengths = self.reference_lengths
        if len(set(lengths)) < len(lengths):
            raise ConfigError(
                f"`reference_lengths` ({list(lengths)}) must be different numbers of latent "
                "frames; 1 serves the i2v modes."
            )

    def _check_windows(self) -> None:
        """Raise ConfigError for an unknown ``--video-windows``, or for a flag without effect.

        A flag such as ``--video-window-stride`` has an effect only with certain values of
        ``--video-windows``, and ``--temporal-crop`` only without ``--video-windows``.
        """
        windows = self.video_windows
        if windows not in (None, *WINDOWS):
            raise ConfigError.about(
                "--video-windows",
                windows,
                f"must be {', '.join(WINDOWS[:-1])} or {WINDOWS[-1]}",
                "choose one",
            )
        rules = {
            "video_window_frames": WINDOWS,
            "video_window_stride": ("all",),
            "video_window_count": ("uniform", "all", "scenes"),
            "video_scene_threshold": ("scenes",),
        }
        for name, needed in rules.items():
            if getattr(self, name) is not None and windows not in needed:
                raise ConfigError.about(
                    f"--{name.replace('_', '-')}",
                    getattr(self, name),
                    f"needs `--video-windows` {' or '.join(needed)}",
                    "give it, or leave it out",
                )
        default = next(field.default for field in fields(self) if field.name == "temporal_crop")
        if windows is not None and self.temporal_crop != default:
            raise ConfigError.about(
                "--temporal-crop",
                self.temporal_crop,
                f"has no effect with `--video-windows` ({windows}), which says where windows lie",
                "leave one of them out",
            )


def encode_of(manifest: Mapping[str, Any]) -> EncodeConfig:
    """Return the flags with which a dataset was encoded, as its manifest records them.

    A flag that the manifest lacks gets its default. A value that cannot be used raises DataError.
    """
    stored = manifest.get("encode", {})
    names = {field.name for field in fields(EncodeConfig)}
    try:
        return EncodeConfig(**{name: value for name, value in stored.items() if name in names})
    except (AttributeError, TypeError, ConfigError) as error:
        raise DataError(
            f"The manifest's `encode` ({stored}) must hold the flags of tools/preprocess_video.py "
            f"({error}); make the data again with it."
        ) from None
