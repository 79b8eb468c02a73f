"""The worker pool of a run: forked processes that encode its parts.

Workers inherit shared objects when they are forked; only the numbers of parts are pickled. The
first error ends the run at once. The death of a worker ends its pool, and another pool goes on.
"""

import gc
import mmap
import multiprocessing
import os
import signal
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.process import BaseProcess

import numpy as np
import numpy.typing as npt

from megatron_ext import limits
from megatron_ext.errors import (
    MachineFault,
    MegatronExtError,
    end_with_parent,
    held_signals,
    release_signals,
)
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.jobs import (
    ATTEMPTS,
    Job,
    Say,
    StopAtLine,
    bad_line,
    encode_part,
    unfinished,
)
from megatron_ext.text.preprocess.progress import Progress
from megatron_ext.text.tokenizers.fast import InexactEngine

_SECONDS_BETWEEN_LOOKS = 0.1


class _Board:
    """Shared memory in which workers write bytes, documents and process id of each part."""

    def __init__(self, num_parts: int) -> None:
        shared = mmap.mmap(-1, 24 * max(num_parts, 1))
        rows: npt.NDArray[np.int64] = np.frombuffer(shared, np.int64).reshape(-1, 3)
        self.bytes, self.documents, self.process_ids = rows.T

    def advance(self, number: int, read: int, documents: int) -> None:
        """Add bytes and documents to a part; only the worker that encodes it may call this."""
        self.bytes[number] += read
        self.documents[number] += documents

    def clear(self, numbers: Sequence[int]) -> None:
        """Set parts back to what they were before a worker began them."""
        self.bytes[numbers] = self.documents[numbers] = self.process_ids[numbers] = 0


_shared: tuple[Job, _Board]
"""The job and the board of a worker process."""


def _start_worker(job: Job, board: _Board, parent: int) -> None:
    """Set up a forked worker process; it ignores Ctrl-C, which its parent handles."""
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    release_signals()
    end_with_parent(parent)
    _shared = job, board


def _encode_part(number: int) -> None:
    """Encode one part in a worker; raise a RuntimeError with the traceback of unknown errors."""
    job, board = _shared
    board.process_ids[number] = os.getpid()
    try:
        encode_part(job, number, partial(board.advance, number))
    except (StopAtLine, InexactEngine, MegatronExtError):
        raise
    except OSError as error:
        reason = limits.cause(error, job.options.output_prefix)
        why = f"A worker could not write or read: {reason}; mend this and rerun."
        raise MachineFault(why) from None
    except Exception:
        raise RuntimeError(f"A worker failed:\n{traceback.format_exc()}") from None
    board.process_ids[number] = 0


class _WorkerDied(Exception):
    """Raised with (number of the part, sentence) when a worker process ends before its part."""


def encode_parts(job: Job, todo: Sequence[int], say: Say) -> None:
    """Encode the parts with the numbers ``todo`` in worker processes of this machine.

    A part whose worker dies is encoded again after the others, alone, so that it has the whole
    memory; ``ATTEMPTS`` times in all.

    Raises:
        DataError: a bad line, or a damaged file.
        MachineFault: workers died at the same part, or a disk failed.
        InexactEngine: the fast engine gives other ids than the tokenizer.
    """
    board = _Board(len(job.parts))
    progress = Progress(job.parts, todo, job.options.log_interval)
    batches, deaths = [list(todo)], Counter[int]()
    try:
        while batches:
            batch = batches.pop(0)
            try:
                _encode_batch(job, batch, board, progress)
            except _WorkerDied as died:
                number, how = died.args
                deaths[number] += 1
                if deaths[number] == ATTEMPTS:
                    raise MachineFault(
                        f"{how}; if memory ran out use fewer --workers; finished parts are kept, "
                        "so run the same command again."
                    ) from None
                say(f"{how}; it is encoded again, alone (attempt {deaths[number] + 1}).")
                rest = unfinished(job, (other for other in batch if other != number))
                batches = [*([rest] if rest else []), *batches, [number]]
                board.clear([number, *rest])
    finally:
        progress.close()


def _encode_batch(job: Job, batch: Sequence[int], board: _Board, progress: Progress) -> None:
    """Encode some parts in a pool of workers; the first failure ends the pool."""
    fork, count = multiprocessing.get_context("fork"), min(job.options.workers, len(batch))
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, fork, _start_worker, (job, board, os.getpid()))
    processes: list[BaseProcess] = []
    gc.freeze()
    try:
        with held_signals():
            futures = {pool.submit(_encode_part, number): number for number in batch}
        processes = [child for child in multiprocessing.active_children() if child not in others]
        left = set(futures)
        while left:
            finished, left = wait(left, _SECONDS_BETWEEN_LOOKS, FIRST_EXCEPTION)
            progress.show(int(board.bytes.sum()), int(board.documents.sum()))
            for future in finished:
                _check(future, job.parts[futures[future]])
    except BrokenProcessPool:
        pool.shutdown()
        raise _death(processes, job.parts, batch, board) from None
    finally:
        for process in processes:
            process.kill()
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()


def _check(future: Future[None], part: Part) -> None:
    """Raise the error of a part, if any; name a bad line by its number in the whole file."""
    try:
        future.result()
    except StopAtLine as stop:
        raise bad_line(stop, part) from None


def _death(
    processes: Sequence[BaseProcess], parts: Sequence[Part], batch: Sequence[int], board: _Board
) -> _WorkerDied:
    """Return an error about the worker that died; the pool ended the other ones by SIGTERM."""
    codes = [process.exitcode for process in processes]
    worker = next((i for i, code in enumerate(codes) if code not in (0, -signal.SIGTERM)), 0)
    code = codes[worker]
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended ({code})"
    running = (number for number in batch if board.process_ids[number] == processes[worker].pid)
    number = next(running, batch[0])
    return _WorkerDied(number, f"Worker {worker} {how} in {parts[number]}")
