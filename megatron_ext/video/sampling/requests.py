"""Reads requests for clips from the flags or from a file of prompts.

A request asks for one clip. It has a caption, and perhaps a reference: an image or video file that
provides some of the clip's frames.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_ext.disk.reading import UnreadableFile, parse_json, read_text
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.run import MODES, SampleConfig

Request = TypeVar("Request")


@dataclass(frozen=True)
class ClipRequest:
    """A request for one clip.

    Attributes:
        text: caption; words on frame rate and motion are added to it only when it is encoded.
        reference: image, video or folder of images; its first frames, last frames or both become
            those of the clip, as ``mode`` says. None for mode t2v.
        mode: condition mode, one of `config.run.MODES`: which frames of the clip the reference
            gives: none (t2v), the first ("head"), the last ("tail") or both (i2v_loop).
        motion: motion score to add to the caption; None adds none.
        negative_prompt: caption from which guidance leads away; None: ``--sample-negative-prompt``.
        seed: seed of the noise, which alone determines it. None: ``--sample-seed`` and the
            request's position among all requests determine it.
        steps: number of steps of Euler's method; None: ``--sample-steps``.
        size: height and width in pixels; None: the size that the flags set.

    Raises:
        ConfigError: the mode is unknown, or the reference does not fit it.
    """

    text: str
    reference: str | None = None
    mode: str = "t2v"
    motion: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    steps: int | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"The mode ({self.mode}) of the prompt {self.text!r} must be one of "
                f"{', '.join(MODES)}; correct its name."
            )
        if (self.mode == "t2v") != (self.reference is None):
            raise ConfigError(
                f"The prompt {self.text!r} has the mode {self.mode} and the reference "
                f"{self.reference}, but t2v takes no reference and all other modes need one; "
                "correct either."
            )

    @property
    def title(self) -> str:
        """Return the caption, the clip's title in a contact sheet."""
        return self.text


def read_requests(path: str | os.PathLike[str]) -> list[ClipRequest]:
    """Read requests for clips from a text file with one caption per line, or from a jsonl.

    A row of a jsonl has the field ``text``, and may have other fields of `ClipRequest`. A
    reference is given by one of the fields ``image``, ``video`` and ``reference``, as a path
    relative to the jsonl. `default_mode` replaces a missing ``mode``. DataError is raised for an
    invalid file or row.
    """
    names = [*(x.name for x in fields(ClipRequest)), "image", "video"]
    texts = ("reference", "image", "video", "mode", "negative_prompt")
    return read_prompts(path, ClipRequest, _request, names=names, texts=texts)


def read_prompts(
    path: str | os.PathLike[str],
    kind: Callable[[str], Request],
    of_row: Callable[[dict[str, Any], Path], Request],
    *,
    names: Sequence[str],
    texts: Sequence[str] = (),
) -> list[Request]:
    """Read requests from a ``.jsonl``, or from a text file with one caption per line.

    Args:
        kind: the dataclass of requests, which can be built from a caption alone.
        of_row: makes a request from a row of a jsonl and the path of the file; may raise
            ConfigError, ValueError or TypeError.
        names: the names of the fields that a row may have, including ``text``.
        texts: the names of the fields whose values must be texts or null.

    Raises:
        DataError: the file cannot be read, has an invalid row, or has no row.
    """
    source = Path(path)
    lines = read_lines(source, f"The file of prompts {source}")
    if source.suffix != ".jsonl":
        return [kind(line) for _, line in lines]
    requests = []
    for number, line in lines:
        row = read_row(line, source, number, names, texts=texts)
        try:
            requests.append(of_row(row, source))
        except (ConfigError, ValueError, TypeError) as error:
            raise bad_row(source, number, f"is refused ({error})") from None
    return requests


def read_lines(source: Path, what: str) -> list[tuple[int, str]]:
    """Return (line number from 1, stripped text) of all lines of a file that are not blank.

    Raises:
        DataError: the file cannot be read, or has only blank lines. ``what`` names the file in
            the message.
    """
    try:
        lines = read_text(source).split("\n")
    except UnreadableFile as error:
        raise DataError(
            f"{what} cannot be read ({error.reason}); give a text file with one prompt a line, or "
            "a jsonl."
        ) from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{what} holds no prompt; write one a line.")
    return numbered


def read_row(
    line: str, source: Path, number: int, names: Sequence[str], texts: Sequence[str]
) -> dict[str, Any]:
    """Parse and return ``line``, which is line ``number`` of the jsonl of prompts ``source``.

    A row must have ``text`` and may have only fields of ``names``. Values of the fields ``texts``
    must be strings or null. An invalid row raises DataError.
    """
    try:
        row = parse_json(line, source, not_finite=True)
    except UnreadableFile as error:
        raise bad_row(source, number, f"is no JSON ({error.reason})") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise bad_row(source, number, "has no `text`")
    if unknown := sorted(row.keys() - set(names)):
        raise bad_row(source, number, f"has {unknown}, but may have {list(names)}")
    for name in texts:
        if not isinstance(row.get(name), str | None):
            raise bad_row(source, number, f"has `{name}` {row[name]!r}, which is no text")
    return row


def bad_row(source: Path, line: int, what: str) -> DataError:
    """Return the error for an invalid row; ``what`` says what is wrong, as in "has no `text`"."""
    return DataError(f"{source} line {line} {what}; mend the row or take it out.")


def _request(row: dict[str, Any], source: Path) -> ClipRequest:
    motion = row.get("motion")
    if motion is not None and not math.isfinite(motion := float(motion)):
        raise ValueError(f"`motion` {row['motion']!r} is no finite number")
    name = start_of(row, ("reference", "image", "video"))
    return ClipRequest(
        text=row["text"].strip(),
        reference=None if name is None else str(source.parent / row[name]),
        mode=row.get("mode") or default_mode(name),
        motion=motion,
        negative_prompt=row.get("negative_prompt"),
        seed=whole_number(row, "seed", at_least=0),
        steps=whole_number(row, "steps", at_least=1),
        size=_size(row),
    )


def given_starts(sample: SampleConfig) -> tuple[str | None, list[str | None]]:
    """Return ("video" or "image", reference path for each of ``--sample-texts``).

    The references are those of ``--sample-video`` or ``--sample-image``. A single path serves all
    texts. Without either flag, the result is None and a path None for each text.
    """
    count = len(sample.sample_texts or [])
    name = "video" if sample.sample_video else "image" if sample.sample_image else None
    given = sample.sample_video or sample.sample_image
    paths: list[str | None] = [None] if given is None else [*given]
    return name, paths * count if len(paths) == 1 else paths


def default_mode(name: str | None) -> str:
    """Return the condition mode of a request that gives none.

    ``name`` is the field with its reference: "video" means v2v_head; "image" and "reference" mean
    i2v_head; None, for no reference, means t2v.
    """
    if name is None:
        return "t2v"
    return "v2v_head" if name == "video" else "i2v_head"


def start_of(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return which of the fields ``names`` has a value in ``row``; None if none has.

    ValueError is raised if several of them have a value.
    """
    given = [name for name in names if row.get(name)]
    if len(given) > 1:
        raise ValueError(f"it has `{given[0]}` and `{given[1]}`, which exclude each other")
    return given[0] if given else None


def whole_number(row: Mapping[str, Any], name: str, *, at_least: int) -> int | None:
    """Return the whole number under ``name`` in a row; None if it is missing or null.

    ValueError is raised for any other value, and for a number below ``at_least``.
    """
    value = row.get(name)
    if value is None:
        return None
    if type(value) is not int or value < at_least:
        raise ValueError(f"`{name}` {value!r} must be a whole number of at least {at_least}")
    return value


def _size(row: Mapping[str, Any]) -> tuple[int, int] | None:
    size = row.get("size")
    if size is None:
        return None
    if not isinstance(size, list) or [type(x) for x in size] != [int, int] or min(size) < 1:
        raise ValueError(f"`size` {size!r} must be [height, width] in pixels")
    return size[0], size[1]


def requests_of(sample: SampleConfig) -> list[ClipRequest]:
    """Read the requests in the file ``--sample-prompts``, or make one for each ``--sample-texts``.

    A request without a negative prompt gets that of ``--sample-negative-prompt``.
    """
    if sample.sample_texts is None:
        assert sample.sample_prompts is not None
        requests = read_requests(sample.sample_prompts)
    else:
        name, paths = given_starts(sample)
        pairs = zip(sample.sample_texts, paths, strict=True)
        requests = [ClipRequest(text, path, default_mode(name)) for text, path in pairs]
    negative = sample.sample_negative_prompt
    return [
        replace(x, negative_prompt=negative) if x.negative_prompt is None else x for x in requests
    ]
