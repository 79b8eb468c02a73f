"""Runs whose rank is made to hang in one of several ways, and what a watcher says about them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from megatron_ext.disk.host_folder import shared_host_folder
from megatron_ext.extras.resilience.postmortem import Case
from megatron_ext.extras.resilience.watch import Limits, Verdict
from megatron_ext.extras.resilience.watcher import Watcher
from megatron_ext.schedules.communication import Channels
from megatron_ext.schedules.plan import Action, Kind
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.run import Run
from tests.training_runs import SMALL, prepared, without

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "dp2": (2, "--use-distributed-optimizer"),
}
STEP = 4
LIMITS = Limits(floor=1.0, boundless=60.0)
LONG = 1000.0
"""Seconds that a rank sleeps, far more than a test takes."""


def at(run: Run, rank: int, begun: str, work: Callable[[], None]) -> None:
    """Let a rank call ``work`` in step `STEP`, when what is called ``begun`` begins."""
    done = []

    def listen(name: str, iteration: int, detail: Any) -> None:
        if name == begun and iteration == STEP and not done:
            done.append(True)
            work()

    if run.context.rank == rank:
        run.context.recorder.listeners.append(listen)


def stop(run: Run, rank: int) -> None:
    at(run, rank, "F", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def sleep_in_forward(run: Run, rank: int) -> None:
    at(run, rank, "F", lambda: time.sleep(LONG))


def crash(run: Run, rank: int) -> None:
    at(run, rank, "F", lambda: os.kill(os.getpid(), signal.SIGSEGV))


def skip_a_collective(run: Run, rank: int) -> None:
    """Let a rank leave out one all-reduce, as a wrong condition in a model does."""
    real = torch.distributed.all_reduce

    def skipping(*arguments: Any, **options: Any) -> Any:
        torch.distributed.all_reduce = real
        return None

    def arm() -> None:
        torch.distributed.all_reduce = skipping

    at(run, rank, "update", arm)


def lose_a_message(run: Run, rank: int) -> None:
    """Let a rank go on without the last message of a step that its pipeline peer waits for."""
    real = Channels.send

    def send(self: Channels, action: Action, tensor: torch.Tensor) -> None:
        lost = action.kind in (Kind.SEND_OUTPUT, Kind.SEND_GRADIENT) and action.microbatch == 3
        if not (lost and run.context.recorder.iteration == STEP):
            real(self, action, tensor)

    if run.context.rank == rank:
        Channels.send = send  # type: ignore[method-assign]


@contextmanager
def watched(
    layout: str, prepare: Callable[[Run], None], words: str = "", limits: Limits = LIMITS
) -> Iterator[Watcher]:
    """Run training in a process of its own, and yield a watcher of its ranks."""
    size, flags = LAYOUTS[layout]
    fixed = [*without(SMALL, "--train-iters", "--eval-iters", "--eval-interval")]
    fixed += [*flags.split(), *(words or "--train-iters 1000 --eval-iters 0").split()]
    task, config, assets = prepared([*fixed, "--nproc-per-node", str(size)])
    with shared_host_folder() as folder:
        assert folder is not None
        launcher = os.fork()
        if launcher == 0:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            from megatron_ext.device import select

            run = partial(pretrain, task, config, device=select(), assets=assets, prepare=prepare)
            os._exit(fork_ranks(run, size))
        try:
            yield Watcher(folder, size, limits)
        finally:
            # The ranks end with their parent, also those that are stopped.
            os.kill(launcher, signal.SIGKILL)
            os.waitpid(launcher, 0)
            for record in Watcher(folder, size).board.read(1):
                with suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)


def first_verdict(watcher: Watcher, seconds: float = 40.0) -> Verdict | None:
    """Look at a run until something is wrong; None if nothing is within ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := watcher.look():
            return found[0]
        time.sleep(0.05)
    return None


def hang(layout: str, kind: Callable[[Run, int], None], rank: int) -> tuple[Verdict, Case]:
    """Let ``rank`` hang, and return what a watcher says."""
    with watched(layout, partial(kind, rank=rank)) as watcher:
        verdict = first_verdict(watcher)
        assert verdict is not None
        return verdict, watcher.investigate(verdict)
