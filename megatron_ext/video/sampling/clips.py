"""Writes sampled clips as mp4 or png files, with a jsonl list and a contact sheet of stills."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.disk.writing import remove, write_text
from megatron_ext.errors import DataError
from megatron_ext.video.sampling.mp4 import Mp4Writer, as_bytes, imported
from megatron_ext.video.sampling.requests import ClipRequest

CONTACT_SHEET = "contact_sheet.png"
LIST = "samples.jsonl"
SHEET_FRAMES = 8
"""The contact sheet shows at most this many frames of a clip, evenly spaced from first to last."""
SHEET_SIDE = 256
"""The largest length of a frame's longer side in the contact sheet, in pixels."""
TITLE = 20
"""The height of a title in the contact sheet, in pixels."""
GAP = 4

_CLIP = re.compile(r"sample_\d{3,}\.(mp4|png)")


def clip_name(number: int, *, is_picture: bool = False) -> str:
    return f"sample_{number:03}.{'png' if is_picture else 'mp4'}"


def write_clips(
    folder: str | os.PathLike[str],
    pixels: Sequence[Tensor] | Tensor,
    requests: Sequence[ClipRequest],
    *,
    fps: float,
    seed: int,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write P clips, their contact sheet and a list of them into a folder.

    The files are ``sample_000.mp4`` and so on, or ``sample_000.png`` for clips of one frame,
    ``contact_sheet.png`` with stills of all clips, and
    ``samples.jsonl`` with a row for each clip. They are written into a temporary folder, which then
    replaces ``folder``, so that it is never incomplete. Earlier samples in ``folder`` are lost.

    Args:
        pixels: P clips ``[3, f, H, W]``, all finite; they are clamped to [-1, 1].
        requests: the request of each clip, in the order of the clips.
        seed: seed of the noise of requests that have no seed.
        facts: more fields of each clip's row in the list, such as the iteration of the model.

    Raises:
        ConfigError: PyAV or pillow is not installed.
        DataError: the folder holds files other than samples.
    """
    target = Path(folder)
    writing = open_folder(target)
    try:
        clips = [as_bytes(clip[None])[0] for clip in pixels]
        for number, clip in enumerate(clips):
            _write_clip(writing / clip_name(number, is_picture=len(clip) == 1), clip, fps)
        noted = {"seed": seed, "fps": fps, **(facts or {})}
        frames = len(clips[0])
        describe(writing, requests, clips, num_frames=frames, facts=noted, pictures=frames == 1)
        publish(writing, target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _write_clip(path: Path, clip: NDArray[np.uint8], fps: float) -> None:
    """Write a clip ``[f, H, W, 3]`` as a file of the kind that the name's ending says."""
    if path.suffix == ".png":
        (image,) = imported("pillow", "PIL.Image")
        image.fromarray(np.ascontiguousarray(clip[0])).save(path)
        return
    with closing(Mp4Writer(path, fps)) as writer:
        writer.append(clip)


def open_folder(target: Path) -> Path:
    """Create an empty temporary folder, which `publish` later renames to ``target``.

    Raises:
        DataError: the target holds files other than samples.
    """
    if target.exists() and not _is_ours(target):
        raise DataError(
            f"The folder {target} holds files that are no samples and would be lost; give the "
            "name of a new folder."
        )
    # The name is always the same, so this removes the files of a killed run.
    writing = target.with_name(f".{target.name}.writing")
    remove(writing)
    writing.mkdir(parents=True)
    return writing


def publish(writing: Path, target: Path) -> None:
    """Rename the folder ``writing`` to ``target``, and remove the older ``target``, if any."""
    older = target.with_name(f".{target.name}.older")
    if target.exists():
        remove(older)
        os.rename(target, older)
    os.rename(writing, target)
    shutil.rmtree(older, ignore_errors=True)


def describe(
    folder: Path,
    requests: Sequence[Any],
    clips: Sequence[NDArray[np.uint8]] | NDArray[np.uint8],
    *,
    num_frames: int,
    facts: Mapping[str, Any],
    pictures: bool = False,
) -> None:
    """Write ``contact_sheet.png``, with stills of all clips, and the list ``samples.jsonl``.

    Args:
        requests: the request of each clip, a dataclass with a ``title``, in the order of the clips.
        clips: frames ``[f, H, W, 3]`` of each clip: all frames, or only those to show as stills.
        num_frames: number of frames of each clip in its file.
        pictures: whether the files are pictures.
        facts: more fields of each row of the list; a field that the request sets has precedence.

    Raises:
        ConfigError: pillow is not installed.
    """
    rows = []
    for number, (request, clip) in enumerate(zip(requests, clips, strict=True)):
        own = asdict(request)
        own.pop("size", None)
        _, height, width, _ = clip.shape
        sizes = {"num_frames": num_frames, "height": height, "width": width}
        shared = {name: value for name, value in facts.items() if own.get(name) is None}
        path = clip_name(number, is_picture=pictures)
        rows.append({"path": path, **own, "number": number, **sizes, **shared})
    contact_sheet([request.title for request in requests], clips, folder / CONTACT_SHEET)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(folder / LIST, lines)


def shown_frames(num_frames: int) -> NDArray[np.int_]:
    """Return the indices, below ``num_frames``, of the frames that a contact sheet shows."""
    shown = np.linspace(0, num_frames - 1, min(num_frames, SHEET_FRAMES))
    numbers: NDArray[np.int_] = shown.round().astype(int)
    return numbers


def contact_sheet(
    titles: Sequence[str], clips: Sequence[NDArray[np.uint8]] | NDArray[np.uint8], path: Path
) -> None:
    """Write an image file with a row per clip ``[f, H, W, 3]``: its title and `shown_frames`."""
    image, draw, font = imported("pillow", "PIL.Image", "PIL.ImageDraw", "PIL.ImageFont")
    shown = shown_frames(len(clips[0]))
    sizes = [_sheet_size(*clip.shape[1:3]) for clip in clips]
    width = GAP + len(shown) * (max(size[0] for size in sizes) + GAP)
    height = sum(TITLE + size[1] + GAP for size in sizes)
    sheet = image.new("RGB", (width, height), "white")
    top = 0
    pen = draw.Draw(sheet)
    letters = font.load_default(size=TITLE * 0.6)
    for title, clip, size in zip(titles, clips, sizes, strict=True):
        text = _shortened(title, lambda t: pen.textlength(t, letters) <= sheet.width - 2 * GAP)
        pen.text((GAP, top + GAP), text, "black", letters)
        for column, number in enumerate(shown):
            picture = image.fromarray(np.ascontiguousarray(clip[number])).resize(size)
            sheet.paste(picture, (GAP + column * (size[0] + GAP), top + TITLE))
        top += TITLE + size[1] + GAP
    sheet.save(path)


def _sheet_size(height: int, width: int) -> tuple[int, int]:
    """Return (width, height) of a frame in the contact sheet, in pixels."""
    scale = min(1.0, SHEET_SIDE / max(height, width))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _shortened(title: str, fits: Callable[[str], bool]) -> str:
    """Return the title in one line; if it is too long, cut it and append "...".

    ``fits`` tells whether a text is short enough.
    """
    line = " ".join(title.split())
    ends = [line, *(f"{line[:end]}..." for end in range(len(line), 0, -1))]
    return next(filter(fits, ends), "...")


def _is_ours(target: Path) -> bool:
    """Tell whether ``target`` is a folder whose files all have names that `write_clips` gives."""
    if not target.is_dir() or target.is_symlink():
        return False
    names = {path.name for path in target.iterdir()}
    return all(name in (CONTACT_SHEET, LIST) or _CLIP.fullmatch(name) for name in names)
