"""Processes that end with the process that forked them, even where that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent is gone, and leave if it is gone already.

    Args:
        parent: the process that forked this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def loader_ends_with_parent() -> Callable[[int], None]:
    """Return a ``worker_init_fn`` for loaders of data that this process starts.

    Without it the loaders of a killed rank live on for seconds, and tell of it in tracebacks.
    """
    return partial(_end_loader, os.getpid())


def _end_loader(parent: int, _worker: int) -> None:
    # A fork server, Python's default from 3.14 on, is the parent of its processes.
    if os.getppid() == parent:
        end_with_parent(parent)
