"""The worker pool of a run: forked processes that encode its parts, and its progress.

Workers inherit shared objects when they are forked; only the numbers of parts are pickled. The
first failure, including the death of a worker, ends the run at once.
"""

import gc
import mmap
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron_ext.errors import DataError, MegatronExtError, end_with_parent
from megatron_ext.text.preprocess.encode import BlockEncoder
from megatron_ext.text.preprocess.inputs import Part, blocks
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import PartWriter
from megatron_ext.text.tokenizers.fast import InexactEngine

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_IN_LOG = 5.0


@dataclass(frozen=True)
class Job:
    """The objects that all workers share; `dtypes` has one entry for each key."""

    options: PreprocessOptions
    folder: Path
    parts: Sequence[Part]
    dtypes: Sequence[Any]
    encoder: BlockEncoder


class StopAtLine(Exception):
    """Raised with (line number in the part, reason) at a bad line that ends the run."""


class _Board:
    """Shared memory in which workers write bytes, documents and process id of each part."""

    def __init__(self, num_parts: int) -> None:
        shared = mmap.mmap(-1, 24 * max(num_parts, 1))
        rows: npt.NDArray[np.int64] = np.frombuffer(shared, np.int64).reshape(-1, 3)
        self.bytes, self.documents, self.process_ids = rows.T


_shared: tuple[Job, _Board]
"""The job and the board of a worker process."""


def _start_worker(job: Job, board: _Board, parent: int) -> None:
    """Set up a forked worker process; it ignores Ctrl-C, which its parent handles."""
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    _shared = job, board


def _encode_part(number: int) -> None:
    """Encode one part in a worker; raise a RuntimeError with the traceback of unknown errors."""
    job, board = _shared
    board.process_ids[number] = os.getpid()
    try:
        _run_part(job, number, board)
    except (StopAtLine, InexactEngine, MegatronExtError):
        raise
    except OSError as error:
        why = f"A worker could not write or read: {error}; free space and rerun."
        raise DataError(why) from None
    except Exception:
        raise RuntimeError(f"A worker failed:\n{traceback.format_exc()}") from None
    board.process_ids[number] = 0


def _run_part(job: Job, number: int, board: _Board) -> None:
    writer = PartWriter(job.folder, number, job.options.streams, job.dtypes)
    line, quarantines = 0, job.options.on_bad_line == "quarantine"
    try:
        for block, read in blocks(job.parts[number]):
            lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()
            refuse = partial(_refuse, writer if quarantines else None, lines, line)
            documents = job.encoder.encode(lines, line, refuse, writer.write)
            line += len(lines)
            writer.count(len(lines), documents)
            board.bytes[number] += read
            board.documents[number] += documents
    except BaseException:
        writer.abandon()
        raise
    writer.finish()


def _refuse(
    writer: PartWriter | None, lines: Sequence[bytes], first: int, line: int, reason: str
) -> None:
    if writer is None:
        raise StopAtLine(line, reason)
    writer.reject(line, reason, lines[line - first])


def encode_parts(job: Job, todo: Sequence[int]) -> None:
    """Encode the parts with the numbers ``todo`` in worker processes.

    Raise a DataError for a bad line, a damaged file or the death of a worker, and an InexactEngine
    if the fast engine gives other ids than the tokenizer.
    """
    if not todo:
        return
    board = _Board(len(job.parts))
    progress = _Progress(job.parts, todo, job.options.log_interval)
    fork, count = multiprocessing.get_context("fork"), min(job.options.workers, len(todo))
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, fork, _start_worker, (job, board, os.getpid()))
    processes: list[BaseProcess] = []
    gc.freeze()
    try:
        futures = {pool.submit(_encode_part, number): number for number in todo}
        processes = [child for child in multiprocessing.active_children() if child not in others]
        left = set(futures)
        while left:
            finished, left = wait(left, _SECONDS_BETWEEN_LOOKS, FIRST_EXCEPTION)
            progress.show(board)
            for future in finished:
                _check(future, job.parts[futures[future]])
    except BrokenProcessPool:
        pool.shutdown()
        raise _death(processes, job.parts, board) from None
    finally:
        for process in processes:
            process.kill()
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()
        progress.close()


def _check(future: Future[None], part: Part) -> None:
    """Raise the error of a part, if any; name a bad line by its number in the whole file."""
    try:
        future.result()
    except StopAtLine as stop:
        line, reason = stop.args
        ahead = replace(part, start=0, end=part.start)
        before = sum(block.count(b"\n") for block, _ in blocks(ahead)) if part.start else 0
        raise DataError(
            f"{part.source} line {before + line + 1} {reason}; mend the line, or set "
            "bad lines aside with `--on-bad-line quarantine` of tools/preprocess_data.py."
        ) from None


def _death(processes: Sequence[BaseProcess], parts: Sequence[Part], board: _Board) -> DataError:
    """Return an error about the worker that died; the pool ended the other ones by SIGTERM."""
    codes = [process.exitcode for process in processes]
    worker = next((i for i, code in enumerate(codes) if code not in (0, -signal.SIGTERM)), 0)
    code = codes[worker]
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended ({code})"
    part = parts[int(np.argmax(board.process_ids == processes[worker].pid))]
    return DataError(
        f"Worker {worker} {how} in {part.source}, bytes {part.start} to {part.end}; if memory "
        "ran out use fewer --workers; finished parts are kept, so run the same command again."
    )


class _Progress:
    """The progress of a run: a tqdm bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, parts: Sequence[Part], todo: Sequence[int], log_interval: int) -> None:
        self._total = sum(part.num_bytes for part in parts)
        self._earlier = self._total - sum(parts[number].num_bytes for number in todo)
        self._log_interval, self._logged = log_interval, 0
        self._start = self._shown = time.monotonic()
        size = {"total": self._total, "initial": self._earlier, "unit": "B", "unit_scale": True}
        self._bar: Any = tqdm(**size, file=sys.stderr, leave=False, disable=None)

    def show(self, board: _Board) -> None:
        done, documents = int(board.bytes.sum()), int(board.documents.sum())
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{documents} documents", refresh=False)
            self._bar.update(self._earlier + done - self._bar.n)
            return
        now = time.monotonic()
        due = now - self._shown >= _SECONDS_IN_LOG
        if due and documents - self._logged >= self._log_interval:
            self._shown, self._logged = now, documents
            print(self.line(done, documents, now - self._start), file=sys.stderr, flush=True)

    def line(self, done: int, documents: int, seconds: float) -> str:
        """Return the log line for ``done`` bytes and ``documents`` after ``seconds``."""
        share = min(1.0, (self._earlier + done) / max(self._total, 1))
        left = round(max(0.0, (self._total - self._earlier - done) * seconds / max(done, 1)))
        clock = f"{left // 60}:{left % 60:02}" if left < 3600 else tqdm.format_interval(left)
        return (
            f"{share:4.0%}  {documents} documents  {documents / seconds:.0f} documents/s  "
            f"{done / seconds / 1e6:.1f} MB/s  ETA {clock}"
        )

    def close(self) -> None:
        self._bar.close()
