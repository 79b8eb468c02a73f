"""The job of a run: its parts, the encoder of their lines, and the function that encodes a part.

Local workers, tasks of Slurm and tasks of Ray encode parts by the same function. The result depends
only on the part's lines and the options, so a part can be encoded anywhere, and more than once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.data.part_pool import Advance
from megatron_ext.data.progress import Progress
from megatron_ext.errors import DataError
from megatron_ext.text.preprocess.encode import BlockEncoder
from megatron_ext.text.preprocess.inputs import Part, blocks, is_end_of_input, place_of
from megatron_ext.text.preprocess.long_lines import LongLine, head_of
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import PartWriter, read_marker
from megatron_ext.text.preprocess.starts import check_encoding, is_blank
from megatron_ext.text.preprocess.tables import is_table

Say = Callable[[str], None]


class Encoding(Protocol):
    """Describes how lines are turned into token ids, and builds the encoder that does so.

    Each machine builds its own `Encoding`, for which it needs only the `PreprocessOptions`.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that determines the tokens of a line, as a mapping of JSON values."""
        ...

    @property
    def dtypes(self) -> Sequence[Any]:
        """Return the dtype of each dataset to write.

        There is a dataset for each JSON key, or, for conversations, one of ids and one of the loss
        mask.
        """
        ...

    def choose_engine(self, parts: Sequence[Part], say: Say) -> bool:
        """Return whether to encode with gigatoken, a faster library than the tokenizer's own.

        It must give the tokenizer's ids on samples of ``parts``, and the user may rule it out.
        ``say`` is called with sentences for the user on the choice.
        """
        ...

    def encoder(self, *, fast: bool) -> BlockEncoder:
        """Return the encoder of lines, which uses gigatoken if ``fast`` is True.

        Raise an InexactEngine if ``fast`` is True and gigatoken cannot be used.
        """
        ...


Build = Callable[[PreprocessOptions], Encoding]


@dataclass(frozen=True)
class Job:
    """The work of a run: to encode the parts of its input. All workers share this object.

    Attributes:
        folder: the work directory.
        key: the random key of the plan in ``folder``. The marker of a finished part has it in its
            name, so that a marker of an earlier plan is not mistaken for one of this plan.
        parts: the parts of the input; a part is named by its index.
        fast: whether the encoder uses gigatoken, the fast engine.
    """

    options: PreprocessOptions
    folder: Path
    key: str
    parts: Sequence[Part]
    encoding: Encoding
    encoder: BlockEncoder
    fast: bool


def unfinished(job: Job, numbers: Iterable[int]) -> list[int]:
    """Return those of ``numbers`` whose parts must still be encoded: they have no valid marker."""
    return [number for number in numbers if read_marker(job.folder, job.key, number) is None]


def progress_of(job: Job, todo: Sequence[int]) -> Progress:
    """Return the progress display of a run that must still encode the parts numbered ``todo``.

    All other parts are shown as done by an earlier run.
    """
    total = sum(part.num_bytes for part in job.parts)
    earlier = total - sum(job.parts[number].num_bytes for number in todo)
    interval = job.options.log_interval
    return Progress(total, earlier, "documents", log_interval=interval, in_bytes=True)


def encode_part(job: Job, number: int, advance: Advance) -> None:
    """Encode the part ``number`` and write its marker.

    After each block, ``advance`` is called with the numbers of input bytes and documents in it.
    Blank lines at the end of an input are skipped; any other blank line is bad. Raise a DataError
    for a bad line, unless ``--on-bad-line quarantine`` sets the line aside.
    """
    streams = job.options.streams
    dtypes = job.encoding.dtypes
    writer = PartWriter(job.folder, job.key, number, streams, dtypes)
    part = job.parts[number]
    first = 0
    blank: list[bytes] = []
    try:
        for block, read in blocks(part):
            if part.start == first == 0 and not is_table(part.packing):
                check_encoding(part.source, head_of(block))
            if isinstance(block, LongLine):
                if blank and not is_blank(head_of(block)):
                    _encode_lines(job, part, writer, blank, first)
                    first += len(blank)
                    blank = []
                if not blank and job.encoder.encode_long(
                    block, first, job.folder, writer.write, writer.tally
                ):
                    writer.count(1, 1)
                    advance(read, 1)
                    first += 1
                    continue
                block = block.read()
            lines = [*blank, *block.split(b"\n")]
            del block  # It may be one long line, which need not be kept twice.
            if not lines[-1]:
                lines.pop()
            end = len(lines)
            while end and is_blank(lines[end - 1]):
                end -= 1
            blank = lines[end:]
            del lines[end:]
            advance(read, _encode_lines(job, part, writer, lines, first))
            first += len(lines)
        if blank and not is_end_of_input(part):
            _encode_lines(job, part, writer, blank, first)
        elif blank:
            for line in range(first, first + len(blank)):
                writer.skip(line)
            writer.count(len(blank), 0)
    except BaseException:
        writer.abandon()
        raise
    writer.finish()


def _encode_lines(
    job: Job, part: Part, writer: PartWriter, lines: Sequence[bytes], first: int
) -> int:
    """Encode lines of a part and write the documents; return the number of documents.

    ``first`` is the number of the first line in the part.
    """

    def refuse(line: int, reason: str) -> None:
        if job.options.on_bad_line != "quarantine":
            raise _bad_line(part, line, reason)
        writer.reject(line, reason, lines[line - first])

    documents = job.encoder.encode(lines, first, refuse, writer.write, writer.tally)
    writer.count(len(lines), documents)
    return documents


def _bad_line(part: Part, number: int, reason: str) -> DataError:
    """Return the error that names the line that ended the run, and the reason.

    ``number`` is the line's number in the part, from 0.
    """
    file, line = place_of(part, number)
    unit = "item" if part.packing == "array" else "line"
    place = file if part.packing == "texts" else f"{file} {unit} {line}"
    return DataError(
        f"{place} {reason}; mend the line, or set bad lines aside with `--on-bad-line quarantine` "
        "of tools/preprocess_data.py."
    )
