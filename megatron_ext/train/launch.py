"""Starts the ranks of one machine and watches them; the first that fails ends all.

Under torchrun (``RANK`` is set) this process is a rank already. Otherwise a GPU run starts torch's
launcher. A CPU run forks its ranks after the one import of torch and megatron-core, so that the
first step is seconds away, and lets them meet through a file.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil
import torch

from megatron_ext.device import Device
from megatron_ext.errors import MachineFault, MegatronExtError, end_with_parent
from megatron_ext.faults.host import shared_host_folder
from megatron_ext.parallel.context import NoAnswer, contact_fault

EXIT_CODE_USER_ERROR = 2
EXIT_CODE_NO_ANSWER = 124
"""Exit code of a rank that waited too long for another, as of the program ``timeout``."""
EXIT_CODE_LOST_CONTACT = 123
"""Exit code of a rank whose connection to another one broke."""
GRACE_SECONDS = 3.0
"""Time between asking the ranks to end and killing them."""
SECONDS_FOR_RANK_0 = 20.0
"""Time for rank 0 to print an error of the flags; its exit then ends the other ranks."""
_SECONDS_FOR_RANK_0_OF_A_RUN = 1.0
_SECONDS_FOR_THE_CAUSE = 2.0
"""Time from the first rank that gave up waiting to the report of the ranks it waited for."""
_SECONDS_BETWEEN_LOOKS = 0.5
_FOLLOWS = (EXIT_CODE_NO_ANSWER, EXIT_CODE_LOST_CONTACT)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class _Supervisor:
    """Waits for ranks, given by process id; ends all if one fails or stays stopped too long."""

    def __init__(self, children: dict[int, int], timeout_minutes: float) -> None:
        self._children, self._timeout_minutes = children, timeout_minutes
        self._code = 0
        self._kill_at: float | None = None
        self._name_at: float | None = None
        self._look_at = 0.0
        self._stopped_since: dict[int, float] = {}

    def wait(self) -> int:
        """Wait for all ranks; return the exit code of the first that failed, or 0.

        A rank that failed by itself precedes those that failed only because another did not answer.
        """
        previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        try:
            while self._children:
                if not self._reap():
                    self._look(time.monotonic())
                    time.sleep(0.02)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._code

    def _reap(self) -> bool:
        """Record the exit of each rank that has ended by now, and return whether there was any."""
        before = len(self._children)
        for pid in list(self._children):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                # Another part of this process has taken the status: the rank counts as failed.
                done, status = pid, 1 << 8
            if done:
                self._ended(self._children.pop(pid), os.waitstatus_to_exitcode(status))
        return len(self._children) < before

    def _forward(self, number: int, _frame: FrameType | None = None) -> None:
        for pid in list(self._children):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _ended(self, rank: int, status: int) -> None:
        """Record a rank's exit, and end all ranks if it failed by itself.

        If the rank only gave up waiting for another one, all ranks end a little later. Until then
        the rank that caused the failure can report it.
        """
        if status in _FOLLOWS and self._code == 0:
            self._code = status
            self._name_at = time.monotonic() + _SECONDS_FOR_THE_CAUSE
        elif status not in (0, *_FOLLOWS) and self._code in (0, *_FOLLOWS):
            if self._kill_at is None:
                if status < 0:
                    _say(rank, f"was ended by {signal.Signals(-status).name}")
                # A shell's code for a process that a signal has ended.
                self._code = status if status > 0 else 128 - status
                self._end_all()

    def _look(self, now: float) -> None:
        """Do what is due at ``now``: kill ranks, report silent ranks, or look for stopped ranks."""
        if self._kill_at is not None:
            if now > self._kill_at:
                self._forward(signal.SIGKILL)
        elif self._name_at is not None:
            if now > self._name_at:
                self._name_the_silent()
        elif now > self._look_at:
            self._look_at = now + _SECONDS_BETWEEN_LOOKS
            self._find_stopped(now)

    def _name_the_silent(self) -> None:
        """Print which ranks the others waited for in vain, and end all ranks."""
        if self._code == EXIT_CODE_NO_ANSWER:
            for pid, rank in sorted(self._children.items(), key=lambda item: item[1]):
                why = "has been stopped by a signal" if _is_stopped(pid) else "does not answer"
                _say(
                    rank,
                    f"{why}: others have waited for it for `--distributed-timeout-minutes` "
                    f"({self._timeout_minutes:g}), so all ranks are ended; look at what it does, "
                    "or give more minutes.",
                )
        # The silent ranks have had their time.
        self._end_all(grace=0.5)

    def _find_stopped(self, now: float) -> None:
        """End all ranks if a signal has stopped one for longer than the timeout."""
        stopped = {pid: rank for pid, rank in self._children.items() if _is_stopped(pid)}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        for pid, rank in stopped.items():
            if now - self._stopped_since[pid] > 60 * self._timeout_minutes:
                _say(
                    rank,
                    "has been stopped by a signal (such as SIGSTOP) for longer than "
                    f"`--distributed-timeout-minutes` ({self._timeout_minutes:g}), so all ranks "
                    "are ended; let it go on by SIGCONT in time, or give more minutes.",
                )
                self._code = EXIT_CODE_NO_ANSWER
                self._end_all(grace=0.5)
                return

    def _end_all(self, grace: float = GRACE_SECONDS) -> None:
        self._kill_at = time.monotonic() + grace
        self._forward(signal.SIGTERM)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _say(rank: int, text: str) -> None:
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)


Main = Callable[[], "int | None"]


def refuse(error: MegatronExtError) -> int:
    """Print a user's error before the run starts, and return the program's exit code.

    All ranks read the same flags. Rank 0 prints at once, and its exit ends the other ranks. A rank
    that still runs after `SECONDS_FOR_RANK_0` prints too, for example if only that rank lacks a
    file. Under torchrun the process exits instead of returning.
    """
    text = "\n".join(f"error: {sentence}" for sentence in error.messages)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(SECONDS_FOR_RANK_0)
        text = f"[rank {os.environ['RANK']}] {text}"
    print(text, file=sys.stderr, flush=True)
    _tell_torchrun(text)
    if "RANK" in os.environ:
        _leave(EXIT_CODE_USER_ERROR)
    return EXIT_CODE_USER_ERROR


def _tell_torchrun(message: str) -> None:
    """Write an error to torchrun's error file for its summary, if torchrun started this process."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": message, "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": message, "extraInfo": shown}})
        Path(path).write_text(text, encoding="utf-8")


def run_rank(main: Main) -> int:
    """Run one rank; a failure is printed with the rank's number and becomes an exit code.

    A MegatronExtError, or an error caused by the failure of another rank, is printed as a sentence.
    Any other error is printed with its traceback. If all ranks raise the same MegatronExtError,
    rank 0 prints it first, and its exit ends the others.
    """
    try:
        return main() or 0
    except MegatronExtError as error:
        message, code = str(error), EXIT_CODE_USER_ERROR
        code = 1 if isinstance(error, MachineFault) else code
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_SECONDS_FOR_RANK_0_OF_A_RUN)
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0
        fault = contact_fault(error)
        message, code = traceback.format_exc(), 1
        if fault is not None:
            message, timed_out = fault.value, fault is NoAnswer.TIMEOUT
            code = EXIT_CODE_NO_ANSWER if timed_out else EXIT_CODE_LOST_CONTACT
    # One write keeps the text in one piece, as other ranks print too.
    text = f"[rank {os.environ.get('RANK', '0')}] {message}"
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    _tell_torchrun(text)
    return code


@shared_host_folder()
def launch(main: Main, *, nproc_per_node: int, device: Device, timeout_minutes: float = 10) -> int:
    """Run ``main`` on every rank of this machine, and return the first failed rank's exit code.

    Starts ``nproc_per_node`` ranks unless torchrun has started them already.
    """
    if "RANK" in os.environ:
        code = run_rank(main)
        if code:
            _leave(code)
        return code
    if device.kind == "cuda" and nproc_per_node > 1:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", f"--nproc-per-node={nproc_per_node}", *sys.argv])
        return 0
    if nproc_per_node > 1:
        return fork_ranks(main, nproc_per_node, timeout_minutes=timeout_minutes)
    ours = _environment(0, 1)
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        return run_rank(main)
    finally:
        # The process must not look started by torchrun any more.
        for name in ours:
            del os.environ[name]
        os.environ.update(before)


def _environment(rank: int, world_size: int) -> dict[str, str]:
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes}


@contextmanager
def _meeting_place() -> Iterator[str]:
    """Yield the URL of a file through which forked ranks find each other.

    On Linux the file has no name, so it disappears with the last process, even a killed one.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create("rendezvous")
        try:
            yield f"file:///proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.TemporaryDirectory(prefix="megatron_ext_") as folder:
        yield f"file://{folder}/rendezvous"


def _leave(code: int) -> None:
    """Flush the output, and end the process with exit ``code`` without waiting for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_ranks(main: Main, world_size: int, *, timeout_minutes: float = 10) -> int:
    """Fork ranks, run ``main`` on each, and return the first failed rank's exit code, or 0."""
    parent = os.getpid()
    with _meeting_place() as address:
        children: dict[int, int] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        # Ranks need not look for garbage among the objects that they share with this process.
        gc.freeze()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _child(main, rank, world_size, address, parent)
            children[pid] = rank
        gc.unfreeze()
        return _Supervisor(children, timeout_minutes).wait()


def _child(main: Main, rank: int, world_size: int, address: str, parent: int) -> None:
    """Run a forked rank; end its process with the rank's exit code."""
    code = 1
    try:
        end_with_parent(parent)
        os.environ.update(_environment(rank, world_size), MEGATRON_EXT_INIT_METHOD=address)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        code = run_rank(main)
    except KeyboardInterrupt:
        # The terminal interrupts a rank, and then the launcher does it again.
        code = 130
    finally:
        _leave(code)
