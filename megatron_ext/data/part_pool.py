"""Worker processes that work on the numbered parts of a data-preparation run.

A part is a share of the input, such as a range of a file. Its result is written to disk, so a
repeated run does only the parts that have no result yet. The first error ends the run at once. If a
worker dies, for example because memory ran out, a new pool of workers continues.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_ext import limits
from megatron_ext.data.progress import Progress
from megatron_ext.errors import (
    MachineFault,
    MegatronExtError,
    end_with_parent,
    held_signals,
    release_signals,
)

ATTEMPTS = 3
"""Most attempts at a part whose worker dies or whose machine fails; then the run gives up."""
_SECONDS_BETWEEN_LOOKS = 0.1

Advance = Callable[[int, int], None]
"""A function that a worker calls to report progress each time it has done a piece of a part.

It takes the amount of input done (see `Progress`), such as bytes, and the number of items made.
"""
Work = Callable[[Any, Advance], None]
"""A function that does one part. It takes the part, as `PartPool.part_of` returns it, and an
`Advance` with which it reports progress.
"""


@dataclass(frozen=True)
class PartPool:
    """A pool of worker processes for the numbered parts of a run.

    Attributes:
        workers: number of worker processes.
        start: called once in each worker with the worker's number, before its first part; returns
            the worker's `Work`.
        name_of: takes a part's number and returns its name, for messages.
        place: the path to name in the error message if a worker gets an OSError.
        unfinished: takes numbers of parts and returns those that have no result on disk.
        part_of: takes a part's number and returns the picklable object that a worker gets; by
            default the number itself.
        passed: classes of a worker's errors, besides `MegatronExtError`, that `run` raises
            unchanged.
        method: how to start workers. "fork" shares the objects of this process; "spawn" pickles
            ``start``, and is needed if this process has used a GPU.
    """

    workers: int
    start: Callable[[int], Work]
    name_of: Callable[[int], str]
    place: str
    unfinished: Callable[[Iterable[int]], list[int]]
    part_of: Callable[[int], Any] = int
    passed: tuple[type[Exception], ...] = ()
    method: Literal["fork", "spawn"] = "fork"

    def run(
        self,
        todo: Sequence[int],
        progress: Progress,
        say: Callable[[str], None],
        on_done: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Work on the parts with the numbers ``todo``; call ``on_done`` with each finished number.

        If a worker dies, ``say`` is called with a sentence about it. The worker's part is tried
        again after all other parts and with no other worker, so that it has the whole memory to
        itself. Each part is tried at most ``ATTEMPTS`` times.

        Raises:
            MachineFault: workers died at the same part each time, or a worker got an OSError.
            RuntimeError: a worker got an error of any other class.
        """
        context = multiprocessing.get_context(self.method)
        board = _Board(context, max(todo, default=0) + 1)
        batches = [list(todo)]
        deaths = Counter[int]()
        done = set[int]()

        def report(number: int) -> None:
            done.add(number)
            on_done(number)

        while batches:
            batch = batches.pop(0)
            try:
                self._run_batch(context, batch, board, progress, report)
            except _WorkerDied as died:
                number, how = died.args
                deaths[number] += 1
                if deaths[number] == ATTEMPTS:
                    raise MachineFault(
                        f"{how}; if memory ran out use fewer --workers; finished parts are kept, "
                        "so run the same command again."
                    ) from None
                say(f"{how}; it is encoded again, alone (attempt {deaths[number] + 1}).")
                rest = self.unfinished(other for other in batch if other != number)
                for finished in set(batch) - {number, *rest} - done:
                    report(finished)
                batches = [*([rest] if rest else []), *batches, [number]]
                board.clear([number, *rest])

    def _run_batch(
        self,
        context: Any,
        batch: Sequence[int],
        board: _Board,
        progress: Progress,
        on_done: Callable[[int], None],
    ) -> None:
        """Do the parts ``batch`` in one pool of workers; the first failure ends the pool."""
        context = _Started(context)
        setup = _Setup(self.start, self.passed, self.place, board, context.Value("i", 0))
        count = min(self.workers, len(batch))
        pool = ProcessPoolExecutor(count, context, _start_worker, (setup, os.getpid()))
        gc.freeze()
        try:
            with held_signals():
                futures = {
                    pool.submit(_work_on, number, self.part_of(number)): number for number in batch
                }
            left: set[Future[None]] = set(futures)
            while left:
                finished, left = wait(left, _SECONDS_BETWEEN_LOOKS, FIRST_EXCEPTION)
                progress.show(*board.totals())
                for future in finished:
                    future.result()
                    on_done(futures[future])
        except BrokenProcessPool:
            pool.shutdown()
            raise self._death(context.processes, batch, board) from None
        finally:
            for process in context.processes:
                if process.pid is not None:
                    process.kill()
            pool.shutdown(cancel_futures=True)
            gc.unfreeze()

    def _death(
        self, processes: Sequence[BaseProcess], batch: Sequence[int], board: _Board
    ) -> _WorkerDied:
        """Return an error that names the worker whose death broke the pool, and the worker's part.

        The worker is the one that did not end by SIGTERM: the pool ends all others by that signal.
        """
        codes = [process.exitcode for process in processes]
        worker = next((i for i, code in enumerate(codes) if code not in (0, -signal.SIGTERM)), 0)
        code = codes[worker]
        killed = code is not None and code < 0
        how = f"was killed by signal {-code}" if killed and code else f"ended ({code})"
        identity = processes[worker].pid
        running = (number for number in batch if board.process_ids[number] == identity)
        number = next(running, batch[0])
        return _WorkerDied(number, f"Worker {worker} {how} in {self.name_of(number)}")


class _Started:
    """A multiprocessing context that keeps the processes it starts, so that they can be killed."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.processes: list[BaseProcess] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *args: Any, **options: Any) -> BaseProcess:  # noqa: N802 - their name
        process: BaseProcess = self._context.Process(*args, **options)
        self.processes.append(process)
        return process


class _Board:
    """Shared memory with the progress of each part.

    For each part, workers note the amount done (such as bytes), the number of items made, and the
    id of the process that works on it.
    """

    def __init__(self, context: Any, num_parts: int) -> None:
        self._shared = context.RawArray("q", 3 * num_parts)

    @property
    def _rows(self) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = np.frombuffer(self._shared, np.int64).reshape(3, -1)
        return rows

    @property
    def process_ids(self) -> npt.NDArray[np.int64]:
        identities: npt.NDArray[np.int64] = self._rows[2]
        return identities

    def advance(self, number: int, amount: int, items: int) -> None:
        """Add to a part's amount and items done; only the worker on that part may call this."""
        self._rows[:2, number] += (amount, items)

    def clear(self, numbers: Sequence[int]) -> None:
        """Set the counts of parts that will be done again to 0."""
        self._rows[:, numbers] = 0

    def totals(self) -> tuple[int, int]:
        """Return the amount done and the number of items made, summed over all parts."""
        amount, items = self._rows[:2].sum(axis=1).tolist()
        return amount, items


class _WorkerDied(Exception):
    """A worker process has died; ``args`` are the number of its part, and how it ended in words."""


@dataclass(frozen=True)
class _Setup:
    """The values that a worker process starts with: fields of `PartPool`, and shared memory.

    The worker notes its progress on ``board``. ``counter`` is how many workers have a number; the
    worker takes this as its own number and adds 1.
    """

    start: Callable[[int], Work]
    passed: tuple[type[Exception], ...]
    place: str
    board: _Board
    counter: Any


_setup: _Setup
_work: Work | None = None
"""The function with which this worker process does parts; None before its first part."""


def begin_worker(parent: int) -> None:
    """Make this new process end with its parent, and ignore Ctrl-C, which the parent handles.

    ``parent`` is the parent's process id. It must have started this process in `held_signals`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    release_signals()
    end_with_parent(parent)


def _start_worker(setup: _Setup, parent: int) -> None:
    global _setup
    begin_worker(parent)
    _setup = setup


def _work_on(number: int, part: Any) -> None:
    """Do one part in this worker process.

    Raise `MegatronExtError` and errors of the classes ``passed`` unchanged, an OSError as a
    `MachineFault`, and any other error as a RuntimeError with the worker's traceback as its text.
    """
    global _work
    setup = _setup
    setup.board.process_ids[number] = os.getpid()
    try:
        if _work is None:
            with setup.counter.get_lock():
                worker = setup.counter.value
                setup.counter.value += 1
            _work = setup.start(worker)
        _work(part, partial(setup.board.advance, number))
    except MegatronExtError:
        raise
    except setup.passed:
        raise
    except OSError as error:
        reason = limits.cause(error, setup.place)
        why = f"A worker could not write or read: {reason}; mend this and rerun."
        raise MachineFault(why) from None
    except Exception:
        raise RuntimeError(f"A worker failed:\n{traceback.format_exc()}") from None
    setup.board.process_ids[number] = 0
