"""The watchdog of a rank: a thread that tells what the rank does, even if the rank itself hangs.

It sleeps until a watcher, which looks for hangs, requests the rank's latest collectives through a
pipe; it then writes them to a file. Pipe and file are in the host folder, which the processes of a
machine share. A Python stack needs no thread: a signal makes faulthandler write it, even while a
library call holds the interpreter. Only the main thread's stack is written, because that thread
stands still while it runs the handler; reading the frames of a running thread could crash the
process. A process that a signal such as SIGSTOP has stopped answers neither request.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.disk.writing import open_new, open_to_append
from megatron_ext.extras.resilience.flight import Flight, read_flight, write_flight

STACK_SIGNAL = signal.SIGXFSZ
"""The signal that requests stacks; the kernel sends it only at a limit of file sizes."""
_ASK, _END = b"?", b"."


@dataclass(frozen=True)
class Evidence:
    """Answers of a rank that was asked what it does, and the stacks that it wrote when it crashed.

    Attributes:
        flight: the latest collectives; None without an answer.
        stack: the main thread's Python stack; "" without an answer.
        crash: the stacks of all threads, if the process has crashed; else "".
    """

    flight: Flight | None = None
    stack: str = ""
    crash: str = ""

    @staticmethod
    def of_crash(folder: Path, rank: int) -> Evidence:
        """Return evidence with only ``crash``: the stacks that rank ``rank`` wrote, if any."""
        return Evidence(crash=_text(_crash(folder, rank)))


@contextmanager
def watchdog(folder: Path | None, rank: int) -> Iterator[None]:
    """Inside the block, let other processes ask what this one does; answers go into ``folder``.

    An answer has the main thread's Python stack and the list of the latest collective operations,
    such as all-reduces. If the process crashes, for example by a segmentation fault, it writes the
    stacks of all threads without being asked. If ``folder`` is None, do nothing.
    """
    if folder is None:
        yield
        return
    _flight(folder, rank).unlink(missing_ok=True)
    pipe = _pipe(folder, rank)
    printed = faulthandler.is_enabled()
    with suppress(FileExistsError):
        os.mkfifo(pipe, 0o600)
    # Opened for writing as well, so that reads block even if no watcher has opened the pipe.
    descriptor = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
    thread = threading.Thread(target=_answer, args=(descriptor, folder, rank), daemon=True)
    # Opened to append, because a watcher empties the file before it asks.
    with open_to_append(_stack(folder, rank)) as stacks, open_new(_crash(folder, rank)) as crash:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False, chain=False)
        faulthandler.enable(file=crash, all_threads=True)
        thread.start()
        try:
            yield
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.enable() if printed else faulthandler.disable()
            os.write(descriptor, _END)
            thread.join()
            os.close(descriptor)


def _answer(descriptor: int, folder: Path, rank: int) -> None:
    while _END not in os.read(descriptor, 64):
        with suppress(Exception):  # a watcher can do without it, and the run must not fail
            write_flight(_flight(folder, rank))


def collect(folder: Path, pids: dict[int, int], seconds: float = 0.5) -> dict[int, Evidence]:
    """Request stacks and collectives from ranks; return the answers by rank.

    ``pids`` are the process ids by rank. The call waits for the answers, up to ``seconds``. A rank
    that has ended cannot answer, but may have written its stacks when it crashed.
    """
    requested = {rank: pid for rank, pid in pids.items() if _ask(folder, rank, pid)}
    end = time.monotonic() + seconds
    before = dict[int, int]()
    while time.monotonic() < end:
        time.sleep(0.01)
        sizes = {rank: _size(_stack(folder, rank)) for rank in requested}
        # The stacks are complete when they have stopped growing.
        written = sizes == before and all(sizes.values())
        if written and all(_flight(folder, rank).exists() for rank in requested):
            break
        before = sizes
    return {
        rank: Evidence(
            read_flight(_flight(folder, rank)) if rank in requested else None,
            _text(_stack(folder, rank)) if rank in requested else "",
            _text(_crash(folder, rank)),
        )
        for rank in pids
    }


def ask_flights(folder: Path, ranks: Iterable[int], seconds: float = 0.5) -> dict[int, Flight]:
    """Request the latest collectives, but no stacks, from ranks; return the answers by rank.

    Wait up to ``seconds``; ranks that have not answered by then are left out. No signal interrupts
    the ranks, since their watchdog threads answer.
    """
    requested = [rank for rank in ranks if _request(folder, rank)]
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(_flight(folder, r).exists() for r in requested):
        time.sleep(0.005)
    flights = {rank: read_flight(_flight(folder, rank)) for rank in requested}
    return {rank: flight for rank, flight in flights.items() if flight is not None}


def _ask(folder: Path, rank: int, pid: int) -> bool:
    """Request stacks and collectives from rank ``rank``, whose process id is ``pid``.

    Return whether the request was sent.
    """
    if not _request(folder, rank):
        return False
    try:
        os.truncate(_stack(folder, rank), 0)
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return False
    return True


def _request(folder: Path, rank: int) -> bool:
    _flight(folder, rank).unlink(missing_ok=True)
    try:
        descriptor = os.open(_pipe(folder, rank), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # the rank has no watchdog, or has ended
    try:
        os.write(descriptor, _ASK)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _pipe(folder: Path, rank: int) -> Path:
    return folder / f"requests_{rank}"


def _flight(folder: Path, rank: int) -> Path:
    return folder / f"flight_{rank}"


def _stack(folder: Path, rank: int) -> Path:
    return folder / f"stacks_{rank}.txt"


def _crash(folder: Path, rank: int) -> Path:
    return folder / f"crash_{rank}.txt"
