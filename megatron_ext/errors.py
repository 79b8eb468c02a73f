"""The kinds of error that a user can meet, and how programs and their processes end.

A message is a sentence with the flag or file at fault, its value, the broken rule and the remedy.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from megatron_ext import limits

if TYPE_CHECKING:
    from typing_extensions import Self

EXIT_CODE_INTERRUPTED = 130
"""Exit code after Ctrl-C, the same as a shell's (128 + SIGINT)."""
EXIT_CODE_BROKEN_PIPE = 141
"""Exit code if the reader of the output has gone, the same as a shell's (128 + SIGPIPE)."""
EXIT_CODE_NOT_SAVED = 125
"""Exit code of a run with ``--exit-signal-handler`` that was stopped before it could save."""
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals with which people and schedulers stop a program; `--exit-signal` names one of them."""
KERNELS = {"transformer_engine": "transformer-engine", "flash_attn": "flash-attn", "apex": "apex"}
"""Packages of fused kernels, which megatron-core imports if they are installed -> their names on
PyPI."""
WIDEST_LINE = 100
"""The most columns of a line of text for people."""
SECONDS_OF_ONE_INTERRUPTION = 1.0
"""Seconds after a Ctrl-C in which further ones are taken for the same interruption."""


_FLAG_IN_CODE = re.compile(r"`(--[\w-]+)")


class FlagError(str):
    """A sentence about an error in the flags, with its parts as attributes.

    Since it is a str, it can be used wherever an error is a plain sentence. For example,
    ``FlagError("--min-lr", 0.1, "must be at most `--lr` (0.01)", "use 0.001")`` is the text
    "`--min-lr` (0.1) must be at most `--lr` (0.01); use 0.001."

    Attributes:
        subject: the flag at fault in backticks.
        value: the flag's value as it is shown; None if none is shown.
        rule: the broken rule, with every flag that it depends on in backticks.
        remedy: what to do, which may also be a question; "" for none.
        flags: all flags in the subject, the rule and the remedy.
    """

    subject: str
    value: str | None
    rule: str
    remedy: str
    flags: frozenset[str]

    def __new__(cls, flag: str, value: object, rule: str, remedy: str = "") -> FlagError:
        """Build the sentence from the subject, the broken rule and the remedy.

        Args:
            flag: the flag at fault, such as ``--lr`` or ``--optimizer sgd``, which is put in
                backticks. A text that does not start with ``--`` is used unchanged as the beginning
                of the sentence; flags in it must already be in backticks.
            value: the flag's value, shown in parentheses; None shows none.
            rule: the broken rule, such as "must be at least 1".
            remedy: what the user should do; "" leaves it out.
        """
        subject = f"`{flag}`" if flag.startswith("--") else flag
        shown = "" if value is None else f" ({value})"
        advice = f"; {remedy}" if remedy else ""
        sentence = f"{subject}{shown} {rule}{advice}"
        error = super().__new__(cls, sentence if sentence.endswith("?") else f"{sentence}.")
        error.subject = subject
        error.value = None if value is None else str(value)
        error.rule = rule
        error.remedy = remedy
        error.flags = frozenset(_FLAG_IN_CODE.findall(f"{subject} {rule} {remedy}"))
        return error

    def __getnewargs__(self) -> tuple[str, str | None, str, str]:  # type: ignore[override]
        return self.subject, self.value, self.rule, self.remedy

    def with_note(self, note: str) -> FlagError:
        """Return the error with a note in parentheses at the end of its sentence."""
        if self.remedy:
            return FlagError(self.subject, self.value, self.rule, f"{self.remedy} ({note})")
        return FlagError(self.subject, self.value, f"{self.rule} ({note})")

    def renamed(self, flag: str, new: str) -> FlagError:
        """Return the error with the flag ``new`` in place of ``flag``."""
        subject, rule, remedy = (
            text.replace(f"`{flag}`", f"`{new}`") for text in (self.subject, self.rule, self.remedy)
        )
        return FlagError(subject, self.value, rule, remedy)


def exclusive(*given: str | tuple[str, object], remedy: str = "give one") -> FlagError:
    """Return the error for flags that exclude each other.

    Each of ``given`` is a flag or a pair (flag, value); ``remedy`` says what the user should do.
    """
    shown = [f"`{x}`" if isinstance(x, str) else f"`{x[0]}` ({x[1]})" for x in given]
    return FlagError(" and ".join(shown), None, "exclude each other", remedy)


def flags_of(error: str) -> frozenset[str]:
    """Return the flags that an error names; an empty set if the error is not a `FlagError`."""
    return error.flags if isinstance(error, FlagError) else frozenset()


class MegatronExtError(Exception):
    """The base class of every error that this package raises on purpose.

    ``messages`` are the sentences of the error; a sentence about flags is a `FlagError`.
    """

    def __init__(self, messages: str | Sequence[str]) -> None:
        self.messages = (messages,) if isinstance(messages, str) else tuple(messages)
        super().__init__("\n".join(self.messages))

    @classmethod
    def about(cls, flag: str, value: object, rule: str, remedy: str = "") -> Self:
        """Return an exception whose only message is the `FlagError` of the same arguments."""
        return cls(FlagError(flag, value, rule, remedy))


class ConfigError(MegatronExtError):
    """A flag or a combination of flags is not allowed."""


class DataError(MegatronExtError):
    """Input data cannot be used."""


class CheckpointError(MegatronExtError):
    """A checkpoint is incomplete, damaged, or does not fit the run."""


class MachineFault(MegatronExtError):
    """A machine has failed. The user made no mistake, so a restart makes sense."""


class DeviceNotSupported(MegatronExtError):
    """A call needs a GPU, but this machine has none."""


def run_all(checks: Sequence[Callable[[], Any]]) -> tuple[list[Any], list[MegatronExtError]]:
    """Run all checks; return their results, and the errors of those that raised one."""
    results: list[Any] = []
    errors: list[MegatronExtError] = []
    for check in checks:
        try:
            results.append(check())
        except MegatronExtError as error:
            errors.append(error)
    return results, errors


def all_of(checks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all checks, and return their results; if some fail, raise their errors together."""
    results, errors = run_all(checks)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError([sentence for error in errors for sentence in error.messages])
    return results


def end_on_interrupt() -> None:
    """Make Ctrl-C end this process at once, without cleanup; meant for slow imports.

    If SIGINT is ignored, as in background jobs of a script, it stays ignored. With
    ``--exit-signal-handler`` on the command line, SIGTERM ends the process with
    `EXIT_CODE_NOT_SAVED`; otherwise SIGTERM is left as it is. From now on, an uncaught error caused
    by a limit of the system, such as on open files, or by a broken package of `KERNELS` is printed
    as a sentence without a traceback.
    """
    sys.excepthook = _tell_uncaught
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    if "--exit-signal-handler" in sys.argv:
        signal.signal(signal.SIGTERM, _end_unsaved)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE_INTERRUPTED)


def _tell_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an uncaught error, in place of ``sys.excepthook``.

    An error from a limit of the system, such as on open files, or from the import of a broken
    package is printed as one sentence; any other gets Python's traceback.
    """
    sentence = None
    if issubclass(kind, Exception):
        sentence = limits.sentence(error) or _broken_package(error, traceback)
    if sentence is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        tell_errors([sentence])


def _broken_package(error: BaseException, traceback: TracebackType | None) -> str | None:
    """Return a sentence if an error ended the import of one of `KERNELS`, else None."""
    while traceback is not None:
        frame = traceback.tb_frame
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in KERNELS and frame.f_code.co_name == "<module>":
            return (
                f"The package {package} is installed but cannot be imported "
                f"({type(error).__name__}: {error}), and megatron-core imports it wherever it is "
                "installed; install it anew for this version of torch, or run `pip uninstall "
                f"{KERNELS[package]}`."
            )
        traceback = traceback.tb_next
    return None


def _end_unsaved(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"ended by SIGTERM before the first step\n")
    os._exit(EXIT_CODE_NOT_SAVED)


def interrupt_once(number: int = signal.SIGINT) -> None:
    """Make a signal (by default Ctrl-C's) raise KeyboardInterrupt, but only the first time.

    Repeats within a second are ignored: people press Ctrl-C twice, and a launcher passes on the
    terminal's signal. A later repeat ends the process without cleanup. SIGTERM, which torchrun
    sends after a second Ctrl-C, is ignored once the first signal has come. If the signal is ignored
    when this is called, it stays ignored.
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

    It is used instead of SIG_IGN: Python prints a traceback if a signal has arrived, but is not yet
    handled, when its handler becomes SIG_IGN.
    """


def _on_unraisable(error: sys.UnraisableHookArgs) -> None:
    """End the process if KeyboardInterrupt could not be raised, for example in a destructor."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        _end(signal.SIGINT, None)
    sys.__unraisablehook__(error)


def run_program(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a program's ``main`` with the command line's arguments, and exit with its return value.

    Ctrl-C raises KeyboardInterrupt in ``main``, which may clean up. The process then prints
    "interrupted" instead of a traceback. It also exits without a traceback if the reader of its
    output has gone, as after ``--help | head``.
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
        # Otherwise Python would fail again when it flushes the stream at exit.
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
    """Print a line to stderr at once; stdout is reserved for the program's output.

    On a terminal the line is broken between words; see `broken_for`.
    """
    print(broken_for(sys.stderr, line), file=sys.stderr, flush=True)


def tell_errors(sentences: Iterable[str]) -> None:
    """Print errors to stderr, a line for each sentence."""
    for sentence in sentences:
        say_to_stderr(f"error: {sentence}")


def did_you_mean(
    word: str,
    known: Iterable[str],
    *,
    count: int = 1,
    cutoff: float = 0.6,
    shown: Callable[[str], str] = str,
) -> str:
    """Return a question with the names in ``known`` that resemble ``word`` most; "" if none does.

    There are at most ``count`` of them, each as similar as difflib's ``cutoff`` asks (from 0 to 1),
    and as ``shown`` returns it.
    """
    import difflib

    near = difflib.get_close_matches(word, list(known), count, cutoff)
    return f"did you mean {' or '.join(map(shown, near))}?" if near else ""


def terminal_width() -> int:
    """Return the columns of a terminal's lines: `WIDEST_LINE`, or fewer if it is narrower."""
    return min(WIDEST_LINE, shutil.get_terminal_size((WIDEST_LINE, 24)).columns)


def broken_for(stream: TextIO, line: str) -> str:
    """Return a line as it is printed to ``stream``.

    For a terminal, it is broken between words into lines of at most `WIDEST_LINE` columns. For logs
    and pipes, whose readers look for whole lines, it stays whole.
    """
    if not stream.isatty():
        return line
    import textwrap

    broken = textwrap.TextWrapper(
        terminal_width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(broken.fill(part) for part in line.split("\n"))


_PR_SET_PDEATHSIG = 1
_AT_START = os.getpid(), os.getppid()
"""Ids of this process and its parent when this module was imported; programs import it first."""


def parent_at_start() -> int:
    """Return the process id of the parent that started this process, even if it has ended since."""
    process, parent = _AT_START
    return parent if process == os.getpid() else os.getppid()


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make Linux send the signal ``number`` to this process when the process ``parent`` ends.

    Exit at once if ``parent`` has ended already; do nothing on other systems. A signal other than
    SIGKILL lets this process clean up.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def held_signals() -> Iterator[None]:
    """Block `STOP_SIGNALS` within the context, so that processes started in it inherit the block.

    Such a process sets its handlers and then calls `release_signals`; no signal arrives earlier.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def release_signals() -> None:
    """Unblock `STOP_SIGNALS` in a process that was started within `held_signals`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def leave_signals_to(parent: int) -> None:
    """Ignore `STOP_SIGNALS` in this helper process, and end it when the process ``parent`` ends.

    A terminal, a scheduler and torchrun send signals to a whole process group. The parent decides
    what to do: it may be a rank that needs the helper to save.
    """
    ignore_stop_signals()
    release_signals()
    end_with_parent(parent)


def ignore_stop_signals() -> None:
    """Ignore `STOP_SIGNALS` in this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, pass_over)


def loader_ends_with_parent() -> Callable[[int], None]:
    """Return a ``worker_init_fn`` for a DataLoader, with which workers end when their parent does.

    The workers also ignore stop signals, which the parent handles. Without the function, the
    workers of a killed rank would live on for seconds and print tracebacks.
    """
    return partial(_follow, os.getpid())


def _follow(parent: int, _worker: int) -> None:
    # With a fork server, Python's default since 3.14, the workers' parent is the server.
    if os.getppid() == parent:
        leave_signals_to(parent)
    sys.excepthook = _unless_parent_ended


def _unless_parent_ended(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error of a data loader's worker, except a ConnectionError or an EOFError.

    These two only show that the parent ended while a thread of the worker was sending it a tensor.
    """
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
