"""The kinds of error that a user can meet, and how programs and their processes end.

An error's message is a sentence: what is wrong, its value, the broken rule, and what to do.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn, TextIO

EXIT_CODE_INTERRUPTED = 130
"""Exit code after Ctrl-C, the same as a shell's (128 + SIGINT)."""

EXIT_CODE_BROKEN_PIPE = 141
"""Exit code if nobody reads the output any more, the same as a shell's (128 + SIGPIPE)."""


class MegatronExtError(Exception):
    """The base class of every error that this package raises on purpose; holds its messages."""

    def __init__(self, messages: str | Sequence[str]) -> None:
        self.messages = (messages,) if isinstance(messages, str) else tuple(messages)
        super().__init__("\n".join(self.messages))


class ConfigError(MegatronExtError):
    """A flag, or a combination of flags, that cannot be run."""


class DataError(MegatronExtError):
    """Input data that cannot be used."""


class CheckpointError(MegatronExtError):
    """A checkpoint that is partial, damaged, or does not fit the run."""


class MachineFault(MegatronExtError):
    """A fault of a machine: no error of the user's, so that a restart makes sense."""


class DeviceNotSupported(MegatronExtError):
    """A call that needs a GPU, on a machine without one."""


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process at once, without cleaning up; meant for the time of slow imports.

    If SIGINT is ignored, as for the background jobs of a script, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE_INTERRUPTED)


def run_program(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a program's ``main`` on the command line's arguments, and exit with the code it returns.

    Ctrl-C raises KeyboardInterrupt in ``main``, which may clean up. The process then prints
    "interrupted" instead of a traceback. It ends without one too if nobody reads its output any
    more, as after ``--help | head``.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code: object
    try:
        try:
            code = main(sys.argv[1:])
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        if _has_reader(sys.stdout):
            raise
        # Python would fail once more when it flushes the stream at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_CODE_BROKEN_PIPE
    except KeyboardInterrupt:
        end_on_interrupt()
        print("interrupted", file=sys.stderr, flush=True)
        code = EXIT_CODE_INTERRUPTED
    sys.exit(code)  # type: ignore[arg-type]


def _has_reader(stream: TextIO) -> bool:
    """Return False if ``stream`` is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def say_to_stderr(line: str) -> None:
    """Print a line to stderr at once; stdout is left to the output of the program."""
    print(line, file=sys.stderr, flush=True)


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Make Linux kill this process when the process ``parent`` ends; exit if it has ended already.

    Does nothing on other systems.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def loader_ends_with_parent() -> Callable[[int], None]:
    """Return a DataLoader's ``worker_init_fn`` that ends each worker when this process ends.

    Without it the workers of a killed rank live on for seconds and print tracebacks.
    """
    return partial(_end_loader, os.getpid())


def _end_loader(parent: int, _worker: int) -> None:
    # A fork server, Python's default from 3.14 on, is the parent of its processes.
    if os.getppid() == parent:
        end_with_parent(parent)
