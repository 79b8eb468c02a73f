"""Starting the ranks of one machine: forked on a CPU, through torch's launcher on GPUs.

Under torchrun (``RANK`` is set) this process is a rank already. Otherwise a CPU run forks its ranks
after the one import of torch and megatron-core, so that the first step is seconds away, and lets
them meet through a file. The first rank that fails ends all.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from types import FrameType

import torch

from megatron_ext.device import Device
from megatron_ext.errors import MegatronExtError

EXIT_CODE_USER_ERROR = 2
GRACE_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1

Main = Callable[[], "int | None"]


def run_rank(main: Main) -> int:
    """Run one rank; a failure is printed with the rank's number and becomes an exit code.

    What this package raises on purpose is shown as its sentence, anything else with its
    traceback. The process then leaves at once, without waiting for collectives that its peers
    will never join.
    """
    try:
        return main() or 0
    except MegatronExtError as error:
        message, code = str(error), EXIT_CODE_USER_ERROR
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0
        message, code = traceback.format_exc(), 1
    print(f"[rank {os.environ.get('RANK', '0')}] {message}", file=sys.stderr, flush=True)
    return code


def launch(main: Main, *, nproc_per_node: int, device: Device) -> int:
    """Run ``main`` on every rank of this machine.

    Args:
        main: one rank's work; returns its exit code, None means 0.
        nproc_per_node: ranks to start, where torchrun has not started them.
        device: decides how they are started.

    Returns:
        The exit code: 0, or that of the first rank that failed.
    """
    if "RANK" in os.environ:
        code = run_rank(main)
        if code:
            _leave(code)
        return code
    if device.kind == "cuda" and nproc_per_node > 1:
        return _torch_launcher(nproc_per_node)
    if nproc_per_node == 1:
        with tempfile.TemporaryDirectory(prefix="megatron_ext_") as folder:
            os.environ.update(_environment(0, 1, folder))
            return run_rank(main)
    return fork_ranks(main, nproc_per_node)


def _torch_launcher(nproc_per_node: int) -> int:
    """Start this program again under torch's elastic launcher, one process for each GPU."""
    from torch.distributed.run import main as torchrun

    torchrun(["--standalone", f"--nproc-per-node={nproc_per_node}", *sys.argv])
    return 0


def _environment(rank: int, world_size: int, folder: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MEGATRON_EXT_INIT_METHOD": f"file://{folder}/rendezvous",
    }


def _leave(code: int) -> None:
    """End the process now; what is buffered is written, nothing waits for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_ranks(main: Main, world_size: int) -> int:
    """Fork the ranks of this machine, run ``main`` on each, and wait; returns the exit code."""
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="megatron_ext_") as folder:
        children: dict[int, int] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        # Ranks need not look for garbage among what they share with this process.
        gc.freeze()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _child(main, rank, world_size, folder, parent)
            children[pid] = rank
        gc.unfreeze()
        return _wait(children)


def _child(main: Main, rank: int, world_size: int, folder: str, parent: int) -> None:
    """One forked rank; never returns."""
    _die_with_parent(parent)
    os.environ.update(_environment(rank, world_size, folder))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    _leave(run_rank(main))


def _die_with_parent(parent: int) -> None:
    """Ask Linux to end this process when the launcher is gone, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _wait(children: dict[int, int]) -> int:
    """Wait for all ranks; the first failure ends the others within seconds."""

    def forward(number: int, _frame: FrameType | None) -> None:
        for pid in list(children):
            _kill(pid, number)

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    previous = {number: signal.signal(number, forward) for number in watched}
    code = 0
    deadline = None
    try:
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                rank = children.pop(pid)
                failed = os.waitstatus_to_exitcode(status)
                if failed and code == 0:
                    code = _exit_code(failed, rank)
                    deadline = time.monotonic() + GRACE_SECONDS
                    forward(signal.SIGTERM, None)
                continue
            if deadline is not None and time.monotonic() > deadline:
                forward(signal.SIGKILL, None)
            time.sleep(0.02)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code


def _exit_code(status: int, rank: int) -> int:
    """A shell's exit code; death by a signal is said, since the rank could not say it."""
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    print(f"[rank {rank}] was ended by {name}", file=sys.stderr, flush=True)
    return 128 - status


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
