"""Writes a large file from start to end, together with its checksum, past the page cache.

A checkpoint in the page cache pushes out the training data, and is rarely read again. The kernel
also takes longer to find memory for it, page by page, than to copy it there: up to two seconds a
gigabyte. So full buffers go to the disk directly where the file system can do that.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from megatron_ext.checkpoint.files import Checksum
from megatron_ext.disk.writing import open_descriptor

_BUFFER_BYTES = 4 << 20
"""Bytes of one write to the disk: many enough for a parallel file system, and few enough that the
checksum finds them in a processor's cache."""
_DIRECT = getattr(os, "O_DIRECT", 0)


class SummedFile:
    """A new file to write to, with the checksum of what was written.

    While the caller fills one buffer, a second thread writes the other.
    Used as a context, the file is complete and on the disk when the context ends without an error.
    """

    def __init__(self, path: Path) -> None:
        self.checksum = Checksum()
        self._descriptor = _open(path)
        # Direct writes need whole pages in memory, too, which a mapping has.
        self._filling = mmap.mmap(-1, _BUFFER_BYTES)
        self._other = mmap.mmap(-1, _BUFFER_BYTES)
        self._filled = 0
        self._position = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            piece = left[: _BUFFER_BYTES - self._filled]
            self._filling[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            left = left[len(piece) :]
            if self._filled == _BUFFER_BYTES:
                self._hand_over()
        return size

    def tell(self) -> int:
        return self._position + self._filled

    def flush(self) -> None:
        """Do nothing: the file is complete only after `close`."""

    def close(self) -> None:
        """Write what is left, and flush the file to the disk; do nothing if that is done."""
        if self._descriptor < 0:
            return
        self._sum()
        self._wait()
        _leave_direct(self._descriptor)
        self._write_out(self._filling, self._filled, self._position)
        os.fsync(self._descriptor)
        self._release()

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self._release()

    def _hand_over(self) -> None:
        """Let the thread write the buffer that is full, once it has written the other one."""
        full = self._filling
        self._sum()
        self._wait()
        self._writing = self._thread.submit(self._write_out, full, self._filled, self._position)
        self._filling = self._other
        self._other = full
        self._position += self._filled
        self._filled = 0

    def _sum(self) -> None:
        with memoryview(self._filling) as whole, whole[: self._filled] as content:
            self.checksum.add(content)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write_out(self, buffer: mmap.mmap, size: int, position: int) -> None:
        with memoryview(buffer) as content:
            written = 0
            while written < size:
                with content[written:size] as left:
                    try:
                        written += os.pwrite(self._descriptor, left, position + written)
                    except OSError as error:
                        # Some file systems allow only the opening, or want larger blocks; and a
                        # disk that is nearly full takes a part of a block.
                        if error.errno != errno.EINVAL or not _leave_direct(self._descriptor):
                            raise

    def _release(self) -> None:
        self._thread.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return open_descriptor(path, flags | _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_descriptor(path, flags)


def _leave_direct(descriptor: int) -> bool:
    """Let further writes go through the page cache; return whether they went past it until now."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return True
