"""A lock that lets one run at a time write to a folder of checkpoints.

It is a POSIX lock. The kernel frees it when rank 0 ends, however it ends, and shared file systems
know it. Processes that rank 0 forks, such as loaders of data, do not keep it when rank 0 is gone,
as they would keep a lock of flock or filelock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import on_first_rank
from megatron_ext.parallel.context import ParallelContext

LOCK = ".lock"
_SECONDS_FOR_A_DYING_RUN = 2.0

logger = logging.getLogger(__name__)


@contextmanager
def hold_save_folder(save: str | None, context: ParallelContext) -> Iterator[None]:
    """Keep other runs from writing to ``--save``; all ranks call this together.

    Other runs may load from the folder.

    Raises:
        CheckpointError: on every rank, where another run holds the folder, or it cannot be written.
    """
    if save is None:
        yield
        return
    held = on_first_rank(lambda: _lock(Path(save)), f"`--save` ({save}) is not locked")
    try:
        yield
    finally:
        if context.rank == 0 and held is not None:
            os.close(held)


def check_save_folder(save: str | None) -> None:
    """Check, before any rank starts, that no other run writes to ``--save``.

    Raises:
        CheckpointError: another run holds the folder, or it cannot be written.
    """
    held = None if save is None else _lock(Path(save))
    if held is not None:
        os.close(held)


def _lock(save: Path) -> int | None:
    """Lock the folder and return the open lock file; None where the file system knows no locks."""
    try:
        save.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(save / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
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
