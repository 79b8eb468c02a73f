"""One run at a time writes to a folder of checkpoints."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.checkpoint.agreement import together
from megatron_ext.errors import CheckpointError
from megatron_ext.layout import ParallelContext

NAME = ".lock"
_SECONDS_FOR_A_DYING_RUN = 2.0

logger = logging.getLogger(__name__)


@contextmanager
def hold_save_folder(save: str | None, context: ParallelContext) -> Iterator[None]:
    """Keep other runs from writing to ``--save``; all ranks call this together.

    Others may load from it. The lock is one of POSIX, which the kernel frees when rank 0 ends,
    however it ends; which shared file systems know; and which processes that rank 0 forks, such as
    loaders of data, do not keep when it is gone, as they would a lock of flock or filelock.

    Raises:
        CheckpointError: on every rank, where another run holds the folder, or it cannot be written.
    """
    if save is None:
        yield
        return
    held = together(
        lambda: _lock(Path(save)) if context.rank == 0 else None, f"`--save` ({save}) is not locked"
    )[0]
    try:
        yield
    finally:
        if context.rank == 0 and held is not None:
            os.close(held)


def check_save_folder(save: str | None) -> None:
    """Look whether another run writes to ``--save``, before any rank starts; rank 0 may call this.

    Raises:
        CheckpointError: another run holds the folder, or it cannot be written.
    """
    held = None if save is None else _lock(Path(save))
    if held is not None:
        os.close(held)


def _lock(save: Path) -> int | None:
    """Return the open lock file; None where the file system knows no locks.

    Raises:
        CheckpointError: another run holds it, or the folder cannot be written.
    """
    try:
        save.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(save / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"`--save` ({save}) cannot be written ({error.strerror}); give a folder that can."
        ) from error
    patience = time.monotonic() + _SECONDS_FOR_A_DYING_RUN
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() < patience:
                time.sleep(0.1)
                continue
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another run"
            os.close(descriptor)
            raise CheckpointError(
                f"`--save` ({save}) is being written by {holder}; wait for it, end it, or give "
                "another `--save`."
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s), so start no second run on it.", save, error)
            os.close(descriptor)
            return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor
