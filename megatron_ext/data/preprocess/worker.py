"""What a worker process does: one part after the other, nothing pickled but numbers."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_ext.data.preprocess.encode import Encoder
from megatron_ext.data.preprocess.inputs import Part, blocks
from megatron_ext.data.preprocess.parts import PartWriter
from megatron_ext.data.preprocess.records import BadLine, parse_line
from megatron_ext.data.preprocess.sentences import Splitter
from megatron_ext.data.tokenizers.fast import InexactEngine
from megatron_ext.errors import MegatronExtError


@dataclass(frozen=True)
class Job:
    """What all workers share, built before they are forked.

    Attributes:
        streams: lines go to stream `line number within the part % streams`.
        quarantine: set bad lines aside instead of stopping.
    """

    folder: Path
    parts: Sequence[Part]
    keys: Sequence[str]
    streams: int
    dtype: Any
    encoder: Encoder
    splitter: Splitter | None
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
    writer = PartWriter(job.folder, number, len(job.keys), job.streams, job.dtype)
    line = 0
    try:
        for block, read in blocks(job.parts[number]):
            lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()
            documents = _encode_block(job, writer, lines, line)
            line += len(lines)
            writer.count(len(lines), documents)
            if os.getppid() != parent:
                os._exit(1)
            pipe.send(("progress", read, documents))
    except BaseException:
        writer.abandon()
        raise
    writer.finish()


def _encode_block(job: Job, writer: PartWriter, lines: list[bytes], first: int) -> int:
    """Encodes whole lines of a part, the first of which is number `first`; returns documents."""
    kept: list[int] = []
    texts: list[list[list[str]]] = []
    for i, raw in enumerate(lines):
        try:
            texts.append(_texts(job, raw))
            kept.append(i)
        except BadLine as bad:
            _refuse(job, writer, first + i, str(bad), raw)
    try:
        _encode_streams(job, writer, texts, [first + i for i in kept])
    except (ValueError, OverflowError):
        # The tokenizer refuses some text; only now is it worth asking which.
        good = [
            j for j in range(len(kept)) if _accepts(job, writer, texts[j], first, kept[j], lines)
        ]
        kept, texts = [kept[j] for j in good], [texts[j] for j in good]
        _encode_streams(job, writer, texts, [first + i for i in kept])
    return len(kept)


def _texts(job: Job, raw: bytes) -> list[list[str]]:
    texts = parse_line(raw, job.keys)
    if job.splitter is None:
        return texts
    split = job.splitter
    return [[sentence for text in document for sentence in split(text)] for document in texts]


def _accepts(
    job: Job,
    writer: PartWriter,
    texts: list[list[str]],
    first: int,
    i: int,
    lines: list[bytes],
) -> bool:
    try:
        for document in texts:
            job.encoder.encodable(document)
    except BadLine as bad:
        _refuse(job, writer, first + i, str(bad), lines[i])
        return False
    return True


def _refuse(job: Job, writer: PartWriter, line: int, reason: str, raw: bytes) -> None:
    if not job.quarantine:
        raise StopAtLine(line, reason)
    writer.reject(line, reason, raw)


def _encode_streams(
    job: Job, writer: PartWriter, texts: list[list[list[str]]], numbers: list[int]
) -> None:
    """Encodes first and writes after, so that a refused text leaves nothing behind."""
    encoded = []
    for stream in range(job.streams):
        mine = [t for t, n in zip(texts, numbers, strict=True) if n % job.streams == stream]
        for key in range(len(job.keys)):
            encoded.append((key, stream, job.encoder.encode([document[key] for document in mine])))
    for key, stream, batch in encoded:
        writer.write(key, stream, batch)
