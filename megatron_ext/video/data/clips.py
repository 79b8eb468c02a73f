"""Reads lists, folders and tar files of clips with captions."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import UnreadableFile, read_text, shortened
from megatron_ext.errors import DataError
from megatron_ext.video.data import archives, lists
from megatron_ext.video.data.members import ClipFile, Member
from megatron_ext.video.data.pictures import IMAGE_SUFFIXES


@dataclass(frozen=True)
class Clip:
    """One row of a list of clips.

    Attributes:
        path: a video (anything that FFmpeg reads: mp4, webm, gif, ...), an image, or a folder of
            images. The images of a folder are its frames, sorted by name with numbers by value (10
            after 9).
        caption: the text of the row, which may be empty; `with_suffix` adds frame rate and motion.
        fps: the frame rate of the row; None takes the frame rate of the file, or
            `frames.FOLDER_FPS` for a folder of images.
        motion: the motion score of the row, or None; `with_suffix` adds it to the caption.
        member: the position of the file in a tar file; None if it is not in a tar file.
    """

    path: str
    caption: str
    fps: float | None = None
    motion: float | None = None
    member: Member | None = None

    @property
    def source(self) -> ClipFile:
        """Return the file or folder of the clip."""
        return self.member or Path(self.path)


def with_suffix(
    caption: str, fps: float | None, motion: float | None = None, *, first: bool = False
) -> str:
    """Return the caption with its suffix, such as ``A cat. 24 FPS, 4 motion score.``

    Text encoders get this text in training and sampling. The suffix gives ``fps``, the frame rate
    of the sample, and ``motion``, its motion score. A score of None is left out, and so is a rate
    of None or 0. With ``first`` the words of the suffix are put before the caption instead.
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
    """Read the clips in a list, a tar file, or a folder with a ``.txt`` caption beside each clip.

    A list is csv (with commas, semicolons, tabs or bars), tsv, a JSON list, jsonl or parquet. Each
    row has a path relative to the list (``path``, ``file_name`` or ``video``), a caption (``text``,
    ``caption`` or ``prompt``), and optionally ``fps`` and ``motion`` (or ``motion_score``). Other
    columns are ignored, and so is a second path, caption or score in a row. If there are any,
    ``say`` is called with a line that tells which columns are ignored, and in how many rows.

    If a folder has ``metadata.csv``, ``.jsonl`` or ``.parquet``, that list is read. Otherwise all
    clips in the folder are read, including those in subfolders and tar files. A subfolder is a
    single clip, whose frames are its images, if it has a caption beside it, or if it holds images
    but neither captions nor folders. A tar file has samples in WebDataset's layout: members of one
    sample share their name.

    DataError is raised for a list or row that cannot be read, and if there are no clips. Its
    message names ``flag``, the command-line flag whose value is ``path``.
    """
    source = Path(path)
    unused: Counter[str] = Counter()
    try:
        if source.is_dir():
            metadata = _metadata_in(source)
            source = source if metadata is None else metadata
        if source.is_dir():
            clips = list(_clips_in(source, set(), unused))
        elif source.suffix.lower() == archives.SUFFIX and source.is_file():
            clips = list(_clips_of(source, unused))
        elif source.is_file():
            clips = []
            for place, row in lists.rows_of(source):
                clips.append(_clip(row, source, place))
                unused.update(_unused(row))
        else:
            raise DataError.about(
                flag, source, "is neither a file nor a folder", f"give a {_KINDS}"
            )
    except (OSError, UnicodeDecodeError, UnreadableFile) as error:
        why = error.reason if isinstance(error, UnreadableFile) else error
        where = error.path if isinstance(error, UnreadableFile) else source
        raise DataError.about(
            flag, where, f"cannot be read ({why})", f"give a {_KINDS}, with texts in UTF-8"
        ) from None
    if not clips:
        raise DataError.about(flag, source, "holds no clip", "give a list with rows")
    if unused:
        names = ", ".join(f"`{name}` ({count})" for name, count in unused.most_common())
        say(f"Columns of {source} that are not used, with the rows that have them: {names}.")
    return clips


_KINDS = "csv, tsv, json, jsonl or parquet list, a tar file or a folder of clips"
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""The names that lists of clips have in Hugging Face's folders of videos."""


def _metadata_in(folder: Path) -> Path | None:
    """Return the path of a folder's metadata file, which lists clips; None if there is none.

    The file has a name in `_METADATA`; if there are several, the first of these names is taken.
    """
    return next((folder / name for name in _METADATA if (folder / name).is_file()), None)


def list_folder(path: str | os.PathLike[str]) -> str:
    """Return the folder to which the paths of clips are relative.

    This is ``path`` itself if it is a folder, else the folder that holds the list or tar file.
    """
    return os.fspath(path) if os.path.isdir(path) else os.path.dirname(path)


def _unused(row: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the columns that have a value in a row, but are not read into a `Clip`."""
    given = [name for name, value in row.items() if value not in (None, "")]
    read = {"fps"}
    for names in (lists.PATHS, lists.CAPTIONS, lists.SCORES):
        read.update([name for name in names if name in given][:1])
    yield from (name for name in given if name not in read)


def _clips_in(folder: Path, read: set[Path], unused: Counter[str]) -> Iterator[Clip]:
    """Yield the clips in a folder and in the folders within it.

    ``read`` holds the folders that have been read, so that no folder is read twice because of
    links. ``unused`` counts columns that are not used, by name. Both are updated.
    """
    read.add(folder.resolve())
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() == ".txt" or path.name.startswith("."):
            continue
        if path.suffix.lower() == archives.SUFFIX and path.is_file():
            yield from _clips_of(path, unused)
        elif not path.is_dir() or _holds_frames(path):
            yield Clip(str(path), _caption_beside(path))
        elif path.resolve() not in read:
            yield from _clips_in(path, read, unused)


def _holds_frames(folder: Path) -> bool:
    """Tell whether the images of a folder are the frames of one clip.

    They are if a caption is beside the folder, or if the folder has images but neither captions nor
    subfolders.
    """
    if _text_of(folder, folder.name) is not None:
        return True
    names = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if any(path.suffix.lower() == ".txt" or path.is_dir() for path in names):
        return False
    return any(path.suffix.lower() in IMAGE_SUFFIXES for path in names)


def _caption_beside(clip: Path) -> str:
    # A dot in the name of a folder does not begin a suffix.
    text = _text_of(clip, clip.name if clip.is_dir() else clip.stem)
    return "" if text is None else read_text(text).strip()


def _text_of(clip: Path, name: str) -> Path | None:
    """Return the caption file ``name.txt`` in the folder that holds a clip; None if there is none.

    ``name`` is the name of the clip, without its suffix if the clip is a file.
    """
    texts = [clip.with_name(f"{name}{ending}") for ending in (".txt", ".TXT")]
    return next((text for text in texts if text.is_file()), None)


def _clips_of(archive: Path, unused: Counter[str]) -> Iterator[Clip]:
    """Yield the clips of a tar file.

    ``unused`` counts the columns and the members that are not used, by the name of the column or
    the suffix of the member; the counts of this file are added to it.
    """
    for member, row, others in archives.samples_in(archive):
        if member is not None:
            own = {name: value for name, value in row.items() if name not in lists.PATHS}
            yield _clip({"path": str(member), **own}, archive, member.name, member)
            unused.update(_unused({"path": str(member), **own}))
            unused.update(name for name in row if name in lists.PATHS)
        unused.update(others)


def _clip(row: Any, source: Path, place: str, member: Member | None = None) -> Clip:
    if not isinstance(row, dict):
        raise lists.bad_row(source, place, f"is no row of columns; it needs {lists.KNOWN}")
    name, path = _first(row, lists.PATHS)
    if not isinstance(path, str) or not path:
        what = f"has `{name}` {shortened(path)}, which is no text" if path else "has no path"
        given = [str(name) for name, value in row.items() if value not in (None, "")]
        columns = ", ".join(given) or "nothing"
        raise lists.bad_row(source, place, f"{what}: it has {columns}, but needs {lists.KNOWN}")
    name, caption = _first(row, lists.CAPTIONS)
    if not isinstance(caption, str):
        what = f"has the caption `{name}` {shortened(caption)}, which is no text"
        raise lists.bad_row(source, place, what)
    fps = _number(row, "fps", source, place)
    motion = _number(row, "motion", source, place)
    if motion is None:
        motion = _number(row, "motion_score", source, place)
    if fps is not None and fps < 0:
        raise lists.bad_row(source, place, f"has `fps` {fps}, which is negative")
    whole = path if member is not None else str(source.parent / path)
    return Clip(whole, caption.strip(), fps, motion, member)


def _first(row: dict[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Return (name, value) of the first of the columns ``names`` that has a value in the row.

    If none has, return (the first name, "").
    """
    return next(((x, row[x]) for x in names if row.get(x) not in (None, "")), (names[0], ""))


def _number(row: dict[str, Any], name: str, source: Path, place: str) -> float | None:
    if row.get(name) in (None, ""):
        return None
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise lists.bad_row(source, place, f"has `{name}` {row[name]!r}, which is no number")
    return value
