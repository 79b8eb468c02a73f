"""The job of a run: its parts, the encoder of their lines, and the function that encodes a part.

Local workers, tasks of Slurm and tasks of Ray encode parts by the same function. The result depends
only on the part's lines and the options, so a part can be encoded anywhere, and more than once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.data.part_pool import Advance
from megatron_ext.data.progress import Progress
from megatron_ext.errors import DataError
from megatron_ext.text.preprocess.encode import BlockEncoder
from megatron_ext.text.preprocess.inputs import Part, blocks, is_end_of_input, place_of
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import PartWriter, read_marker
from megatron_ext.text.preprocess.starts import check_encoding, is_blank
from megatron_ext.text.preprocess.tables import is_table

SECONDS_FOR_FILES = 30.0
"""The seconds after which a file of another machine must be visible here; NFS may be late."""

Say = Callable[[str], None]


class Encoding(Protocol):
    """Turns lines into documents; it is built from the options only."""

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that determines the tokens of a line, as JSON values."""
        ...

    @property
    def dtypes(self) -> Sequence[Any]:
        """Return the dtype of the dataset of each key."""
        ...

    def choose_engine(self, parts: Sequence[Part], say: Say) -> bool:
        """Return whether to use the fast engine, and report the choice by ``say``.

        The fast engine is used if it is exact on samples of the parts.
        """
        ...

    def encoder(self, *, fast: bool) -> BlockEncoder:
        """Return the encoder of lines.

        Raise an InexactEngine if ``fast`` is True and the fast engine cannot be used.
        """
        ...


Build = Callable[[PreprocessOptions], Encoding]


@dataclass(frozen=True)
class Job:
    """The objects that all workers share.

    Attributes:
        folder: the work directory.
        key: the key of the plan in ``folder``.
        build: builds ``encoding`` from ``options`` in another process.
        fast: whether the encoder uses the fast engine.
    """

    options: PreprocessOptions
    folder: Path
    key: str
    parts: Sequence[Part]
    encoding: Encoding
    encoder: BlockEncoder
    build: Build
    fast: bool


def unfinished(job: Job, numbers: Iterable[int]) -> list[int]:
    """Return those of ``numbers`` whose parts have no marker."""
    return [number for number in numbers if read_marker(job.folder, job.key, number) is None]


def progress_of(job: Job, todo: Sequence[int]) -> Progress:
    """Return the progress of a run that encodes the parts with the numbers ``todo``."""
    total = sum(part.num_bytes for part in job.parts)
    earlier = total - sum(job.parts[number].num_bytes for number in todo)
    interval = job.options.log_interval
    return Progress(total, earlier, "documents", log_interval=interval, in_bytes=True)


class StopAtLine(Exception):
    """Raised with (line number in the part, reason) for a bad line that ends the run."""


def encode_part(job: Job, number: int, advance: Advance) -> None:
    """Encode one part and write its marker.

    ``advance`` is called with the input bytes and the documents of each block. Blank lines at the
    end of an input are skipped; any other blank line is bad. Raise a StopAtLine for a bad line,
    unless ``--on-bad-line`` sets it aside.
    """
    streams = job.options.streams
    dtypes = job.encoding.dtypes
    writer = PartWriter(job.folder, job.key, number, streams, dtypes)
    part = job.parts[number]
    first = 0
    blank: list[bytes] = []
    stops = job.options.on_bad_line != "quarantine"
    try:
        for block, read in blocks(part):
            if part.start == first == 0 and not is_table(part.packing):
                check_encoding(part.source, block)
            lines = [*blank, *block.split(b"\n")]
            if not lines[-1]:
                lines.pop()
            end = len(lines)
            while end and is_blank(lines[end - 1]):
                end -= 1
            lines, blank = lines[:end], lines[end:]
            advance(read, _encode_lines(job, writer, lines, first, stops=stops))
            first += len(lines)
        if blank and not is_end_of_input(part):
            _encode_lines(job, writer, blank, first, stops=stops)
        elif blank:
            for line in range(first, first + len(blank)):
                writer.skip(line)
            writer.count(len(blank), 0)
    except BaseException:
        writer.abandon()
        raise
    writer.finish()


def _encode_lines(
    job: Job, writer: PartWriter, lines: Sequence[bytes], first: int, *, stops: bool
) -> int:
    """Encode lines of a part, whose first has the number ``first``; return how many documents.

    With ``stops`` raise a StopAtLine for a bad line; else record it.
    """
    refuse = partial(_refuse, None if stops else writer, lines, first)
    documents = job.encoder.encode(lines, first, refuse, writer.write, writer.tally)
    writer.count(len(lines), documents)
    return documents


def _refuse(
    writer: PartWriter | None, lines: Sequence[bytes], first: int, line: int, reason: str
) -> None:
    if writer is None:
        raise StopAtLine(line, reason)
    writer.reject(line, reason, lines[line - first])


def bad_line(stop: StopAtLine, part: Part) -> DataError:
    """Return the error that tells the user which line ended the run."""
    number, reason = stop.args
    file, line = place_of(part, number)
    unit = "item" if part.packing == "array" else "line"
    place = file if part.packing == "texts" else f"{file} {unit} {line}"
    return DataError(
        f"{place} {reason}; mend the line, or set bad lines aside with `--on-bad-line quarantine` "
        "of tools/preprocess_data.py."
    )
