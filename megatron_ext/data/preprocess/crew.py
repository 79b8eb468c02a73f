"""The worker processes of a run: forked, fed, watched, and ended at the first failure."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_ext.data.preprocess import inputs
from megatron_ext.data.preprocess.inputs import Part
from megatron_ext.data.preprocess.progress import Progress
from megatron_ext.data.preprocess.worker import Job, serve
from megatron_ext.data.tokenizers.fast import InexactEngine
from megatron_ext.errors import DataError


class Crew:
    """Forked workers, each at its own pipe."""

    def __init__(self, job: Job, size: int, lock: int) -> None:
        self._job = job
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        self._at: dict[int, int] = {}
        gc.freeze()
        for _ in range(size):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            inherited = [*self._pipes, lock]
            process = context.Process(
                target=serve, args=(job, theirs, os.getpid(), inherited), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)

    def work(self, todo: Sequence[int], progress: Progress) -> None:
        """Hands out parts until all are done.

        Raises:
            DataError: a bad line, a damaged file, or a worker that died.
            InexactEngine: the fast engine failed its running comparison.
        """
        waiting = list(reversed(todo))
        left = len(todo)
        for worker in range(len(self._pipes)):
            self._hand_out(worker, waiting)
        while left:
            for pipe in wait(self._pipes):
                worker = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    message = self._pipes[worker].recv()
                except (EOFError, ConnectionResetError):
                    raise self._death(worker) from None
                if message[0] == "progress":
                    progress.advance(message[1], message[2])
                elif message[0] == "done":
                    left -= 1
                    self._hand_out(worker, waiting)
                else:
                    raise self._failure(message)

    def _hand_out(self, worker: int, waiting: list[int]) -> None:
        if waiting:
            self._at[worker] = waiting.pop()
            try:
                self._pipes[worker].send(self._at[worker])
            except (BrokenPipeError, ConnectionResetError):
                raise self._death(worker) from None

    def _death(self, worker: int) -> DataError:
        process = self._processes[worker]
        process.join(5)
        code = process.exitcode
        how = (
            f"was killed by signal {-code}" if code is not None and code < 0 else f"ended ({code})"
        )
        part = self._job.parts[self._at[worker]]
        return DataError(
            f"Worker {worker} {how} in {part.source}, bytes {part.start} to {part.end}; if memory "
            "ran out use fewer --workers; finished parts are kept, so run the same command again."
        )

    def _failure(self, message: tuple[Any, ...]) -> Exception:
        if message[0] == "bad":
            _, number, line, reason = message
            part = self._job.parts[number]
            line += _lines_before(part) + 1
            return DataError(
                f"{part.source} line {line} {reason}; mend the line, or set bad lines aside with "
                "`--on-bad-line quarantine` of tools/preprocess_data.py."
            )
        if message[0] == "inexact":
            return InexactEngine(message[1])
        if message[0] == "error":
            return DataError(message[1])
        return RuntimeError(f"A worker failed:\n{message[1]}")

    def stop(self) -> None:
        """Ends all workers at once, idle or not."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        gc.unfreeze()


def _lines_before(part: Part) -> int:
    count, left = 0, part.start
    with open(part.path, "rb") as stream:
        while left > 0:
            piece = stream.read(min(inputs.BLOCK_BYTES, left))
            count += piece.count(b"\n")
            left -= len(piece)
    return count
