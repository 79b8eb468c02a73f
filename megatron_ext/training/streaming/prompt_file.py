"""Files of prompts: text, one a line, or jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import DataError

if TYPE_CHECKING:
    from megatron_ext.config.streaming import StreamingConfig


@dataclass(frozen=True)
class PromptRow:
    """What a sequence is made from.

    Attributes:
        text: prompt.
        second_text: prompt after the switch, None for no switch.
        start: image, video or folder of images whose frames the sequence begins with.
    """

    text: str
    second_text: str | None = None
    start: str | None = None


def read_prompts(config: StreamingConfig) -> Sequence[PromptRow]:
    """The prompts of a run.

    Rows of a jsonl have ``text``, and may have ``second_text`` and ``image`` or ``video``, whose
    path is relative to the file; what one row has, all have, since sequences switch and begin
    alike on all replicas.

    Raises:
        DataError: a file that cannot be read or is empty, a row that is of no use, or two files of
            different lengths.
    """
    assert config.prompts_path is not None
    first = _rows("--prompts-path", config.prompts_path)
    if config.second_prompts_path is None:
        return first
    second = _rows("--second-prompts-path", config.second_prompts_path)
    if len(first) != len(second):
        raise DataError(
            f"`--second-prompts-path` ({config.second_prompts_path}) has {len(second)} prompts, "
            f"but must have {len(first)}, one for each of `--prompts-path`."
        )
    for flag, path, taken in (
        ("--prompts-path", config.prompts_path, [row.second_text for row in first]),
        ("--second-prompts-path", config.second_prompts_path, _extras(second)),
    ):
        if any(value is not None for value in taken):
            raise DataError(
                f"`{flag}` ({path}) must have nothing but the first text and what the sequences "
                "begin with beside `--second-prompts-path`, which must have nothing but `text`; "
                "leave the second texts in one of them."
            )
    return [
        PromptRow(row.text, after.text, row.start) for row, after in zip(first, second, strict=True)
    ]


def _extras(rows: Sequence[PromptRow]) -> list[str | None]:
    return [value for row in rows for value in (row.second_text, row.start)]


def _rows(flag: str, path: str) -> list[PromptRow]:
    """Rows of lines that are not blank."""
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"`{flag}` ({path}) must be a text file with one prompt a line, or a jsonl, but cannot "
            f"be read: {error}."
        ) from error
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"`{flag}` ({path}) holds no prompt; write one a line.")
    if source.suffix != ".jsonl":
        return [PromptRow(line) for _, line in lines]
    rows = [_row(line, source, number) for number, line in lines]
    for name in ("second_text", "start"):
        has = [getattr(row, name) is not None for row in rows]
        if any(has) and not all(has):
            what = "a `second_text`" if name == "second_text" else "an `image` or a `video`"
            raise _bad_row(source, lines[has.index(False)][0], f"has not {what}, as others have")
    return rows


def _row(line: str, source: Path, number: int) -> PromptRow:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise _bad_row(source, number, f"is no JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise _bad_row(source, number, "has no `text`")
    known = ("text", "second_text", "image", "video")
    if unknown := sorted(row.keys() - set(known)):
        raise _bad_row(source, number, f"has {unknown}, but may have {list(known)}")
    for name in known:
        if not isinstance(row.get(name), str | None):
            raise _bad_row(source, number, f"has `{name}` {row[name]!r}, which is no text")
    starts = [row[name] for name in ("image", "video") if row.get(name)]
    if len(starts) > 1:
        raise _bad_row(source, number, "has an `image` and a `video`, but may have one")
    start = source.parent / starts[0] if starts else None
    if start is not None and not start.exists():
        raise _bad_row(source, number, f"begins with {start}, which does not exist")
    return PromptRow(row["text"], row.get("second_text"), None if start is None else str(start))


def _bad_row(source: Path, line: int, what: str) -> DataError:
    return DataError(f"{source} line {line} {what}; mend the row or take it out.")
