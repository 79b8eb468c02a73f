"""Reads lists of clips with captions, and the pixels of video files, images and image folders."""

from __future__ import annotations

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.disk.reading import (
    MAX_LINE_BYTES,
    UnreadableFile,
    lines_of,
    parse_json,
    read_text,
)
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.data.geometry import ClipShape

av: Any
Image: Any
try:
    import av
except ImportError:
    av = None
try:
    from PIL import Image
except ImportError:
    Image = None

Picture = np.ndarray[Any, Any]
IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp"))
FOLDER_FPS = 24.0
"""Frame rate of an image folder whose row in the list gives none."""


@dataclass(frozen=True)
class Clip:
    """One row of a list of clips.

    Attributes:
        path: a video (anything that FFmpeg reads: mp4, webm, gif, ...), an image, or a folder of
            images, which are its frames, sorted by name with numbers by value (10 after 9).
        caption: the row's text, without the suffix that `with_suffix` adds; may be empty.
        fps: frame rate that the row gives; None takes the file's, or `FOLDER_FPS` for a folder.
        motion: the row's motion score, or None; `with_suffix` adds it to the caption.
    """

    path: str
    caption: str
    fps: float | None = None
    motion: float | None = None


def with_suffix(caption: str, fps: int | None, motion: float | None = None) -> str:
    """Return the caption with its suffix, such as ``A cat. 24 FPS, 4 motion score.``

    Text encoders get this text in training and sampling. The suffix gives ``fps``, the frame rate
    after subsampling, and ``motion``. A motion of None, and an fps of None or 0, are left out.
    """
    parts = [f"{fps} FPS"] if fps else []
    if motion is not None:
        parts.append(f"{round(motion)} motion score")
    return f"{caption} {', '.join(parts)}." if parts else caption


def read_list(
    path: str | os.PathLike[str],
    say: Callable[[str], None] = lambda line: None,
    *,
    flag: str = "--input",
) -> list[Clip]:
    """Read a jsonl or csv of clips, or a folder of clips with a ``.txt`` caption beside each.

    Rows have ``path`` (relative to the list), ``text`` or ``caption``, and may have ``fps`` and
    ``motion`` (or ``motion_score``). Other columns, and a second caption or score in a row, are
    named to ``say`` with the number of rows that have them. An unreadable list or row, or an empty
    list, raises DataError, which names the ``flag`` that gives the path.
    """
    source = Path(path)
    unused: Counter[str] = Counter()
    try:
        if source.is_dir():
            clips = [
                Clip(str(path), _caption_beside(path))
                for path in sorted(source.iterdir())
                if path.suffix != ".txt" and not path.name.startswith(".")
            ]
        elif source.is_file():
            rows = _csv_rows if source.suffix.lower() == ".csv" else _json_rows
            clips = []
            for line, row in rows(source):
                clips.append(_clip(row, source, line))
                unused.update(_unused(row))
        else:
            raise DataError(
                f"`{flag}` ({source}) is neither a file nor a folder; give a jsonl, a csv or a "
                "folder of clips."
            )
    except (OSError, UnicodeDecodeError, UnreadableFile) as error:
        why = error.reason if isinstance(error, UnreadableFile) else error
        raise DataError(
            f"`{flag}` ({source}) cannot be read ({why}); give a jsonl, a csv or a folder with "
            "captions, in UTF-8."
        ) from None
    if not clips:
        raise DataError(f"`{flag}` ({source}) holds no clip; give a list with rows.")
    if unused:
        names = ", ".join(f"`{name}` ({count})" for name, count in unused.most_common())
        say(f"Columns of {source} that are not used, with the rows that have them: {names}.")
    return clips


_CAPTIONS = ("text", "caption")
_SCORES = ("motion", "motion_score")
"""Names of one column each; of two in a row, the first that has a value is taken."""


def _unused(row: dict[str, Any]) -> Iterator[str]:
    """Yield the columns of a row that have a value which nothing reads."""
    given = [name for name, value in row.items() if value not in (None, "")]
    read = {"path", "fps"}
    for names in (_CAPTIONS, _SCORES):
        read.update([name for name in names if name in given][:1])
    yield from (name for name in given if name not in read)


def _caption_beside(clip: Path) -> str:
    # A folder of images has no suffix, even where its name has a dot.
    text = clip.with_name(f"{clip.name if clip.is_dir() else clip.stem}.txt")
    return read_text(text).strip() if text.is_file() else ""


def _json_rows(source: Path) -> Iterator[tuple[int, Any]]:
    # Spreadsheets write a byte-order mark, which utf-8-sig takes away.
    for line, text in enumerate(lines_of(source), 1):
        if text is None:
            raise _bad_row(source, line, f"has more than {MAX_LINE_BYTES:,} bytes")
        text = text.removeprefix(b"\xef\xbb\xbf") if line == 1 else text
        if not text.strip():
            continue
        try:
            row = parse_json(text, source, not_finite=True)
        except UnreadableFile as error:
            raise _bad_row(source, line, f"is no JSON ({error.reason})") from None
        yield line, row


def _csv_rows(source: Path) -> Iterator[tuple[int, Any]]:
    with open(source, encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        try:
            found = reader.fieldnames or ()
            if found and not ("path" in found and {"text", "caption"} & set(found)):
                raise DataError(
                    f"{source} has the columns {', '.join(found)}, but needs path, and text or "
                    "caption, in its first line; rename them."
                )
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise _bad_row(source, reader.line_num, f"is no csv ({error})") from None


def _clip(row: Any, source: Path, line: int) -> Clip:
    if not isinstance(row, dict) or not isinstance(row.get("path"), str) or not row["path"]:
        raise _bad_row(source, line, "has no `path`")
    if None in row:
        raise _bad_row(source, line, f"has {len(row[None])} cells more than the first line")
    caption = next((row[x] for x in _CAPTIONS if row.get(x) not in (None, "")), "")
    if not isinstance(caption, str):
        raise _bad_row(source, line, "has a caption that is no text")
    fps = _number(row, "fps", source, line)
    motion = _number(row, "motion", source, line)
    if motion is None:
        motion = _number(row, "motion_score", source, line)
    if fps is not None and fps < 0:
        raise _bad_row(source, line, f"has `fps` {fps}, which is negative")
    return Clip(str(source.parent / row["path"]), caption.strip(), fps, motion)


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
    """Return the shape of a clip, from its first frame and the packets of its file.

    A clip that cannot be read raises DataError; a missing package raises ConfigError.
    """
    path, fps = Path(clip.path), clip.fps or FOLDER_FPS
    with _reading(path):
        if path.is_dir():
            images = _images_of(path)
            height, width = _image_size(images[0])
            return ClipShape(len(images), height, width, fps)
        if path.suffix.lower() in IMAGE_SUFFIXES:
            return ClipShape(1, *_image_size(path), 0.0)
        with av.open(clip.path) as container:
            stream = container.streams.video[0]
            # Headers of webm and gif do not give the number of frames, and those of a cut mp4 lie.
            # Packets before the beginning of an edited mp4 give no frame.
            frames = sum(p.size > 0 and not p.is_discard for p in container.demux(stream))
            fps = clip.fps or float(stream.average_rate or 0)
        with av.open(clip.path) as container:
            height, width, _ = _upright(next(container.decode(video=0))).shape
        if not frames or (frames > 1 and fps <= 0):
            raise ValueError("it has no frames or no frame rate")
        return ClipShape(frames, height, width, fps if frames > 1 else 0.0)


def decode(clip: Clip, first: int, interval: int, count: int, size: tuple[int, int]) -> Tensor:
    """Return frames of a clip, scaled and cropped by `fit`: ``[3, count, H, W]`` in [-1, 1].

    The result is float32 and shows frames ``first``, ``first + interval`` and so on. A file that
    cannot be read or ends too early raises DataError; a missing package raises ConfigError.
    """
    wanted = range(first, first + interval * (count - 1) + 1, interval)
    path = Path(clip.path)
    shapes, fitted = set(), []
    with _reading(path):
        # One at a time: a hundred frames of a large video would take gigabytes.
        for frame in _frames(path, wanted):
            shapes.add(frame.shape)
            fitted.append(fit(torch.from_numpy(frame)[None], size))
        if len(fitted) < count:
            raise ValueError(f"only {len(fitted)} of {count} frames could be decoded")
        if len(shapes) > 1:
            raise ValueError("its frames differ in size")
    return torch.cat(fitted, dim=1)


def fit(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale frames until they cover ``size`` (height, width), and cut out their centre.

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
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    cut = planes[:, :, top : top + size[0], left : left + size[1]]
    return (cut / 127.5 - 1).clamp(-1, 1).transpose(0, 1).contiguous()


def _frames(path: Path, wanted: range) -> Iterator[Picture]:
    if path.is_dir():
        images = _images_of(path)
        yield from (_read_image(images[i]) for i in wanted if i < len(images))
    elif path.suffix.lower() in IMAGE_SUFFIXES:
        yield _read_image(path)
    else:
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    yield _upright(frame)
                if number >= wanted[-1]:
                    break


def _upright(frame: Any) -> Picture:
    """Return the pixels ``[H, W, 3]`` of a frame, rotated as its metadata says."""
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns))


def _images_of(folder: Path) -> list[Path]:
    """Return a folder's images, sorted by name with numbers by value, so that 10 follows 9."""

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


def _image_size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.height, image.width


def _read_image(path: Path) -> Picture:
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an exception from reading ``path`` into a DataError that names the file.

    MemoryError passes unchanged. ConfigError is raised if the package av or pillow is missing.
    """
    for package, module in (("av", av), ("pillow", Image)):
        if module is None:
            raise ConfigError(
                f"Reading clips needs the package {package}, which is not installed; run "
                "`pip install 'megatron-ext[video]'`."
            )
    try:
        yield
    except MemoryError:
        raise
    # FFmpeg and pillow have errors of dozens of classes for bad files, among them bare Exception.
    except Exception as error:
        raise DataError(
            f"The clip {path} cannot be read ({str(error) or type(error).__name__}); mend the file "
            "or take its row out."
        ) from error
