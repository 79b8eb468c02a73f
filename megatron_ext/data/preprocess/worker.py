"""What a worker process does: one part after the other, nothing pickled but numbers."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_ext.data.preprocess.inputs import Part, blocks
from megatron_ext.data.preprocess.parts import PartWriter
from megatron_ext.data.preprocess.texts import BlockEncoder
from megatron_ext.data.tokenizers.fast import InexactEngine
from megatron_ext.errors import MegatronExtError


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
