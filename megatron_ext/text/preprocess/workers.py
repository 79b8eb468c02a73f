"""Encodes the parts of a run in worker processes of this machine.

Workers are forked and inherit the job; only the numbers of parts are pickled.
"""

from collections.abc import Sequence
from functools import partial

from megatron_ext.data.part_pool import Advance, PartPool, Work
from megatron_ext.text.preprocess.jobs import (
    Job,
    Say,
    StopAtLine,
    bad_line,
    encode_part,
    progress_of,
    unfinished,
)
from megatron_ext.text.tokenizers.fast import InexactEngine


def encode_parts(job: Job, todo: Sequence[int], say: Say) -> None:
    """Encode the parts with the numbers ``todo`` in worker processes; see `PartPool.run`.

    Raises:
        DataError: a bad line, or a damaged file.
        MachineFault: workers died repeatedly at the same part, or a disk failed.
        InexactEngine: the fast engine gives other ids than the tokenizer.
    """
    pool = PartPool(
        workers=job.options.workers,
        start=partial(_encoding, job),
        name_of=lambda number: str(job.parts[number]),
        place=job.options.output_prefix,
        unfinished=partial(unfinished, job),
        passed=(_BadLine, InexactEngine),
    )
    progress = progress_of(job, todo)
    try:
        pool.run(todo, progress, say)
    except _BadLine as stop:
        number, line, reason = stop.args
        raise bad_line(StopAtLine(line, reason), job.parts[number]) from None
    finally:
        progress.close()


class _BadLine(Exception):
    """Raised in a worker with (part, line number in the part, reason)."""


def _encoding(job: Job, _worker: int) -> Work:
    def encode(number: int, advance: Advance) -> None:
        try:
            encode_part(job, number, advance)
        except StopAtLine as stop:
            raise _BadLine(number, *stop.args) from None

    return encode
