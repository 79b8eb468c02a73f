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
"""Endings of videos that are nothing but pictures one after the other."""
_ANIMATED = ("PNG", "WEBP", "AVIF")
"""Formats whose pictures follow each other in time; the second picture of a JPEG or a TIFF is
another size or another page."""
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""
_ORIENTATION = 0x0112
_WITH_ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")
_NO_DURATION = 0.1
"""Seconds for which viewers show a frame that gives no duration."""


def is_picture(path: ClipFile) -> bool:
    """Return whether Pillow reads a file, and not FFmpeg.

    Its first bytes decide, since pictures of the web often have the ending of another kind. FFmpeg
    reads GIF.
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
    """Return the height and width of the upright picture, from the header where it says so."""
    with Image.open(readable(path)) as image:
        if image.format == "TIFF":
            # Some versions of Pillow turn it when it is opened, others when it is loaded.
            upright = ImageOps.exif_transpose(image)
            return upright.height, upright.width
        # A PNG's own method would decode the pixels, to look for EXIF behind them.
        if Image.Image.getexif(image).get(_ORIENTATION) in _TURNED:
            return image.width, image.height
        return image.height, image.width


def read_picture(path: ClipFile, background: Colour) -> Picture:
    """Return a picture ``[H, W, 3]`` as bytes; of an animated one the first frame."""
    with Image.open(readable(path)) as image:
        return _as_rgb(image, background)


def is_animated(path: ClipFile) -> bool:
    """Return whether a picture file is a clip: an animated PNG or WebP."""
    with Image.open(readable(path)) as image:
        return len(_numbers(image)) > 1


def durations(path: ClipFile) -> list[float]:
    """Return how long each frame of an animated picture is shown, in seconds."""
    seconds = []
    with Image.open(readable(path)) as image:
        for number in _numbers(image):
            image.seek(number)
            # WebP tells the duration only when the frame is decoded.
            image.load()
            seconds.append(float(image.info.get("duration") or 0) / 1000 or _NO_DURATION)
    return seconds


def read_animation(path: ClipFile, last: int, background: Colour) -> list[Picture]:
    """Return the frames 0 to ``last`` of an animated picture, each ``[H, W, 3]`` as bytes."""
    with Image.open(readable(path)) as image:
        frames = []
        for number in _numbers(image)[: last + 1]:
            image.seek(number)
            frames.append(_as_rgb(image, background))
        return frames


def _numbers(image: Any) -> range:
    """Return the numbers of the frames that play; a PNG may begin with a picture beside them."""
    count = getattr(image, "n_frames", 1) if image.format in _ANIMATED else 1
    return range(1 if count > 1 and image.info.get("default_image") else 0, count)


def composited(pixels: Picture, background: Colour) -> Picture:
    """Return pixels ``[H, W, 4]`` over a background, ``[H, W, 3]``, all of them bytes."""
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
        # Grey values of 16 bits, which `convert` would cut off at 255.
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
    """Return a picture as RGB or RGBA whose numbers mean the colours of a usual screen.

    Phones and cameras write other colours, and the profile that says which. A profile that does
    not fit the picture is left aside, as viewers do.
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
