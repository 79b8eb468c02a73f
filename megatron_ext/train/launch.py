"""Starts the ranks of one machine and watches them; if one fails, all are ended.

Under torchrun (``RANK`` is set), this process already is a rank (`started_rank`). Otherwise it is
the only rank of its run, or starts the ranks (`forking`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_ext.device import Device
from megatron_ext.disk.host_folder import is_under_torchrun, shared_host_folder, ticks_at_start
from megatron_ext.errors import ConfigError, MegatronExtError, say_to_stderr
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.rank import (
    End,
    Main,
    Tell,
    environment_of,
    leave,
    rank_end,
    tell_nothing,
    tell_torchrun,
)
from megatron_ext.train.supervision import Supervision, supervision_of_ranks

SECONDS_FOR_RANK_0 = 20.0
"""Seconds that other ranks wait before they print a flag error, so that rank 0 prints it alone."""

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
"""Environment variables with numbers that a launcher such as torchrun gives to each process."""

SCHEDULED = {
    "PET_NNODES": "a job of {count} nodes",
    "SKYPILOT_NUM_NODES": "a SkyPilot task of {count} nodes",
    "SLURM_STEP_NUM_TASKS": "{count} tasks of one `srun`",
}
"""Environment variables by which schedulers tell how many processes a command has, and what these
are. Kubeflow Trainer's is `PET_NNODES`, which torchrun reads."""


@dataclass(frozen=True)
class Launch:
    """A launch of a run, including all restarts by its launcher.

    Attributes:
        started: when the launcher started, in seconds since the epoch.
        ends_itself: whether this process is the launcher, and not a rank of another launcher. It
            then writes the run's report when all ranks have ended; otherwise the reporting rank
            writes it.
        data_lines: lines that say which data the run reads and which it does not use
            (`Task.data_lines`).
        given: names of the configuration fields that the command line sets.
    """

    started: float
    ends_itself: bool
    data_lines: Sequence[str] = ()
    given: Collection[str] = ()


def launch_of(argv: Sequence[str]) -> Launch:
    """Return the `Launch` that this process belongs to.

    Under torchrun, the launch started when this process's parent did, torchrun's agent. Otherwise
    it started with this process, or starts now if ``argv`` are not the arguments of this process
    (a script calls `main`).
    """
    is_rank = "RANK" in os.environ
    if is_rank and is_under_torchrun():
        return Launch(_start_of(os.getppid()), ends_itself=False)
    is_program = list(argv) == sys.argv[1:]
    started = _start_of(os.getpid()) if is_program else time.time()
    return Launch(started, ends_itself=not is_rank)


def _start_of(pid: int) -> float:
    """Return when process ``pid`` started, in seconds since 1970; now if the system hides it."""
    ticks = ticks_at_start(pid)
    if ticks is None:
        return time.time()
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def check_launcher() -> None:
    """Delete a launcher's environment variables, such as ``RANK``, if they are empty.

    A script that copies a scheduler's variables leaves them empty if there is no scheduler.

    Raises:
        ConfigError: one of the launcher's variables is not a number. All of them are then deleted.
    """
    errors = []
    for name in _LAUNCHED:
        value = os.environ.get(name)
        if value is not None and not value.strip():
            del os.environ[name]
        elif value is not None and not value.strip().isdecimal():
            errors.append(
                f"The environment variable `{name}` ({value}) must be a number that the launcher "
                "sets; unset it, or start the ranks with torchrun."
            )
    if errors:
        for name in _LAUNCHED:
            os.environ.pop(name, None)
        raise ConfigError(errors)


def refuse(error: MegatronExtError) -> int:
    """Print an error in the user's flags or files before the run starts; return the exit code.

    If a launcher has started this process as a rank, the process exits instead of returning. All
    ranks read the same flags, so rank 0 prints at once, and its exit ends the other ranks. Another
    rank prints only if it is still running after `SECONDS_FOR_RANK_0`, for example because a file
    is missing on its node only.
    """
    text = "\n".join(f"error: {sentence}" for sentence in error.messages)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(SECONDS_FOR_RANK_0)
        text = f"[rank {os.environ['RANK']}] {text}"
    say_to_stderr(text)
    tell_torchrun(text)
    if "RANK" in os.environ:
        leave(EXIT_CODE_USER_ERROR)
    return EXIT_CODE_USER_ERROR


def launch(
    main: Main,
    *,
    nproc_per_node: int,
    device: Device,
    timeout_minutes: float = 10,
    supervision: Supervision | None = None,
    main_of: Callable[[int], Main] | None = None,
    save: str | None = None,
    exit_signal: ExitSignal | None = None,
    tell: Tell | None = None,
) -> int:
    """Run ``main`` on all ranks of this machine; return the first failed rank's exit code, or 0.

    Args:
        nproc_per_node: number of ranks to start, unless torchrun has already started them.
        timeout_minutes: how long a signal such as SIGSTOP may keep a forked rank stopped, and how
            long torchrun waits for ranks that save after the exit signal.
        supervision: decides whether ranks are restarted after faults; None uses
            `supervision_of_ranks`.
        main_of: takes a number of ranks and returns their ``main``, for a run that may restart with
            another number; None always uses ``main``.
        save: folder in which faults are logged.
        exit_signal: the signal at which the ranks save and exit; None for no such signal.
        tell: called with the exit code when the run has ended. In a rank that another launcher has
            started, it is called only on rank 0, and only if the run fails.
    """
    supervision = supervision or supervision_of_ranks()
    exit_signal = exit_signal or ExitSignal(None)
    tell = tell or tell_nothing
    with shared_host_folder(save):
        if "RANK" in os.environ:
            from megatron_ext.train.started_rank import run_started_rank

            return run_started_rank(main, exit_signal, tell, supervision)
        if nproc_per_node == 1 and supervision.max_restarts is None:
            exit_signal.end_by_sigterm(tell)
            with _only_rank() as end:
                end.exit_code = main() or 0
            code = end.exit_code
        else:
            from megatron_ext.train.forking import start_ranks

            code = start_ranks(
                main,
                nproc_per_node,
                device,
                timeout_minutes,
                supervision,
                main_of or (lambda world_size: main),
                save,
                exit_signal,
            )
        tell(code)
        return code


@contextmanager
def _only_rank() -> Iterator[End]:
    """Inside the block, make this process the only rank of a run; see `rank_end`."""
    ours = environment_of(0, 1)
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        with rank_end() as end:
            yield end
    finally:
        # From now on the process must not look as if torchrun had started it.
        for name in ours:
            del os.environ[name]
        os.environ.update(before)
