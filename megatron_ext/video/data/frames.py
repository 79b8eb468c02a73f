"""Reads the pixels of video files, pictures and folders of pictures, as players show them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import WHITE, colour_of
from megatron_ext.video.data import pictures, video_files
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.geometry import ClipShape
from megatron_ext.video.data.members import ClipFile
from megatron_ext.video.data.pictures import IMAGE_SUFFIXES, Colour, Picture
from megatron_ext.video.data.timing import frame_rate, frames_at

FOLDER_FPS = 24.0
"""The frame rate of a clip that is a folder of images, if the list of clips gives none for it."""


def probe(clip: Clip) -> ClipShape:
    """Return the shape of a clip, from its first frame and the packets of its file.

    A clip that cannot be read raises DataError; a missing package raises ConfigError.
    """
    path = clip.source
    with _reading(path):
        if isinstance(path, Path) and path.is_dir():
            images = _images_of(path)
            height, width = pictures.picture_size(images[0])
            return ClipShape(len(images), height, width, clip.fps or FOLDER_FPS)
        if pictures.is_picture(path):
            height, width = pictures.picture_size(path)
            if not pictures.is_animated(path):
                return ClipShape(1, height, width, 0.0)
            count, fps = _timing(pictures.durations(path))
        else:
            facts = video_files.video_facts(path)
            height = facts.height
            width = facts.width
            count = facts.num_frames
            fps = facts.fps
        if not count or (count > 1 and not (clip.fps or fps)):
            raise ValueError("it has no frames or no frame rate")
        if count > 1 and clip.fps:
            return ClipShape(count, height, width, clip.fps, clip.fps / fps if fps else 1.0)
        return ClipShape(count, height, width, fps)


def scene_starts(clip: Clip, shape: ClipShape, threshold: float) -> list[float]:
    """Return the first frame of each scene of a clip, beginning with 0.

    Frames are counted at the frame rate of the clip's file, and may be fractions. A picture, or a
    folder of pictures, is one scene. A scene begins where FFmpeg's scene score, from 0 (no change)
    to 1, exceeds ``threshold``. A file that cannot be read raises DataError; a missing package
    raises ConfigError.
    """
    path = clip.source
    is_folder = isinstance(path, Path) and path.is_dir()
    if is_folder or shape.num_frames == 1:
        return [0.0]
    with _reading(path):
        if pictures.is_picture(path):
            return [0.0]
        times = video_files.scene_times(path, threshold)
    return [time * shape.fps / shape.speed for time in times]


def decode(
    clip: Clip,
    first: float,
    interval: float,
    count: int,
    size: tuple[int, int],
    *,
    shape: ClipShape | None = None,
    blend: bool = False,
    background: str = WHITE,
) -> Tensor:
    """Return frames of a clip, scaled and cropped by `fit`: ``[3, count, H, W]`` in [-1, 1].

    The result is float32. A file that cannot be read or ends too early raises DataError; a missing
    package raises ConfigError.

    Args:
        first, interval: the frames to return are those at ``first``, ``first + interval`` and so
            on, counted in frames of the clip; fractions are allowed.
        count: number of frames to return.
        size: (H, W).
        shape: shape of the clip; None reads it from the file.
        blend: whether to mix the frames before and after each time, instead of taking the nearest.
        background: name of the colour under transparent parts.
    """
    shape = shape or probe(clip)
    path = clip.source
    places = [first + interval * number for number in range(count)]
    within = [place for place in places if place < shape.num_frames - 1e-6]
    shapes = set()
    fitted = []
    with _reading(path):
        # Convert one frame at a time: a hundred frames of a large video take gigabytes.
        frames = _frames(path, shape, within, colour_of(background))
        for mixed in frames_at(frames, within, step=interval, blend=blend):
            planes = torch.zeros(3, 1, *size)
            for frame, weight in mixed:
                picture = frame.picture()
                shapes.add(picture.shape)
                pixels = fit(torch.from_numpy(picture)[None], size)
                planes = pixels if weight == 1 else planes + weight * pixels
            fitted.append(planes)
        if len(fitted) < count:
            raise ValueError(f"only {len(fitted)} of {count} frames could be decoded")
        if len(shapes) > 1:
            raise ValueError("its frames differ in size")
    return torch.cat(fitted, dim=1)


def fit(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale frames until they cover ``size`` (height, width), and crop their centre.

    ``[f, H0, W0, 3]`` uint8 becomes ``[3, f, H, W]`` float32 in [-1, 1].
    """
    planes = frames.permute(0, 3, 1, 2).float()
    height, width = planes.shape[2:]
    scale = max(size[0] / height, size[1] / width)
    scaled = (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    if scaled != (height, width):
        planes = torch.nn.functional.interpolate(
            planes, scaled, mode="bilinear", antialias=True, align_corners=False
        )
    top = (scaled[0] - size[0]) // 2
    left = (scaled[1] - size[1]) // 2
    cut = planes[:, :, top : top + size[0], left : left + size[1]]
    return (cut / 127.5 - 1).clamp(-1, 1).transpose(0, 1).contiguous()


class _Frame(Protocol):
    """A frame that is converted to pixels only when `picture` is called."""

    def picture(self) -> Picture: ...


@dataclass(frozen=True)
class _Still:
    """A frame that is a picture file in a folder of pictures."""

    path: ClipFile
    background: Colour

    def picture(self) -> Picture:
        return pictures.read_picture(self.path, self.background)


@dataclass(frozen=True)
class _Pixels:
    """A frame that is already converted to pixels."""

    pixels: Picture

    def picture(self) -> Picture:
        return self.pixels


def _frames(
    path: ClipFile, shape: ClipShape, places: list[float], background: Colour
) -> Iterator[tuple[float, float, _Frame]]:
    """Yield (time, duration, frame) for each frame needed to show a clip at the times ``places``.

    All times and durations are in frames of the clip. More frames than needed may be yielded.
    """
    if isinstance(path, Path) and path.is_dir():
        for number, image in enumerate(_images_of(path)):
            yield number, 1.0, _Still(image, background)
    elif not pictures.is_picture(path):
        # Use the rate of the file, so that a different rate in the row does not change indices.
        fps = shape.fps / shape.speed
        yield from video_files.video_frames(path, fps, background, min(places, default=0.0))
    elif shape.num_frames == 1:
        yield 0, 1.0, _Still(path, background)
    else:
        lengths = np.array(pictures.durations(path)) * shape.fps / shape.speed
        begins = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
        last = int(np.searchsorted(begins, max(places, default=0.0) + 0.5))
        shown = pictures.read_animation(path, last, background)
        for time, length, pixels in zip(begins, lengths, shown, strict=False):
            yield float(time), float(length), _Pixels(pixels)


def _timing(lengths: list[float]) -> tuple[int, float]:
    """Return (number of frames, frame rate) of an animation, given the seconds of each frame."""
    begins = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    fps, constant = frame_rate(begins, ())
    last = 1 if constant else max(1, round(lengths[-1] * fps))
    return round(float(begins[-1]) * fps) + last, fps


def _images_of(folder: Path) -> list[Path]:
    """Return the images of a folder, sorted by name with numbers by value: 10 after 9."""

    def natural(path: Path) -> tuple[list[tuple[int, int, str]], str]:
        parts = re.findall(r"[0-9]+|[^0-9]+", path.name)
        return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts], path.name

    images = [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
    ]
    if not images:
        raise ValueError("the folder holds no images")
    return sorted(images, key=natural)


@contextmanager
def _reading(path: ClipFile) -> Iterator[None]:
    """Turn an exception within a ``with`` block that reads ``path`` into a DataError.

    MemoryError passes unchanged. ConfigError is raised if the package av or pillow is missing.
    """
    for package, module in (("av", video_files.av), ("pillow", pictures.Image)):
        if module is None:
            raise ConfigError(
                f"Reading clips needs the package {package}, which is not installed; run "
                "`pip install 'megatron-ext[video]'`."
            )
    try:
        yield
    except MemoryError:
        raise
    # FFmpeg and pillow raise dozens of classes for bad files, including Exception itself.
    except Exception as error:
        raise DataError(
            f"The clip {path} cannot be read ({str(error) or type(error).__name__}); mend the file "
            "or take its row out."
        ) from error
