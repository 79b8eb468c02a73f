"""What a worker process does: one part after the other, nothing pickled but numbers.

The worker processes of a run: forked, fed, watched, and ended at the first failure.

The progress line of a run: a bar on a terminal, a line now and then elsewhere.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.text.preprocess import inputs
from megatron_ext.text.preprocess.encode import BlockEncoder
from megatron_ext.text.preprocess.inputs import Part, blocks
from megatron_ext.text.preprocess.parts import PartWriter
from megatron_ext.text.tokenizers.fast import InexactEngine


@dataclass(frozen=True)
class Job:
    """What all workers share, built before they are forked.

    Attributes:
        dtypes: of the tokens of each key.
        streams: datasets that the lines are dealt to.
        quarantine: set bad lines aside instead of stopping.
    """

    folder: Path
    parts: Sequence[Part]
    dtypes: Sequence[Any]
    streams: int
    encoder: BlockEncoder
    quarantine: bool


class StopAtLine(Exception):
    """A bad line where none is allowed; `line` counts from 0 within the part."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def serve(job: Job, pipe: Connection, parent: int, inherited: Sequence[Any]) -> None:
    """Body of a worker process: receives part numbers until None, sends what happens.

    Messages: ("progress", bytes, documents), ("done", number), and as the last one
    ("bad", number, line, reason), ("inexact", text), ("error", sentences), ("crash", traceback).

    Args:
        parent: the process to live for; a worker whose parent died leaves without a word.
        inherited: pipe ends and locks of the parent to close, so that its death shows.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in inherited:
        os.close(end) if isinstance(end, int) else end.close()
    number = -1
    try:
        while (number := pipe.recv()) is not None:
            _run_part(job, number, pipe, parent)
            pipe.send(("done", number))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except StopAtLine as stop:
        pipe.send(("bad", number, stop.line, str(stop)))
    except InexactEngine as error:
        pipe.send(("inexact", str(error)))
    except MegatronExtError as error:
        pipe.send(("error", error.messages))
    except OSError as error:
        pipe.send(("error", (f"A worker could not write or read: {error}; free space and rerun.",)))
    except BaseException:
        pipe.send(("crash", traceback.format_exc()))


def _run_part(job: Job, number: int, pipe: Connection, parent: int) -> None:
    writer = PartWriter(job.folder, number, job.streams, job.dtypes)
    line = 0
    try:
        for block, read in blocks(job.parts[number]):
            lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()
            refuse = partial(_refuse, job, writer, lines, line)
            documents = job.encoder.encode(lines, line, refuse, writer.write)
            line += len(lines)
            writer.count(len(lines), documents)
            if os.getppid() != parent:
                os._exit(1)
            pipe.send(("progress", read, documents))
    except BaseException:
        writer.abandon()
        raise
    writer.finish()


def _refuse(
    job: Job, writer: PartWriter, lines: Sequence[bytes], first: int, line: int, reason: str
) -> None:
    if not job.quarantine:
        raise StopAtLine(line, reason)
    writer.reject(line, reason, lines[line - first])


_BAR = 24
_SECONDS_ON_TERMINAL = 0.1
_SECONDS_IN_LOG = 5.0


class Progress:
    """Counts documents and bytes and shows documents/s, MB/s and the time left.

    Args:
        total_bytes: bytes of all parts.
        done_bytes: bytes of the parts that an earlier run finished.
        log_interval: documents between two lines where `out` is no terminal.
    """

    def __init__(
        self,
        total_bytes: int,
        done_bytes: int = 0,
        *,
        log_interval: int = 1000,
        out: TextIO | None = None,
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._terminal = self._out.isatty()
        self._total, self._earlier, self._bytes = total_bytes, done_bytes, 0
        self._documents = self._shown_documents = 0
        self._log_interval = log_interval
        self._start = self._shown = time.monotonic()

    def advance(self, num_bytes: int, num_documents: int) -> None:
        self._bytes += num_bytes
        self._documents += num_documents
        now = time.monotonic()
        if self._terminal:
            due = now - self._shown >= _SECONDS_ON_TERMINAL
        else:
            due = (
                now - self._shown >= _SECONDS_IN_LOG
                and self._documents - self._shown_documents >= self._log_interval
            )
        if due:
            self._show(now)

    def _show(self, now: float) -> None:
        self._shown, self._shown_documents = now, self._documents
        line = self.line(now - self._start)
        print(f"\r{line}\x1b[K" if self._terminal else line, end="", file=self._out)
        print(end="" if self._terminal else "\n", file=self._out, flush=True)

    def line(self, seconds: float) -> str:
        """The text of the progress line after so many seconds."""
        seconds = max(seconds, 1e-9)
        done = min(1.0, (self._earlier + self._bytes) / max(self._total, 1))
        left = (self._total - self._earlier - self._bytes) * seconds / max(self._bytes, 1)
        filled = round(done * _BAR)
        bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] " if self._terminal else ""
        return (
            f"{bar}{done:4.0%}  {self._documents} documents  "
            f"{self._documents / seconds:.0f} documents/s  "
            f"{self._bytes / seconds / 1e6:.1f} MB/s  ETA {_clock(left)}"
        )

    def close(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=self._out, flush=True)


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


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
