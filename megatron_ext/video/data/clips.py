"""Reads lists of clips with captions."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import (
    MAX_LINE_BYTES,
    UnreadableFile,
    lines_of,
    parse_json,
    read_text,
)
from megatron_ext.errors import DataError
from megatron_ext.video.data.pictures import IMAGE_SUFFIXES


@dataclass(frozen=True)
class Clip:
    """One row of a list of clips.

    Attributes:
        path: a video (anything that FFmpeg reads: mp4, webm, gif, ...), an image, or a folder of
            images, which are its frames, sorted by name with numbers by value (10 after 9).
        caption: the row's text, without the suffix that `with_suffix` adds; may be empty.
        fps: frame rate that the row gives; None takes the file's, or `frames.FOLDER_FPS` for
            a folder of images.
        motion: the row's motion score, or None; `with_suffix` adds it to the caption.
    """

    path: str
    caption: str
    fps: float | None = None
    motion: float | None = None


def with_suffix(
    caption: str, fps: float | None, motion: float | None = None, *, first: bool = False
) -> str:
    """Return the caption with its suffix, such as ``A cat. 24 FPS, 4 motion score.``

    Text encoders get this text in training and sampling. The suffix gives ``fps``, the frame rate
    of the sample, and ``motion``. A motion of None, and an fps of None or 0, are left out. With
    ``first`` the same words stand before the caption.
    """
    parts = [f"{fps:g} FPS"] if fps else []
    if motion is not None:
        parts.append(f"{round(motion)} motion score")
    if not parts:
        return caption
    words = f"{', '.join(parts)}."
    return f"{words} {caption}" if first else f"{caption} {words}"


def read_list(
    path: str | os.PathLike[str],
    say: Callable[[str], None] = lambda line: None,
    *,
    flag: str = "--input",
) -> list[Clip]:
    """Read a jsonl or csv of clips, or a folder of clips with a ``.txt`` caption beside each.

    Folders in the folder are read too. One with a caption beside it, or one of images without any
    captions, is one clip, whose frames are the images.

    Rows have ``path`` (relative to the list), ``text`` or ``caption``, and may have ``fps`` and
    ``motion`` (or ``motion_score``). Other columns, and a second caption or score in a row, are
    named to ``say`` with the number of rows that have them. An unreadable list or row, or an empty
    list, raises DataError, which names the ``flag`` that gives the path.
    """
    source = Path(path)
    unused: Counter[str] = Counter()
    try:
        if source.is_dir():
            clips = list(_clips_in(source, set()))
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


def list_folder(path: str | os.PathLike[str]) -> str:
    """Return the folder from which the paths of a list count."""
    return os.fspath(path) if os.path.isdir(path) else os.path.dirname(path)


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


def _clips_in(folder: Path, read: set[Path]) -> Iterator[Clip]:
    """Yield the clips in a folder and in those within it; no folder is read twice through links.

    ``read`` is the set of folders read before, which this extends.
    """
    read.add(folder.resolve())
    for path in sorted(folder.iterdir()):
        if path.suffix == ".txt" or path.name.startswith("."):
            continue
        if not path.is_dir() or _holds_frames(path):
            yield Clip(str(path), _caption_beside(path))
        elif path.resolve() not in read:
            yield from _clips_in(path, read)


def _holds_frames(folder: Path) -> bool:
    """Return whether a folder's images are the frames of one clip."""
    if folder.with_name(f"{folder.name}.txt").is_file():
        return True
    names = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if any(path.suffix == ".txt" or path.is_dir() for path in names):
        return False
    return any(path.suffix.lower() in IMAGE_SUFFIXES for path in names)


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
