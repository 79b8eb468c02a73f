"""Starting the ranks of one machine: forked on a CPU, through torch's launcher on GPUs.

Under torchrun (``RANK`` is set) this process is a rank already. Otherwise a CPU run forks its ranks
after the one import of torch and megatron-core, so that the first step is seconds away, and lets
them meet through a file. The first rank that fails ends all.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_ext.device import Device
from megatron_ext.device.processes import end_with_parent
from megatron_ext.errors import MegatronExtError
from megatron_ext.layout.context import NoAnswer, contact_fault
from megatron_ext.training.supervise import (
    EXIT_CODE_LOST_CONTACT,
    EXIT_CODE_NO_ANSWER,
    Supervisor,
)

EXIT_CODE_USER_ERROR = 2

Main = Callable[[], "int | None"]


def run_rank(main: Main) -> int:
    """Run one rank; a failure is printed with the rank's number and becomes an exit code.

    What this package raises on purpose is shown as its sentence, and so is what the failure of
    another rank causes; anything else is shown with its traceback. The process then leaves at
    once, without waiting for collectives that its peers will never join.
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
        message, code = _described(error)
    # In one piece, since other ranks print too.
    sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {message}\n")
    sys.stderr.flush()
    return code


def _described(error: BaseException) -> tuple[str, int]:
    """Message and exit code of a failure that nobody raised on purpose."""
    fault = contact_fault(error)
    if fault is None:
        return traceback.format_exc(), 1
    code = EXIT_CODE_NO_ANSWER if fault is NoAnswer.TIMEOUT else EXIT_CODE_LOST_CONTACT
    return fault.value, code


def launch(main: Main, *, nproc_per_node: int, device: Device, timeout_minutes: float = 10) -> int:
    """Run ``main`` on every rank of this machine.

    Args:
        main: one rank's work; returns its exit code, None means 0.
        nproc_per_node: ranks to start, where torchrun has not started them.
        device: decides how they are started.
        timeout_minutes: ``--distributed-timeout-minutes``.

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
        with _set_in_environment(_environment(0, 1)):
            return run_rank(main)
    return fork_ranks(main, nproc_per_node, timeout_minutes=timeout_minutes)


def _torch_launcher(nproc_per_node: int) -> int:
    """Start this program again under torch's elastic launcher, one process for each GPU."""
    from torch.distributed.run import main as torchrun

    torchrun(["--standalone", f"--nproc-per-node={nproc_per_node}", *sys.argv])
    return 0


def _environment(rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


@contextmanager
def _set_in_environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for a while; a process that goes on must not look started by torchrun."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _meeting_place() -> Iterator[str]:
    """Give the address of a file by which forked ranks find each other.

    On Linux the file has no name, so that it is gone with the last process, however that ends.
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
    """End the process now; what is buffered is written, nothing waits for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_ranks(main: Main, world_size: int, *, timeout_minutes: float = 10) -> int:
    """Fork the ranks of this machine, run ``main`` on each, and wait; returns the exit code."""
    parent = os.getpid()
    with _meeting_place() as address:
        children: dict[int, int] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        # Ranks need not look for garbage among what they share with this process.
        gc.freeze()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _child(main, rank, world_size, address, parent)
            children[pid] = rank
        gc.unfreeze()
        return Supervisor(children, timeout_minutes).wait()


def _child(main: Main, rank: int, world_size: int, address: str, parent: int) -> None:
    """One forked rank; never returns."""
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
