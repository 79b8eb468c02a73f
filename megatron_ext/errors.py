"""The four kinds of error that a user can meet, and how programs and their processes end.

The message of an error is one sentence: the name, the value, the rule, and what to do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

EXIT_CODE_INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell (128 + SIGINT)."""


class MegatronExtError(Exception):
    """The base of every error that this package raises on purpose, of one sentence or several."""

    def __init__(self, messages: str | Sequence[str]) -> None:
        self.messages = (messages,) if isinstance(messages, str) else tuple(messages)
        super().__init__("\n".join(self.messages))


class ConfigError(MegatronExtError):
    """A flag, or a combination of flags, that cannot be run."""


class DataError(MegatronExtError):
    """Input data that cannot be used."""


class CheckpointError(MegatronExtError):
    """A checkpoint that is partial, damaged, or does not fit the run."""


class DeviceNotSupported(MegatronExtError):
    """Something that only a GPU can answer, asked on a machine without one."""


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process at once, which suits the time of its imports.

    An interruption that is ignored, as in the background of a script, stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE_INTERRUPTED)


def run_program(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run the ``main`` of a program on the command line, and exit with its code.

    Ctrl-C lets it clean up after itself, and is then said in one word instead of a traceback.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        end_on_interrupt()
        print("interrupted", file=sys.stderr, flush=True)
        code = EXIT_CODE_INTERRUPTED
    sys.exit(code)


def say_to_stderr(line: str) -> None:
    """Print a line for a person, at once, where it does not mix with the output of a program."""
    print(line, file=sys.stderr, flush=True)


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent process is gone; leave if it is already."""
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
