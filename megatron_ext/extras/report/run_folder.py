"""Reads the files of a run in its save folder, which may be in use, damaged or untrusted.

Nothing here trusts a file. A line that is not a JSON object is counted and skipped, a link that
leads out of the folder is not followed, and a value of an unexpected type is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.files import (
    published,
    read_tracker,
    size_fault,
    standing_folder_of,
)
from megatron_ext.checkpoint.manifest import read_manifest
from megatron_ext.disk.events import EVENTS_FILE, PICTURE, REPORT
from megatron_ext.disk.reading import (
    UnreadableFile,
    is_count,
    lines_of,
    read_bytes,
    read_yaml,
    row_of,
)
from megatron_ext.errors import MegatronExtError
from megatron_ext.train.reporting.files import (
    CONFIGURATION_FILE,
    LAUNCHED,
    METRICS_FILE,
    launch_time,
    number,
    with_numbers,
)

Row = dict[str, Any]
MAX_CHECKPOINTS = 200
"""Number of newest checkpoints whose files are checked."""
_POST_MORTEM = re.compile(r"postmortem_(\d{1,9})$")
_MAX_PICTURE = 1 << 20


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in a save folder.

    ``fault`` says what is wrong with its files, and is None if nothing is. ``size`` is in bytes.
    ``saved`` is when it was saved, in seconds since the epoch; None if unknown.
    """

    iteration: int
    size: int
    fault: str | None
    saved: float | None


@dataclass(frozen=True)
class PostMortem:
    """The report that a crash or hang left, read from its folder ``name``.

    ``picture`` is an SVG of the ranks' last events; None if there is none or it is too large.
    """

    number: int
    name: str
    picture: bytes | None
    text: str


@dataclass
class RunFolder:
    """The files of a run.

    Attributes:
        rows: rows of metrics.jsonl, in order.
        events: faults, restarts, saves and other events, in order of time.
        settings: the configuration file, by section and field; {} if it cannot be read.
        tracked: the iteration in the file that names the newest complete checkpoint.
        began: when the run began, in seconds since the epoch; 0.0 if it is not known.
        problems: sentences on files that are damaged.
        unfinished: names of files whose last line is not whole.
    """

    path: Path
    rows: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    checkpoints: list[StoredCheckpoint] = field(default_factory=list)
    post_mortems: list[PostMortem] = field(default_factory=list)
    tracked: int | None = None
    began: float = 0.0
    problems: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def unfinished_lines(self, *, running: bool) -> list[str]:
        """Return sentences on last lines that are not whole; none for a run that still writes."""
        if running:
            return []
        return [
            f"The last line of {name} is not whole and left out; it was being written when the run "
            "ended or this page was made."
            for name in self.unfinished
        ]

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def start_facts(self) -> Row:
        """Return the settings and machine that the ranks recorded when they last started.

        A restart records only what has changed; this is merged with the earlier facts.
        """
        facts: Row = {}
        for row in self.of_kind(LAUNCHED):
            facts = row if "host" in row else facts | row
        return facts

    def events_of(self, *kinds: str) -> list[Row]:
        return [event for event in self.events if event["kind"] in kinds]


def read_run_folder(path: Path) -> RunFolder:
    """Read a save folder; leave out missing or damaged files, and add them to ``problems``."""
    folder = RunFolder(path)
    rows = _read_lines(path / METRICS_FILE, folder)
    folder.rows = [row for row in rows if is_count(row.get("iteration"))]
    starts = (t for t in map(launch_time, folder.rows) if math.isfinite(t))
    folder.began = min(starts, default=0.0)
    events = _read_lines(path / EVENTS_FILE, folder)
    # Events of an earlier run in the same folder do not belong to this run.
    mine = (event for event in events if time_of(event) > folder.began - 1.0)
    folder.events = sorted(mine, key=time_of)
    folder.settings = _read_settings(path / CONFIGURATION_FILE, folder.problems)
    folder.checkpoints = list(_checkpoints(path, folder.problems))
    try:
        folder.tracked = read_tracker(path)
    except (MegatronExtError, OSError) as error:
        folder.problems.append(str(error))
    folder.post_mortems = list(_post_mortems(path))
    return folder


def _read_lines(path: Path, folder: RunFolder) -> list[Row]:
    """Return the JSON objects in a file that have a ``kind``.

    If there are other lines, or the file cannot be read, a sentence is added to the problems of
    ``folder``; a last line without its end is added to the files that are unfinished.
    """
    rows = list[Row]()
    damaged = 0
    try:
        for line in lines_of(path):
            row = row_of(line)
            if row is not None and isinstance(row.get("kind"), str):
                rows.append(with_numbers(row))
            elif line is not None and not line.endswith(b"\n"):
                folder.unfinished.append(path.name)
            else:
                damaged += line is None or bool(line.strip())
    except UnreadableFile as error:
        if not error.missing:
            folder.problems.append(f"{path.name} cannot be read ({error.reason}).")
    if damaged:
        folder.problems.append(f"{damaged} lines of {path.name} are damaged and left out.")
    return rows


def time_of(event: Row) -> float:
    """Return the time of an event in seconds since the epoch; 0.0 if it has none."""
    try:
        return number(event["time"])
    except (KeyError, ValueError):
        return 0.0


def _read_settings(path: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    try:
        content = read_yaml(path)
    except UnreadableFile as error:
        if not error.missing:
            problems.append(f"{path.name} cannot be read ({error.reason}).")
        return {}
    sections = content if isinstance(content, dict) else {}
    return {str(name): v for name, v in sections.items() if isinstance(v, dict)}


def _checkpoints(root: Path, problems: list[str]) -> Iterable[StoredCheckpoint]:
    try:
        iterations = published(root)[-MAX_CHECKPOINTS:]
    except OSError as error:
        problems.append(f"The checkpoints cannot be listed ({error.strerror}).")
        return
    for iteration in iterations:
        folder = standing_folder_of(root, iteration)
        size = 0
        fault = None
        saved = None
        try:
            saved = folder.stat().st_mtime
            size = sum(x.lstat().st_size for x in folder.iterdir() if x.is_file())
            manifest = read_manifest(folder)
            fault = None if manifest is None else size_fault(folder, manifest)
        except (MegatronExtError, OSError) as error:
            fault = str(error)
        yield StoredCheckpoint(iteration, size, fault, saved)


def _post_mortems(root: Path) -> Iterable[PostMortem]:
    """Yield the reports in the folders ``postmortem_<n>`` of ``root`` by n; follow no links."""
    try:
        matches = [(m, entry) for entry in root.iterdir() if (m := _POST_MORTEM.match(entry.name))]
    except OSError:
        return
    for match, folder in sorted(matches, key=lambda pair: int(pair[0][1])):
        if folder.is_symlink() or not folder.is_dir():
            continue
        content = _plain_bytes(folder / PICTURE, _MAX_PICTURE)
        if content is not None and not content.lstrip().startswith((b"<?xml", b"<svg")):
            content = None
        text = _plain_bytes(folder / REPORT, 1 << 16) or b""
        shown = text.decode("utf-8", errors="replace")
        yield PostMortem(int(match[1]), folder.name, content, shown)


def _plain_bytes(path: Path, limit: int) -> bytes | None:
    """Return the content of a file; None if it is a link, not regular, or larger than ``limit``."""
    try:
        return None if path.is_symlink() else read_bytes(path, limit)
    except (OSError, UnreadableFile):
        return None
