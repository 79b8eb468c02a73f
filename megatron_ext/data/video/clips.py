"""Lists of clips with captions, and the pixels of clips: video files, images, image folders."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.data.video.assign import ClipShape
from megatron_ext.errors import ConfigError, DataError

IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp"))
FOLDER_FPS = 24.0
"""Frame rate of an image folder whose row names none."""


@dataclass(frozen=True)
class Clip:
    """One row of a list of clips.

    Attributes:
        path: a video (anything that FFmpeg reads: mp4, webm, gif, ...), an image, or a folder of
            images, which are its frames in the order of their names.
        caption: without suffix; may be empty.
        fps: of the row, where it has one; decides for image folders, and over the file's own.
        motion: motion score of the row.
    """

    path: str
    caption: str
    fps: float | None = None
    motion: float | None = None


def with_suffix(caption: str, fps: int | None, motion: float | None = None) -> str:
    """The caption that the text encoder gets, in training as in sampling.

    Args:
        caption: what the clip shows.
        fps: frames per second after subsampling; None or 0 for images.
        motion: motion score, rounded.
    """
    parts = [f"{fps} FPS"] if fps else []
    if motion is not None:
        parts.append(f"{round(motion)} motion score")
    return f"{caption} {', '.join(parts)}." if parts else caption


def read_list(path: str | os.PathLike[str]) -> list[Clip]:
    """Reads a jsonl or csv of clips, or a folder of clips each beside its caption in ``.txt``.

    Rows have ``path`` (relative to the list), ``text`` or ``caption``, and may have ``fps`` and
    ``motion`` (or ``motion_score``).

    Raises:
        DataError: no such file, a row that cannot be read, or no row at all.
    """
    source = Path(path)
    if source.is_dir():
        clips = list(_clips_of_folder(source))
    elif source.is_file():
        rows = _csv_rows(source) if source.suffix == ".csv" else _json_rows(source)
        clips = [_clip(row, source, line) for line, row in rows]
    else:
        raise DataError(f"`--input` ({source}) does not exist; give a jsonl, a csv or a folder.")
    if not clips:
        raise DataError(f"`--input` ({source}) holds no clip; give a list with rows.")
    return clips


def _clips_of_folder(folder: Path) -> Iterator[Clip]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".txt" or path.name.startswith("."):
            continue
        caption = path.with_suffix(".txt")
        yield Clip(str(path), caption.read_text("utf-8").strip() if caption.is_file() else "")


def _json_rows(source: Path) -> Iterator[tuple[int, Any]]:
    with open(source, encoding="utf-8") as stream:
        for line, text in enumerate(stream, 1):
            if not text.strip():
                continue
            try:
                yield line, json.loads(text)
            except ValueError as error:
                raise _bad_row(source, line, f"is no JSON ({error})") from None


def _csv_rows(source: Path) -> Iterator[tuple[int, Any]]:
    with open(source, encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            yield reader.line_num, row


def _clip(row: Any, source: Path, line: int) -> Clip:
    if not isinstance(row, dict) or not isinstance(row.get("path"), str) or not row["path"]:
        raise _bad_row(source, line, "has no `path`")
    caption = row.get("text", row.get("caption"))
    if caption is not None and not isinstance(caption, str):
        raise _bad_row(source, line, "has a caption that is no text")
    fps = _number(row, "fps", source, line)
    motion = _number(row, "motion", source, line)
    if motion is None:
        motion = _number(row, "motion_score", source, line)
    if fps is not None and fps < 0:
        raise _bad_row(source, line, f"has `fps` {fps}, which is negative")
    return Clip(str(source.parent / row["path"]), (caption or "").strip(), fps, motion)


def _number(row: dict[str, Any], name: str, source: Path, line: int) -> float | None:
    if row.get(name) in (None, ""):
        return None
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise _bad_row(source, line, f"has `{name}` {row[name]!r}, which is no number")
    return value


def _bad_row(source: Path, line: int, what: str) -> DataError:
    return DataError(f"{source} line {line} {what}; mend the row or take it out.")


def probe(clip: Clip) -> ClipShape:
    """What a clip offers, from the headers and packets of its file, without decoding frames.

    Raises:
        DataError: it does not exist, or is nothing that can be read.
        ConfigError: PyAV or pillow is not installed.
    """
    path = Path(clip.path)
    if path.is_dir():
        images = _images_of(path)
        height, width = _image_size(images[0])
        return ClipShape(len(images), height, width, clip.fps or FOLDER_FPS)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return ClipShape(1, *_image_size(path), 0.0)
    return _probe_video(clip)


def _probe_video(clip: Clip) -> ClipShape:
    av = _av()
    try:
        with av.open(clip.path) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or 0)
            height, width = stream.height, stream.width
            # Headers of webm and gif do not give the number of frames, and those of a cut mp4 lie.
            frames = sum(packet.size > 0 for packet in container.demux(stream))
    except (OSError, IndexError, ValueError) as error:
        raise _unreadable(clip.path, error) from None
    fps = clip.fps or rate
    if not frames or not height or not width or (frames > 1 and fps <= 0):
        raise _unreadable(clip.path, "it has no frames, no size or no frame rate")
    return ClipShape(frames, height, width, fps if frames > 1 else 0.0)


def decode(clip: Clip, first: int, interval: int, count: int, size: tuple[int, int]) -> Tensor:
    """Frames of a clip, enlarged or reduced until they cover the size, then cut at the middle.

    Args:
        clip: what to read.
        first: first frame of the file to keep.
        interval: frames of the file from one kept frame to the next.
        count: frames to keep, f.
        size: height and width of the result.

    Returns:
        ``[3, f, H, W]`` float32 in [-1, 1].

    Raises:
        DataError: the file cannot be read, or ends before the last frame.
        ConfigError: PyAV or pillow is not installed.
    """
    wanted = range(first, first + interval * (count - 1) + 1, interval)
    path = Path(clip.path)
    if path.is_dir():
        images = _images_of(path)
        frames = [_read_image(images[i]) for i in wanted if i < len(images)]
    elif path.suffix.lower() in IMAGE_SUFFIXES:
        frames = [_read_image(path)]
    else:
        frames = _read_video(clip.path, wanted)
    if len(frames) < count:
        raise _unreadable(clip.path, f"only {len(frames)} of {count} frames could be decoded")
    if any(frame.shape != frames[0].shape for frame in frames):
        raise _unreadable(clip.path, "its frames differ in size")
    return fit(torch.from_numpy(np.stack(frames)), size)


def fit(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Scales frames until they cover a size, and cuts them at the middle.

    Args:
        frames: ``[f, H0, W0, 3]`` uint8.
        size: height and width.

    Returns:
        ``[3, f, H, W]`` float32 in [-1, 1].
    """
    planes = frames.permute(0, 3, 1, 2).float()
    height, width = planes.shape[2:]
    scale = max(size[0] / height, size[1] / width)
    scaled = (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    if scaled != (height, width):
        planes = torch.nn.functional.interpolate(
            planes, scaled, mode="bilinear", antialias=True, align_corners=False
        )
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    cut = planes[:, :, top : top + size[0], left : left + size[1]]
    return (cut / 127.5 - 1).clamp(-1, 1).transpose(0, 1).contiguous()


def _read_video(path: str, wanted: range) -> list[np.ndarray[Any, Any]]:
    frames = []
    try:
        with _av().open(path) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    frames.append(frame.to_ndarray(format="rgb24"))
                if number >= wanted[-1]:
                    break
    except (OSError, IndexError, ValueError) as error:
        raise _unreadable(path, error) from None
    return frames


def _images_of(folder: Path) -> list[Path]:
    images = sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise _unreadable(folder, "the folder holds no images")
    return images


def _image_size(path: Path) -> tuple[int, int]:
    try:
        with _pillow().open(path) as image:
            return image.height, image.width
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _read_image(path: Path) -> np.ndarray[Any, Any]:
    try:
        with _pillow().open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str | Path, why: object) -> DataError:
    return DataError(f"The clip {path} cannot be read ({why}); mend the file or take its row out.")


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise _missing("av") from None
    return av


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise _missing("pillow") from None
    return Image


def _missing(package: str) -> ConfigError:
    return ConfigError(
        f"Reading clips needs the package {package}, which is not installed; run "
        "`pip install 'megatron-ext[video]'`."
    )
