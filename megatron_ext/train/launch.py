"""Starts the ranks of one machine and watches them; if one fails, all are ended.

Under torchrun (``RANK`` is set), this process already is a rank. Otherwise a GPU run starts torch's
launcher. A CPU run forks its ranks after importing torch and megatron-core once, so that the first
step is only seconds away. The forked ranks find each other through a file.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext import limits
from megatron_ext.device import Device
from megatron_ext.disk.host_folder import (
    is_under_torchrun,
    leave_exit_code,
    leave_host_folder,
    restarts_by_torchrun,
    shared_host_folder,
    ticks_at_start,
)
from megatron_ext.errors import (
    EXIT_CODE_INTERRUPTED,
    EXIT_CODE_NOT_SAVED,
    ConfigError,
    MachineFault,
    MegatronExtError,
    end_with_parent,
    held_signals,
    parent_at_start,
    release_signals,
    say_to_stderr,
)
from megatron_ext.train.exit_codes import (
    EXIT_CODE_LOST_CONTACT,
    EXIT_CODE_NO_ANSWER,
    EXIT_CODE_NO_MEMORY,
    EXIT_CODE_RESIZED,
    EXIT_CODE_SIGNAL,
    EXIT_CODE_USER_ERROR,
)
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.supervision import Supervision, supervision_of_ranks

if TYPE_CHECKING:
    from megatron_ext.train.supervisor import SignalForwarder

SECONDS_FOR_RANK_0 = 20.0
"""Seconds that other ranks wait before they print a flag error, so that rank 0 prints it alone."""
_SECONDS_FOR_RANK_0_OF_A_RUN = 1.0

_WITHOUT_MEMORY = (
    "Memory ran out. A smaller `--micro-batch-size` takes less, and so do "
    "`--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`, shorter "
    "samples, or a model cut over more ranks; `python tools/plan.py --world-size N --search -- "
    "FLAGS` lists the layouts that fit."
)

Main = Callable[[], "int | None"]
Tell = Callable[[int], None]
"""A function that a run calls once with its exit code, when it has ended or is about to."""


def _tell_nothing(_code: int) -> None:
    """Do nothing; `launch` uses this if no ``tell`` is given."""


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


@dataclass
class End:
    """Holds the exit code with which a launch or a rank ends; 1 unless it is set."""

    exit_code: int = 1


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


@contextmanager
def rank_end() -> Iterator[End]:
    """Yield an `End` for the rank that runs in this context; set its exit code after an error.

    The error is printed with the rank's number: as a sentence if it is a MegatronExtError or caused
    by another rank's failure, otherwise with its traceback. If all ranks raise the same
    MegatronExtError, rank 0 prints it first, and its exit ends the others. An interruption is not
    printed, since all ranks and their launcher receive it.
    """
    end = End(exit_code=0)
    try:
        yield end
        return
    except MegatronExtError as error:
        message = str(error)
        end.exit_code = 1 if isinstance(error, MachineFault) else EXIT_CODE_USER_ERROR
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_SECONDS_FOR_RANK_0_OF_A_RUN)
    except KeyboardInterrupt:
        _tell_torchrun("interrupted")
        end.exit_code = EXIT_CODE_INTERRUPTED
        return
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        from megatron_ext.parallel.context import NoAnswer, contact_fault

        fault = contact_fault(error)
        message = limits.sentence(error) or traceback.format_exc()
        end.exit_code = 1
        if _lacks_memory(error):
            message = f"{message.rstrip()}\n{_WITHOUT_MEMORY}"
            end.exit_code = EXIT_CODE_NO_MEMORY
        if fault is not None:
            message = fault.value
            timed_out = fault is NoAnswer.TIMEOUT
            end.exit_code = EXIT_CODE_NO_ANSWER if timed_out else EXIT_CODE_LOST_CONTACT
    # A single write keeps the text together, since other ranks print too.
    text = f"[rank {os.environ.get('RANK', '0')}] {message}"
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    _tell_torchrun(text)


def run_rank(main: Main) -> int:
    """Run one rank, and return its exit code; see `rank_end`."""
    with rank_end() as end:
        end.exit_code = main() or 0
    return end.exit_code


def _lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a GPU or in this process.

    torch's allocator of main memory raises a plain RuntimeError, so only its text tells. Other
    errors may follow, so the errors that preceded this one are examined too.
    """
    import torch

    text = "can't allocate memory"
    before = error.__context__
    lacks = isinstance(error, MemoryError | torch.OutOfMemoryError) or text in str(error)
    return lacks or (before is not None and _lacks_memory(before))


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
    tell = tell or _tell_nothing
    with shared_host_folder(save):
        if "RANK" in os.environ:
            return _run_started_rank(main, exit_signal, tell, supervision)
        if nproc_per_node == 1 and supervision.max_restarts is None:
            exit_signal.end_by_sigterm(tell)
            with _only_rank() as end:
                end.exit_code = main() or 0
            code = end.exit_code
        else:
            code = _start_ranks(
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


def _run_started_rank(
    main: Main, exit_signal: ExitSignal, tell: Tell, supervision: Supervision
) -> int:
    """Run the rank that torchrun or a similar launcher has started as this process.

    The process exits here unless the exit code is 0.
    """
    agent = parent_at_start()
    if is_under_torchrun():
        # A signal that the agent does not pass on may end the agent.
        end_with_parent(agent, exit_signal.number or signal.SIGKILL)
        supervision.follow_earlier_process()
        if exit_signal.number is not None:
            # Its agent waits only for a limited time until it has saved.
            leave_exit_code(EXIT_CODE_NOT_SAVED)
    if os.environ["RANK"] != "0":
        tell = _tell_nothing
    exit_signal.end_by_sigterm(tell)
    code = run_rank(main)
    if is_under_torchrun():
        leave_exit_code(code)
    if code:
        tell(code)
        if code != EXIT_CODE_RESIZED:
            leave_host_folder()
        if code == EXIT_CODE_SIGNAL and restarts_by_torchrun() and not supervision.is_elastic:
            # torchrun restarts ranks whatever their exit code, unless torchrun itself is asked to
            # end. An elastic run gets the same signal whenever its number of nodes changes, so it
            # must not do that.
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGTERM)
        _leave(code)
    return code


@contextmanager
def _only_rank() -> Iterator[End]:
    """Inside the block, make this process the only rank of a run; see `rank_end`."""
    ours = _environment(0, 1)
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


def _start_ranks(
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

    `launch`, which explains the arguments, itself runs a single rank that is never restarted.
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


def _environment(rank: int, world_size: int) -> dict[str, str]:
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes}


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


def _leave(code: int) -> None:
    """Flush the output, and exit with ``code`` without waiting for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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

    A supervisor from ``supervision`` watches them; `launch` explains the arguments.
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
                    own = {**_environment(rank, world_size), **environment}
                    own[INIT_METHOD] = address
                    _child(main, own, parent, forwarder)
                forwarder.children[pid] = rank
        yield


def threads_of_rank(num_ranks: int) -> int:
    """Return the number of threads that each of ``num_ranks`` ranks on this machine computes with.

    This holds on CPUs unless OMP_NUM_THREADS says otherwise.
    """
    return max(1, (os.cpu_count() or 1) // num_ranks)


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
        _leave(code)
