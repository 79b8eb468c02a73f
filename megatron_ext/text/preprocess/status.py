"""Reports the progress of a run by the files in its work directory, without running anything."""

import fcntl
import glob
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from tqdm import tqdm

from megatron_ext.data.indexed import check_indexed_dataset
from megatron_ext.disk.reading import UnreadableFile, open_regular, read_text
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.parts import (
    PartMarker,
    failure_of,
    failure_paths,
    read_marker,
    read_plan,
)

_MOST_ROWS = 20
_SECONDS_OF_SILENCE = 60.0
"""An unfinished part counts as being encoded if its file has changed within this many seconds."""


def show_status(prefix: str, console: Console | None = None) -> None:
    """Print the progress of the preprocessing run that writes datasets with the prefix ``prefix``.

    If there is no unfinished run, print the finished datasets with this prefix. ``console`` is None
    for standard output.

    Raises:
        ConfigError: there is neither a run nor a dataset.
        DataError: the plan of the run is damaged.
    """
    console = console or Console()
    folder = Path(f"{prefix}.parts")
    try:
        plan = read_plan(folder)
    except UnreadableFile as error:
        if not error.missing:
            raise DataError(
                f"{folder}/plan.json cannot be read ({error.reason}); run the command again to "
                "start anew."
            ) from None
        if folder.is_dir():
            console.print(f"The run in {escape(str(folder))} has not cut its input into parts yet.")
        else:
            _show_datasets(prefix, console)
        return
    parts = plan.parts
    markers = [read_marker(folder, plan.key, number) for number in range(len(parts))]
    console.print(_table(prefix, parts, markers))
    for line in _lines(folder, parts, markers):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class _Row:
    """A row of the table of progress: one input, or several inputs summed up.

    ``markers`` has the marker of each part in ``parts``; it is None for an unfinished part.
    """

    name: str
    parts: Sequence[Part]
    markers: Sequence[PartMarker | None]

    @property
    def finished(self) -> bool:
        return all(self.markers)

    def cells(self) -> list[str]:
        done = [marker for marker in self.markers if marker]
        read = sum(
            p.num_bytes for p, marker in zip(self.parts, self.markers, strict=True) if marker
        )
        seconds = sum(marker.seconds for marker in done)
        return [
            escape(self.name),
            f"{len(done)}/{len(self.parts)}",
            f"{read / 1e6:.1f}/{sum(part.num_bytes for part in self.parts) / 1e6:.1f}",
            str(sum(marker.documents for marker in done)),
            str(sum(marker.tokens for marker in done)),
            str(sum(marker.rejected for marker in done)),
            f"{read / seconds / 1e6:.1f}" if seconds else "n/a",
        ]


def _table(prefix: str, parts: Sequence[Part], markers: Sequence[PartMarker | None]) -> Table:
    """Return a table of progress with a row for each input.

    If there are more than `_MOST_ROWS` inputs, unfinished ones come first, and one row sums up the
    rest. ``markers`` has the marker of each part; None for an unfinished one.
    """
    pairs = list(zip(parts, markers, strict=True))
    rows = [
        _Row(name, *zip(*group, strict=True))
        for name, group in groupby(pairs, lambda pair: pair[0].source)
    ]
    if len(rows) > _MOST_ROWS:
        rows.sort(key=lambda row: row.finished)
        rest = rows[_MOST_ROWS:]
        other = _Row(
            f"{len(rest)} other inputs",
            [part for row in rest for part in row.parts],
            [marker for row in rest for marker in row.markers],
        )
        rows = [*rows[:_MOST_ROWS], other]
    paths = Column("input", overflow="fold")
    table = Table(paths, title=f"{escape(prefix)}: parts of the input that are encoded")
    for name in ("parts", "MB", "documents", "tokens", "rejected lines", "MB/s of a worker"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.cells())
    if len(rows) > 1:
        table.add_section()
        table.add_row(*_Row("all", parts, markers).cells())
    return table


def _lines(
    folder: Path, parts: Sequence[Part], markers: Sequence[PartMarker | None]
) -> Iterable[str]:
    """Yield sentences on a run: whether it runs, its speed, the time left, and failed tasks."""
    now = time.time()
    started = _started(folder)
    recent = {i: m for i, m in enumerate(markers) if m and m.ended >= started}
    last = max((marker.ended for marker in recent.values()), default=started)
    begun = _begun(folder, markers, now)
    is_locked = _is_locked(folder)
    state = "running" if is_locked or begun else "not running; the same command goes on with it"
    ago = f"a part was last finished {max(0.0, now - last):.0f} s ago"
    if not recent:
        ago = "no part was finished since this start"
    yield f"The run is {state}; {begun} parts are being encoded; {ago}."
    seconds = (now if is_locked or begun else last) - started
    read = sum(parts[i].num_bytes for i in recent)
    left = sum(part.num_bytes for part, marker in zip(parts, markers, strict=True) if not marker)
    if read and seconds > 0:
        tokens = sum(marker.tokens for marker in recent.values())
        each = statistics.median(marker.seconds for marker in recent.values())
        hosts = len({marker.host for marker in recent.values()})
        machines = "1 machine" if hosts == 1 else f"{hosts} machines"
        yield (
            f"Since this start: {read / seconds / 1e6:.1f} MB/s, {tokens / seconds:.0f} tokens/s, "
            f"{machines}, {each:.1f} s for a part; ETA "
            f"{tqdm.format_interval(left * seconds / read)}."
        )
    for path in failure_paths(folder):
        with suppress(UnreadableFile):  # the run may end meanwhile
            for message in failure_of(path).messages:
                yield f"A task has failed: {message}"


def _started(folder: Path) -> float:
    try:
        return float(read_text(folder / "started", limit=1000))
    except (UnreadableFile, ValueError):
        return 0.0


def _begun(folder: Path, markers: Sequence[PartMarker | None], now: float) -> int:
    """Return the number of unfinished parts that are being encoded at the Unix time ``now``.

    These are the parts with a file that has changed within `_SECONDS_OF_SILENCE`.
    """
    names = set()
    for path in folder.glob("p*.k0.s0.bin"):
        with suppress(FileNotFoundError):  # the run may end meanwhile
            if now - path.stat().st_mtime < _SECONDS_OF_SILENCE:
                names.add(path.name[1:7])
    numbers = {int(name) for name in names if name.isdigit()}
    return sum(number < len(markers) and markers[number] is None for number in numbers)


def _is_locked(folder: Path) -> bool:
    """Tell whether a process holds the lock of the work directory, without writing there."""
    try:
        with open_regular(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except (OSError, UnreadableFile):  # the run has ended meanwhile
        return False


def _show_datasets(prefix: str, console: Console) -> None:
    before = Path(prefix).name + "_"
    names = re.compile(re.escape(before) + r".+_(document|sentence|mask)\.idx")
    paths = [
        name
        for name in sorted(glob.glob(f"{glob.escape(prefix)}_*.idx"))
        if names.fullmatch(Path(name).name)
    ]
    if not paths:
        raise ConfigError(
            f"`--output-prefix` ({prefix}) has neither a run in {prefix}.parts nor datasets; give "
            "the prefix of the run."
        )
    table = Table(Column("dataset", overflow="fold"), title=f"{escape(prefix)}: finished")
    for name in ("documents", "tokens"):
        table.add_column(name, justify="right")
    for name in paths:
        info = check_indexed_dataset(name.removesuffix(".idx"))
        table.add_row(
            escape(name.removesuffix(".idx")), str(info.num_documents), str(info.num_tokens)
        )
    console.print(table)
    rejected = Path(f"{prefix}.rejected.jsonl")
    count = 0
    if rejected.exists():
        with open_regular(rejected) as stream:
            count = sum(1 for _ in stream)
    where = f"; they are in {rejected}" if count else ""
    console.print(f"Rejected lines: {count}{where}.", soft_wrap=True, markup=False, highlight=False)
