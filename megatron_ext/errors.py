"""The kinds of error that a user can meet, and how programs and their processes end.

An error's message is a sentence: what is wrong, its value, the broken rule, and what to do.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import NoReturn, TextIO

from megatron_ext import limits

EXIT_CODE_INTERRUPTED = 130
"""Exit code after Ctrl-C, the same as a shell's (128 + SIGINT)."""
EXIT_CODE_BROKEN_PIPE = 141
"""Exit code if nobody reads the output any more, the same as a shell's (128 + SIGPIPE)."""
EXIT_CODE_NOT_SAVED = 125
"""Exit code of a run with ``--exit-signal-handler`` that was asked to end, and has not saved."""
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals by which people and schedulers end a program; `--exit-signal` names one of them."""
SECONDS_OF_ONE_INTERRUPTION = 1.0
"""Time after Ctrl-C for which more of them count as the same."""


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

    If SIGINT is ignored, as for the background jobs of a script, it stays ignored. SIGTERM ends a
    program that is to save at a signal with the code that it has not, and any other as it does
    without this. From now on an error that comes from a limit of the operating system ends the
    program with a sentence.
    """
    sys.excepthook = _tell_limit
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    if "--exit-signal-handler" in sys.argv:
        signal.signal(signal.SIGTERM, _end_unsaved)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE_INTERRUPTED)


def _tell_limit(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print the limit that an error comes from in a sentence; print any other as Python does."""
    sentence = None if issubclass(kind, KeyboardInterrupt) else limits.sentence(error)
    if sentence is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        print(f"error: {sentence}", file=sys.stderr, flush=True)


def _end_unsaved(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"ended by SIGTERM before the first step\n")
    os._exit(EXIT_CODE_NOT_SAVED)


def interrupt_once(number: int = signal.SIGINT) -> None:
    """Let a signal, by default that of Ctrl-C, raise KeyboardInterrupt, once.

    More of them within a second change nothing, as people press twice, and a launcher passes on
    what the terminal has sent already. A later one ends the process without cleaning up. SIGTERM is
    ignored meanwhile, which torchrun sends after a second one. If the signal is ignored, it stays
    ignored.
    """
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    first = time.monotonic()

    def on_another(number: int, frame: FrameType | None) -> None:
        if time.monotonic() > first + SECONDS_OF_ONE_INTERRUPTION:
            _end(number, frame)

    signal.signal(signal.SIGTERM, pass_over)
    signal.signal(number, on_another)
    raise KeyboardInterrupt


def pass_over(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    With SIG_IGN instead, Python would print a traceback for a signal that came a moment before.
    """


def _on_unraisable(error: sys.UnraisableHookArgs) -> None:
    """End an interrupted process where the interruption cannot be raised, as in a destructor."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        _end(signal.SIGINT, None)
    sys.__unraisablehook__(error)


def run_program(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a program's ``main`` on the command line's arguments, and exit with the code it returns.

    Ctrl-C raises KeyboardInterrupt in ``main``, which may clean up. The process then prints
    "interrupted" instead of a traceback. It ends without one too if nobody reads its output any
    more, as after ``--help | head``.
    """
    interrupt_once()
    sys.unraisablehook = _on_unraisable
    code: str | int | None
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
        print("interrupted", file=sys.stderr, flush=True)
        code = EXIT_CODE_INTERRUPTED
    sys.exit(code)


def _has_reader(stream: TextIO) -> bool:
    """Return False if ``stream`` is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def say_to_stderr(line: str) -> None:
    """Print a line to stderr at once; stdout is left to the output of the program."""
    print(line, file=sys.stderr, flush=True)


_PR_SET_PDEATHSIG = 1
_AT_START = os.getpid(), os.getppid()
"""This process and its parent when this module was imported, which programs do first."""


def parent_at_start() -> int:
    """Return the process that has started this one, which may have ended during the imports."""
    process, parent = _AT_START
    return parent if process == os.getpid() else os.getppid()


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make Linux kill this process when the process ``parent`` ends; exit if it has ended already.

    Does nothing on other systems. The signal ``number`` may ask for an end instead of killing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def held_signals() -> Iterator[None]:
    """Keep back `STOP_SIGNALS` in this context, so that processes can be started in it.

    They start with the signals kept back, so that none reaches them before they are ready.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def release_signals() -> None:
    """Let `STOP_SIGNALS` reach this process, which was started within `held_signals`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def leave_signals_to(parent: int) -> None:
    """Ignore `STOP_SIGNALS` in this helper process, which ends when its ``parent`` does.

    A terminal, a scheduler and torchrun send signals to a whole group of processes. What follows is
    the parent's decision: a rank may need the helper to save.
    """
    ignore_stop_signals()
    release_signals()
    end_with_parent(parent)


def ignore_stop_signals() -> None:
    """Ignore `STOP_SIGNALS` from now on."""
    for number in STOP_SIGNALS:
        signal.signal(number, pass_over)


def loader_ends_with_parent() -> Callable[[int], None]:
    """Return a DataLoader's ``worker_init_fn`` for workers that leave signals to this process.

    Each worker ends when this process does. Without that the workers of a killed rank live on for
    seconds and print tracebacks.
    """
    return partial(_follow, os.getpid())


def _follow(parent: int, _worker: int) -> None:
    # A fork server, Python's default from 3.14 on, is the parent of its processes.
    if os.getppid() == parent:
        leave_signals_to(parent)
