"""The samples that a run made while it trained: contact sheets of clips, and texts."""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.disk.iterations import iteration_of
from megatron_ext.disk.reading import UnreadableFile, lines_of, read_bytes, row_of
from megatron_ext.inspect.pages.table import text_of

FOLDER = "samples"
SHEET, LIST = "contact_sheet.png", "samples.jsonl"
MAX_SHOWN = 8
"""Largest number of sets of samples that a page shows, evenly spaced over the run."""
MAX_BYTES = 8 << 20
"""Limit of the bytes of all pictures of samples within a page."""
_MAX_CLIPS = 16
_CLOCKS = 60.0
"""Seconds by which the clocks of the machines that write metrics and samples may differ."""
_MAX_TEXT = 1000
"""Largest number of characters of a text that a page shows."""
_CLIP = re.compile(r"sample_\d{3,9}\.(mp4|png)$")
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Samples:
    """Clips or texts that were sampled at an iteration.

    Attributes:
        folder: the path of their files, relative to the save folder.
        picture: the ``data:`` URL of their contact sheet; "" if it is missing or too large.
        clips: pairs of the name of a clip's file and its caption.
        texts: pairs of a prompt and its continuation.
    """

    iteration: int
    folder: str
    picture: str
    clips: list[tuple[str, str]]
    texts: list[tuple[str, str]]


def samples_of(root: Path, began: float = 0.0) -> tuple[list[Samples], int]:
    """Return samples of a run for its page, and the number of all sets of samples.

    ``root`` is the save folder. Samples of an earlier run in it, older than ``began`` (in seconds
    since the epoch), are left out. At most `MAX_SHOWN` are returned, among them the first and the
    last. Links are not followed.
    """
    sets = list[tuple[int, Path]]()
    try:
        if not (root / FOLDER).is_symlink():
            for entry in os.scandir(root / FOLDER):
                iteration = iteration_of(entry.name)
                if iteration is None or not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.stat(follow_symlinks=False).st_mtime > began - _CLOCKS:
                    sets.append((iteration, Path(entry.path)))
    except OSError:
        return [], 0
    sets.sort()
    count = min(MAX_SHOWN, len(sets))
    last = len(sets) - 1
    places = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    left = MAX_BYTES
    shown = list[Samples]()
    for place in reversed(places):
        iteration, folder = sets[place]
        picture = _sheet(folder / SHEET, left)
        left -= len(picture)
        data = f"data:image/png;base64,{base64.b64encode(picture).decode()}" if picture else ""
        name = f"{FOLDER}/{folder.name}"
        shown.append(Samples(iteration, name, data, *_listed(folder / LIST)))
    return shown[::-1], len(sets)


def _sheet(path: Path, limit: int) -> bytes:
    try:
        content = b"" if path.is_symlink() else read_bytes(path, limit)
    except (OSError, UnreadableFile):
        return b""
    return content if content.startswith(_PNG) else b""


def _listed(path: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the clips and the texts in a list of samples, as `Samples` has them."""
    clips = list[tuple[str, str]]()
    texts = list[tuple[str, str]]()
    try:
        for line in () if path.is_symlink() else lines_of(path):
            row = row_of(line) or {}
            name = row.get("path")
            if len(clips) < _MAX_CLIPS and isinstance(name, str) and _CLIP.match(name):
                words = row.get("title") or row.get("text") or row.get("prompt") or ""
                clips.append((name, text_of(words, 300)))
            written = row.get("completion")
            if len(texts) < _MAX_CLIPS and isinstance(written, str):
                prompt = row.get("prompt") or row.get("messages") or ""
                texts.append((text_of(prompt, _MAX_TEXT), text_of(written, _MAX_TEXT)))
    except UnreadableFile:
        return [], []
    return clips, texts
