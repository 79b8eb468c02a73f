"""Encodes the parts of a run in worker processes of this machine.

Workers are forked and inherit the job; only the numbers of parts are pickled.
"""

from collections.abc import Sequence
from functools import partial

from megatron_ext.data.part_pool import PartPool
from megatron_ext.text.preprocess.jobs import Job, Say, encode_part, progress_of, unfinished
from megatron_ext.text.tokenizers.fast import InexactEngine


def encode_parts(job: Job, todo: Sequence[int], say: Say) -> None:
    """Encode the parts with the numbers ``todo`` in worker processes; ``say`` gets messages.

    Raises:
        DataError: a bad line, or a damaged file.
        MachineFault: workers died repeatedly at the same part, or a disk failed.
        InexactEngine: gigatoken, the fast engine, gives other ids than the tokenizer.
    """
    pool = PartPool(
        workers=job.options.workers,
        start=lambda _worker: partial(encode_part, job),
        name_of=lambda number: str(job.parts[number]),
        place=job.options.output_prefix,
        unfinished=partial(unfinished, job),
        passed=(InexactEngine,),
    )
    progress = progress_of(job, todo)
    try:
        pool.run(todo, progress, say)
    finally:
        progress.close()
