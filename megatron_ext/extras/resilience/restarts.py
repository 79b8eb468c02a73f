"""Restarts the forked ranks of one machine after a fault, unless another restart is useless.

All ranks are ended and forked again, even healthy ones. A fork takes milliseconds, because this
process has already imported everything. Keeping healthy ranks alive would not be faster, since they
would have to break off their waits and rebuild their process groups.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint.run_record import RUN_VARIABLE
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.host_folder import GENERATION_VARIABLE, host_folder
from megatron_ext.errors import MegatronExtError, tell_errors
from megatron_ext.extras.resilience.elastic import (
    ask_to_resize,
    forget_resize,
    ranks_of_a_node,
    requested_nodes,
)
from megatron_ext.extras.resilience.fault_supervisor import Fault, RestartSupervisor
from megatron_ext.extras.resilience.generation import FAULT_STEP_VARIABLE, FAULT_TIME_VARIABLE
from megatron_ext.extras.resilience.postmortem import Drawings
from megatron_ext.extras.resilience.watcher import open_watcher
from megatron_ext.train.exit_codes import (
    EXIT_CODE_COMES_BACK,
    EXIT_CODE_RESIZED,
    EXIT_CODE_USER_ERROR,
)
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.supervisor import SignalForwarder

Main = Callable[[], "int | None"]
Fork = Callable[[Main, int, SignalForwarder, Mapping[str, str]], AbstractContextManager[None]]
"""A function of (main function of each rank, number of ranks, signal forwarder, environment).

It returns a context manager that forks the ranks on entry.
"""

_OF_TORCHRUN = "TORCHELASTIC_MAX_RESTARTS"
RESTARTS_WITHOUT_PROGRESS = 2
"""If the same fault comes back after this many restarts in a row, another one is useless."""


@dataclass(frozen=True)
class RestartPolicy:
    """The rules by which the ranks of a run are restarted, and the function that they run.

    Attributes:
        save: the folder of the run, with the log of faults; None for no log.
        world_sizes: allowed numbers of ranks, largest first; the run starts with the first.
        ranks_of_a_node: number of ranks by which the run grows and shrinks at a time.
        main_of: takes a number of ranks and returns the function that the ranks run; it may raise a
            MegatronExtError.
    """

    max_restarts: int
    save: str | None
    world_sizes: Sequence[int]
    ranks_of_a_node: int
    main_of: Callable[[int], Main]

    @classmethod
    def of_run(
        cls, config: RunConfig, world_sizes: Sequence[int], main_of: Callable[[int], Main]
    ) -> RestartPolicy:
        """Return the policy by the flags in ``config``; the other arguments are attributes."""
        faults = config.fault_tolerance
        save = config.checkpoint.save
        each = ranks_of_a_node(config)
        return cls(faults.max_restarts, save, world_sizes, each, main_of)

    @property
    def is_elastic(self) -> bool:
        """Return whether the run may continue with another number of ranks."""
        return len(self.world_sizes) > 1

    def requested_size(self) -> tuple[int, int] | None:
        """Return the number of ranks that an operator requests, and the time of the request.

        The number is the largest allowed one that fits into the requested nodes, or else the
        smallest allowed one. The time is in nanoseconds since 1970. None means no request.
        """
        request = requested_nodes(self.save) if self.is_elastic and self.save else None
        if request is None:
            return None
        most = request[0] * self.ranks_of_a_node
        fitting = (size for size in self.world_sizes if size <= most)
        return next(fitting, self.world_sizes[-1]), request[1]

    def smaller_size(self, size: int) -> int | None:
        """Return the next smaller allowed number of ranks; None if there is none."""
        return next((other for other in self.world_sizes if other < size), None)


def restart_notes(config: RunConfig) -> list[str]:
    """Return a note for each restart flag that has no effect in the way this run was started.

    Under torchrun, ``--max-restarts`` must be given to torchrun itself. Snapshots in memory are
    useless if nothing restarts the run.
    """
    limit = config.fault_tolerance.max_restarts
    by_torchrun = os.environ.get(_OF_TORCHRUN)
    if limit and by_torchrun == "0":
        return [
            f"`--max-restarts` ({limit}) has no effect under torchrun, which starts ranks again "
            f"itself; give `--max-restarts {limit}` to torchrun."
        ]
    if config.fault_tolerance.may_be_restarted:
        return []
    saving = config.checkpoint
    where = "" if by_torchrun is None else " to torchrun"
    given = {"--peer-checkpoint-interval": saving.peer_checkpoint_interval}
    if saving.non_persistent_ckpt_type == "in_memory":
        given["--non-persistent-save-interval"] = saving.non_persistent_save_interval
    return [
        f"`{name}` ({steps}) keeps states in memory that only a restarted run reads, but nothing "
        f"restarts this one; give `--max-restarts`{where}, or leave it out."
        for name, steps in given.items()
        if steps is not None
    ]


class History:
    """The faults of a run so far, to decide whether another restart makes sense."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._last: tuple[str, int | None] | None = None
        self._repeated = 0
        self.restarts = 0

    def add(self, fault: Fault) -> None:
        """Add a fault; it counts as a repetition if its step and cause are those of the last one.

        A fault with an unknown step never counts as a repetition.
        """
        key = (fault.cause, fault.iteration)
        repeats = key == self._last and fault.iteration is not None
        self._repeated = self._repeated + 1 if repeats else 0
        self._last = key

    @property
    def comes_back(self) -> bool:
        """Return whether the same fault has come back after each of the last few restarts."""
        return self._repeated >= RESTARTS_WITHOUT_PROGRESS

    @property
    def exhausted(self) -> bool:
        """Return whether all allowed restarts have been used."""
        return self.restarts >= self._max_restarts

    def forget_repeats(self) -> None:
        """Reset the number of times in a row that the same fault has come back.

        Call this if the next restart changes something, such as the number of ranks.
        """
        self._repeated = 0


def supervise(
    fork: Fork,
    policy: RestartPolicy,
    *,
    timeout_minutes: float,
    exit_signal: ExitSignal | None = None,
) -> int:
    """Fork ranks, restart them after faults, and return the exit code of the run.

    The exit code is 0, the code of the rank that failed last, or `EXIT_CODE_COMES_BACK` if the same
    fault keeps coming back. ``timeout_minutes`` is the longest time that a rank may be silent, as
    in a save, and ``exit_signal`` the signal at which ranks save and exit; None for none.
    """
    with SignalForwarder(exit_signal) as forwarder:
        launcher = _Launcher(fork, policy, forwarder, host_folder(), timeout_minutes)
        return forwarder.code(launcher.run())


class _Launcher:
    """Forks the ranks of a run, and forks them again after faults."""

    def __init__(
        self,
        fork: Fork,
        policy: RestartPolicy,
        forwarder: SignalForwarder,
        folder: Path | None,
        timeout_minutes: float,
    ) -> None:
        self._fork = fork
        self._policy = policy
        self._forwarder = forwarder
        self._folder = folder
        self._timeout_minutes = timeout_minutes
        self._size = self._wanted = policy.world_sizes[0]
        # A request that is already there was made to an earlier run, so it is ignored.
        self._last_request = policy.requested_size()
        self._watcher = open_watcher(folder, self._size, timeout_minutes)
        self._drawings = Drawings()
        self._history = History(policy.max_restarts)
        self._generation = 0
        self._environment = {RUN_VARIABLE: f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"}

    def run(self) -> int:
        """Start the ranks, again and again, until they end on purpose or another start is useless.

        Return the exit code of the last start.
        """
        try:
            return self._run()
        finally:
            self._drawings.wait()

    def _run(self) -> int:
        while True:
            try:
                main = self._policy.main_of(self._size)
            except MegatronExtError as error:
                tell_errors(error.messages)
                return EXIT_CODE_USER_ERROR
            self._environment[GENERATION_VARIABLE] = str(self._generation)
            watch = RestartSupervisor(
                self._forwarder,
                self._timeout_minutes,
                watcher=self._watcher,
                save=self._policy.save,
                generation=self._generation,
                check_request=self._check_request,
            )
            if self._forwarder.stop_signal is not None:
                return self._forwarder.code_of(-self._forwarder.stop_signal)
            with self._fork(main, self._size, self._forwarder, self._environment):
                if self._forwarder.stop_signal is not None:  # a signal came before there were ranks
                    self._forwarder.send(self._forwarder.stop_signal)
                code = watch.wait()
            if watch.fault is not None:
                code = self._follow(watch.fault, code, watch.postmortem)
            elif code == EXIT_CODE_RESIZED:
                self._resize()
            if code not in (_GO_ON, EXIT_CODE_RESIZED):
                return code
            self._generation += 1

    def _follow(self, fault: Fault, code: int, postmortem: Path | None) -> int:
        """Count a fault, and return `_GO_ON` to restart the ranks, or else the run's exit code.

        ``code`` is the exit code of the failed ranks. Also start a process that draws a picture of
        the fault into ``postmortem``, the folder of its report; None draws none.
        """
        self._drawings.start(postmortem)
        history = self._history
        policy = self._policy
        if self._forwarder.stop_signal is not None:
            return self._forwarder.code_of(-self._forwarder.stop_signal)
        history.add(fault)
        sentence = f"rank {fault.rank} has failed ({fault.cause})"
        if fault.iteration:
            sentence = (
                f"rank {fault.rank} has failed at iteration {fault.iteration} ({fault.cause})"
            )
        smaller = policy.smaller_size(self._size) if history.comes_back else None
        if history.exhausted:
            _say(
                f"{sentence}; the run ends, for it has been started again as often as "
                f"`--max-restarts` ({policy.max_restarts}) allows"
            )
            return code
        if history.comes_back and smaller is None:
            _say(
                f"{sentence}, as before each of the last {RESTARTS_WITHOUT_PROGRESS} restarts: "
                "it is not transient, so the run ends"
            )
            return EXIT_CODE_COMES_BACK
        history.restarts += 1
        sentence += f"; restart {history.restarts} of {policy.max_restarts}"
        if smaller is not None:
            self._size = smaller
            history.forget_repeats()
            sentence += f", with {smaller} ranks, for {RESTARTS_WITHOUT_PROGRESS} have not helped"
        _say(sentence)
        self._environment[FAULT_TIME_VARIABLE] = repr(fault.time)
        self._environment[FAULT_STEP_VARIABLE] = str(fault.iteration or 0)
        return _GO_ON

    def _check_request(self) -> None:
        """Ask the ranks to exit after a step if an operator requests another number of nodes."""
        request = self._policy.requested_size()
        if request is None or request == self._last_request or self._folder is None:
            return
        self._last_request = request
        self._wanted = request[0]
        if self._wanted == self._size:
            return
        self._environment[FAULT_TIME_VARIABLE] = repr(time.monotonic())
        self._environment[FAULT_STEP_VARIABLE] = "0"
        ask_to_resize(self._folder)

    def _resize(self) -> None:
        """Adopt the number of ranks that an operator requests."""
        assert self._folder is not None
        forget_resize(self._folder)
        _say(f"going on with {self._wanted} instead of {self._size} ranks, as asked")
        self._size = self._wanted


_GO_ON = -1
"""Result of `_Launcher._follow` if the ranks are restarted; no exit code is negative."""


def _say(text: str) -> None:
    print(f"> {text}", flush=True)
