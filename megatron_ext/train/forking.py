"""Starts the ranks of a run that has several, or one that may be restarted, on this machine.

A GPU run starts torch's launcher. A CPU run forks its ranks after importing torch and megatron-core
once, so that the first step is only seconds away. The forked ranks find each other through a file.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_ext.device import Device
from megatron_ext.errors import (
    EXIT_CODE_INTERRUPTED,
    EXIT_CODE_NOT_SAVED,
    end_with_parent,
    held_signals,
    release_signals,
)
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.rank import Main, environment_of, leave, run_rank, threads_of_rank
from megatron_ext.train.supervision import Supervision, supervision_of_ranks

if TYPE_CHECKING:
    from megatron_ext.train.supervisor import SignalForwarder


def start_ranks(
    main: Main,
    nproc_per_node: int,
    device: Device,
    timeout_minutes: float,
    supervision: Supervision,
    main_of: Callable[[int], Main],
    save: str | None,
    exit_signal: ExitSignal,
) -> int:
    """Start ranks on this machine, and return the exit code of the launch.

    `launch.launch`, which explains the arguments, runs a single rank that is never restarted.
    """
    restarts = supervision.max_restarts
    if device.kind == "cuda":
        from megatron_ext.train.torchrun import run_torchrun

        options = ["--standalone", f"--nproc-per-node={nproc_per_node}"]
        if restarts is not None:
            options.append(f"--max-restarts={restarts}")
        if exit_signal.number is not None:
            # Time for ranks to save after a signal; torchrun's default is 30 seconds.
            options.append(f"--shutdown-timeout={round(60 * timeout_minutes)}")
        if exit_signal.came:
            return EXIT_CODE_NOT_SAVED
        return run_torchrun([*options, *sys.argv])
    if restarts is not None:
        return supervision.run(
            _forked, main_of, timeout_minutes=timeout_minutes, exit_signal=exit_signal
        )
    return fork_ranks(
        main,
        nproc_per_node,
        timeout_minutes=timeout_minutes,
        save=save,
        exit_signal=exit_signal,
        supervision=supervision,
    )


def fork_ranks(
    main: Main,
    world_size: int,
    *,
    timeout_minutes: float = 10,
    save: str | None = None,
    exit_signal: ExitSignal | None = None,
    supervision: Supervision | None = None,
) -> int:
    """Fork ranks, run ``main`` on each, and return the first failed rank's exit code, or 0.

    A supervisor from ``supervision`` watches them; `launch.launch` explains the arguments.
    """
    supervision = supervision or supervision_of_ranks()
    from megatron_ext.train.supervisor import SignalForwarder

    with SignalForwarder(exit_signal) as forwarder:
        supervisor = supervision.supervisor(world_size, forwarder, timeout_minutes, save)
        with _forked(main, world_size, forwarder, {}):
            return forwarder.code(supervisor.wait())


@contextmanager
def _forked(
    main: Main, world_size: int, forwarder: SignalForwarder, environment: Mapping[str, str]
) -> Iterator[None]:
    """Fork ranks that run ``main``, and register them with the forwarder, which sends them signals.

    ``environment`` has further variables for the ranks. The context must last until they have
    ended, since it holds the file through which they find each other.
    """
    from megatron_ext.parallel.context import INIT_METHOD

    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with _meeting_place() as address:
        with held_signals():
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    own = {**environment_of(rank, world_size), **environment}
                    own[INIT_METHOD] = address
                    _child(main, own, parent, forwarder)
                forwarder.children[pid] = rank
        yield


@contextmanager
def _meeting_place() -> Iterator[str]:
    """Yield the URL of a file through which forked ranks find each other.

    On Linux the file has no name, so it disappears with the last process, even if that is killed.
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


def _child(
    main: Main, environment: Mapping[str, str], parent: int, forwarder: SignalForwarder
) -> None:
    """Run a forked rank, which ends if process ``parent`` does; exit with the rank's exit code."""
    import torch

    # Collections skip the objects that this rank shares with its parent: to look at one copies its
    # page of memory.
    gc.freeze()
    code = 1
    try:
        end_with_parent(parent)
        forwarder.restore()
        os.environ.update(environment)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_of_rank(int(environment["WORLD_SIZE"])))
        release_signals()
        code = run_rank(main)
    except KeyboardInterrupt:
        # The terminal interrupts a rank, and then the launcher interrupts it again.
        code = EXIT_CODE_INTERRUPTED
    finally:
        leave(code)
