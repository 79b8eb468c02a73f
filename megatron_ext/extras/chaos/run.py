"""Runs a training program in a fork of this process, with a deadline.

This process has already imported everything, so a run starts at once instead of after five seconds.
The fork runs the same ``main`` as the program, with the same arguments.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_ext.disk.writing import open_to_append
from megatron_ext.errors import end_with_parent
from megatron_ext.train.main import main
from megatron_ext.train.task import Task, TaskChoice

_SECONDS_FOR_STACKS = 1.0
_SECONDS_FOR_OUTPUT = 2.0
"""Seconds to wait for the last output after the launcher has ended."""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        code: its exit code; None if it was killed at the deadline.
        seconds: how long it ran.
        processes: what each process was doing at the deadline, as text.
        left: processes that the run left behind, as text.
        at: when it ended, in seconds since 1970.
    """

    code: int | None
    seconds: float
    at: float
    processes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def run_program(
    program: Task | TaskChoice,
    words: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    deadline: float,
) -> Ended:
    """Run a program with the arguments ``words``, and return how it ended.

    The program's output goes through a pipe to this process, which writes it to the file ``log``:
    a limit of file sizes in the program, which a fault may set, does not cut the log. After
    ``deadline`` seconds, all processes of the program are described and killed. ``environment`` has
    variables to add to those of this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    parent = os.getpid()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(program, words, writer, environment, parent)
    os.close(writer)
    try:
        return _wait(pid, reader, log, started, deadline)
    except BaseException:
        _kill(_session(pid))
        raise
    finally:
        os.close(reader)


def _child(
    program: Task | TaskChoice,
    words: Sequence[str],
    output: int,
    environment: Mapping[str, str],
    parent: int,
) -> None:
    """Run the program in this forked process, and exit with its exit code.

    Its output goes to the descriptor ``output``; it is killed if the process ``parent`` ends.
    """
    code = 1
    try:
        os.setsid()
        end_with_parent(parent)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(environment)
        code = main(program, list(words))
    except BaseException as error:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, reader: int, log: Path, started: float, deadline: float) -> Ended:
    with open_to_append(log, "ab") as file:
        while True:
            _copy(reader, file, 0.02)
            done, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - started
            now = time.time()
            if done:
                left = _session(pid)
                texts = tuple(_describe(process) for process in left)
                _kill(left)
                end = time.monotonic() + _SECONDS_FOR_OUTPUT
                while time.monotonic() < end and _copy(reader, file, 0.02):
                    pass
                return Ended(os.waitstatus_to_exitcode(status), seconds, now, left=texts)
            if seconds > deadline:
                running = _session(pid)
                texts = tuple(_describe(process) for process in running)
                _kill(running)
                os.waitpid(pid, 0)
                return Ended(None, seconds, now, processes=texts)


def _copy(reader: int, file: object, seconds: float) -> bool:
    """Wait up to ``seconds`` for output from a pipe, and copy a block of it to ``file``.

    Return False once the pipe is closed.
    """
    if not select.select([reader], [], [], seconds)[0]:
        return True
    block = os.read(reader, 1 << 16)
    file.write(block)  # type: ignore[attr-defined]
    file.flush()  # type: ignore[attr-defined]
    return bool(block)


def _session(pid: int) -> list[psutil.Process]:
    """Return the processes of the session that ``pid`` leads or led."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if os.getsid(process.pid) == pid and not zombie:
                processes.append(process)
    return processes


def _describe(process: psutil.Process) -> str:
    """Return the state of a process, and the kernel function in which each of its threads waits."""
    with suppress(psutil.Error, OSError):
        places = []
        for thread in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
            with suppress(OSError):
                places.append((thread / "wchan").read_text(encoding="utf-8") or "running")
        return f"process {process.pid} ({process.status()}): {', '.join(places[:8])}"
    return f"process {process.pid} has ended"


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error, ProcessLookupError):
            process.send_signal(signal.SIGKILL)
