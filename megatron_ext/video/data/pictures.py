"""Reads still and animated pictures as viewers show them: upright, and over a background."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np

from megatron_ext.video.data.members import ClipFile, readable

Image: Any
ImageCms: Any
ImageOps: Any
features: Any
try:
    from PIL import Image, ImageCms, ImageOps, features
except ImportError:
    Image = ImageCms = ImageOps = features = None

Picture = np.ndarray[Any, Any]
Colour = tuple[int, int, int]

IMAGE_SUFFIXES = frozenset(
    (".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff")
)
_VIDEO_SUFFIXES = (".mjpeg", ".mjpg")
"""Suffixes of videos that are plain sequences of JPEG pictures.

Such a file begins with the bytes of a picture, so only its suffix tells that it is a video."""
_ANIMATED = ("PNG", "WEBP", "AVIF")
"""Formats whose files are animations if they hold several pictures.

A JPEG or TIFF with several pictures is none: it holds several sizes of a picture, or pages."""
_TURNED = (5, 6, 7, 8)
"""The EXIF orientations that swap height and width."""
_ORIENTATION = 0x0112
_WITH_ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")
_NO_DURATION = 0.1
"""The seconds for which viewers show a frame that has no duration."""


def is_picture(path: ClipFile) -> bool:
    """Tell whether a file is read by Pillow rather than FFmpeg.

    Besides the suffix, the first bytes are looked at, since pictures from the web often have a
    wrong suffix. A GIF is read by FFmpeg.
    """
    file = readable(path)
    with file if isinstance(file, io.RawIOBase) else open(file, "rb") as stream:
        head = stream.read(16)
    if head.startswith((b"\xff\xd8\xff", b"\x89PNG")) or (head[:4], head[8:12]) == (
        b"RIFF",
        b"WEBP",
    ):
        return path.suffix.lower() not in _VIDEO_SUFFIXES
    if head[4:12] in (b"ftypavif", b"ftypavis"):
        return bool(features.check("avif"))
    of_video = head.startswith((b"GIF8", b"\x1a\x45\xdf\xa3", b"RIFF")) or head[4:8] == b"ftyp"
    return path.suffix.lower() in IMAGE_SUFFIXES and not of_video


def picture_size(path: ClipFile) -> tuple[int, int]:
    """Return (height, width) of the upright picture, without decoding it unless it is a TIFF."""
    with Image.open(readable(path)) as image:
        if image.format == "TIFF":
            # Some versions of Pillow rotate a TIFF when they open it, others when they load it.
            upright = ImageOps.exif_transpose(image)
            return upright.height, upright.width
        # Call the base class: the method of PNG images would decode the pixels, to look for EXIF
        # data behind them.
        if Image.Image.getexif(image).get(_ORIENTATION) in _TURNED:
            return image.width, image.height
        return image.height, image.width


def read_picture(path: ClipFile, background: Colour) -> Picture:
    """Return a picture, or the first frame of an animated one, ``[H, W, 3]`` uint8.

    ``background`` shows where the picture is transparent.
    """
    with Image.open(readable(path)) as image:
        return _as_rgb(image, background)


def is_animated(path: ClipFile) -> bool:
    """Tell whether a picture file is animated, such as a PNG or WebP with several frames."""
    with Image.open(readable(path)) as image:
        return len(_numbers(image)) > 1


def durations(path: ClipFile) -> list[float]:
    """Return the durations of the frames of an animated picture, in seconds."""
    seconds = []
    with Image.open(readable(path)) as image:
        for number in _numbers(image):
            image.seek(number)
            # The duration of a WebP frame is known only after decoding it.
            image.load()
            seconds.append(float(image.info.get("duration") or 0) / 1000 or _NO_DURATION)
    return seconds


def read_animation(path: ClipFile, last: int, background: Colour) -> list[Picture]:
    """Return the frames 0 to ``last`` of an animated picture, each ``[H, W, 3]`` uint8.

    ``background`` shows where the frames are transparent.
    """
    with Image.open(readable(path)) as image:
        frames = []
        for number in _numbers(image)[: last + 1]:
            image.seek(number)
            frames.append(_as_rgb(image, background))
        return frames


def _numbers(image: Any) -> range:
    """Return the indices in the file of the frames of an animation; of a still picture, only 0.

    An animated PNG may begin with a picture that is not part of the animation; it is left out.
    """
    count = getattr(image, "n_frames", 1) if image.format in _ANIMATED else 1
    return range(1 if count > 1 and image.info.get("default_image") else 0, count)


def composited(pixels: Picture, background: Colour) -> Picture:
    """Put pixels with alpha, ``[H, W, 4]`` uint8, over a background; return ``[H, W, 3]`` uint8."""
    alpha = pixels[..., 3:].astype(np.uint32)
    below = np.asarray(background, np.uint32)
    mixed = (pixels[..., :3] * alpha + below * (255 - alpha) + 127) // 255
    return mixed.astype(np.uint8)


def _as_rgb(image: Any, background: Colour) -> Picture:
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "F" or (upright.mode == "I" and image.format == "TIFF"):
        numbers = "floating-point numbers" if upright.mode == "F" else "whole numbers of 32 bits"
        raise ValueError(
            f"its pixels are {numbers}, which do not say what is white; save it with 8 or 16 bits"
        )
    if upright.mode.startswith("I"):
        # Scale grey values of 16 bits, since `convert` would clip them at 255.
        grey = np.asarray(upright).astype(np.float64)
        eight = np.clip(np.rint(grey / 257), 0, 255).astype(np.uint8)
        pixels = np.repeat(eight[..., None], 3, axis=-1)
        if "transparency" not in upright.info:
            return pixels
        opaque = np.where(grey == upright.info["transparency"], 0, 255).astype(np.uint8)
        return composited(np.dstack([pixels, opaque]), background)
    if upright.mode in _WITH_ALPHA or "transparency" in upright.info:
        return composited(np.asarray(_in_srgb(upright, "RGBA")), background)
    return np.array(_in_srgb(upright, "RGB"))


def _in_srgb(image: Any, mode: str) -> Any:
    """Convert a Pillow image to sRGB by its colour profile, if it has one, and to ``mode``.

    ``mode`` is "RGB" or "RGBA". Phones and cameras write other colour spaces than sRGB. A profile
    that does not fit the picture is ignored, as viewers do.
    """
    profile = image.info.get("icc_profile")
    if image.mode not in ("CMYK", "L"):
        image = image.convert(mode)
    if not profile:
        return image.convert(mode)
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        return ImageCms.profileToProfile(image, source, _screen(), outputMode=mode)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image.convert(mode)


@cache
def _screen() -> Any:
    return ImageCms.createProfile("sRGB")
