"""The socket around the ranks of a run: who watches them, and what follows a fault.

`Supervision` is what every run has: the first rank that fails ends all. The add-on ``resilience``
replaces it where a run has several ranks, or flags that ask for more: it tells hangs and slow
ranks, starts ranks again, and keeps states in memory for that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from megatron_ext import extras
from megatron_ext.config.flags import changed
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.exit_signal import ExitSignal

if TYPE_CHECKING:
    from megatron_ext.train.supervisor import SignalForwarder, Supervisor

RESILIENCE = "resilience"
"""The add-on that fills this socket."""
FLAGS = {
    "fault_tolerance": None,
    "checkpoint": {
        "peer_checkpoint_interval",
        "non_persistent_save_interval",
        "non_persistent_ckpt_type",
        "non_persistent_local_ckpt_dir",
    },
}
"""The flags of the add-on: fields by section, None for all of a section."""

Configure = Callable[[int], RunConfig]
"""A function that returns the configuration of a run for another number of ranks."""


class Supervision:
    """Ends all ranks of a run when the first one fails.

    Attributes:
        max_restarts: how often ranks are started again; None if the first fault ends the run.
        is_elastic: whether the run may go on with another number of ranks.
    """

    max_restarts: int | None = None
    is_elastic = False

    def __init__(self, config: RunConfig | None = None) -> None:
        self.config = config

    def notes(self) -> list[str]:
        """Return sentences on flags that have no effect as this run is started."""
        return []

    def prepare(self, configure: Configure) -> None:
        """Check the numbers of ranks with which the run may go on.

        Raises:
            ConfigError: one of them does not go with the flags.
        """

    def run(
        self,
        fork: Callable[..., AbstractContextManager[None]],
        main_of: Callable[[int], Callable[[], int | None]],
        *,
        timeout_minutes: float,
        exit_signal: ExitSignal,
    ) -> int:
        """Fork ranks as often as `max_restarts` allows, and return the exit code of the run.

        ``main_of`` gives what a rank does, by the number of ranks, which ``fork`` starts.
        """
        raise NotImplementedError

    def supervisor(
        self, world_size: int, forwarder: SignalForwarder, timeout_minutes: float, save: str | None
    ) -> Supervisor:
        """Return what waits for ranks that are about to be forked, and tells faults in ``save``."""
        from megatron_ext.train.supervisor import Supervisor

        return Supervisor(forwarder, timeout_minutes)

    def follow_earlier_process(self) -> None:
        """Count this process as a restart if a launcher has started it in place of another."""

    def guard(self, rank: int) -> AbstractContextManager[None]:
        """Return a context in which others can see on this rank what it does."""
        return nullcontext()

    def stores(self, context: ParallelContext) -> Sequence[Any]:
        """Return the places where the run keeps states in memory; all ranks call this together."""
        return []

    def recoveries(self, stores: Sequence[Any], context: ParallelContext) -> Sequence[Any]:
        """Return what finds the states in such places, from which a run goes on."""
        return []

    def callbacks(self, run: Any, settle: Callable[[], None]) -> Sequence[Any]:
        """Return the callbacks that its flags ask for; ``settle`` waits for the last update."""
        return []


def supervision_of(config: RunConfig) -> Supervision:
    """Return the add-on's supervision if a run needs it, and the plain one if not."""
    if config.parallel.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        if not given_flags(config):
            return Supervision(config)
    return _of_add_on(config)


def supervision_of_ranks() -> Supervision:
    """Return the supervision of ranks that are forked for something else than a run."""
    return _of_add_on(None)


def _of_add_on(config: RunConfig | None) -> Supervision:
    module = extras.part(RESILIENCE, "supervision")
    return Supervision(config) if module is None else module.Resilience(config)


def given_flags(config: RunConfig) -> list[str]:
    """Return the flags of the add-on that are given."""
    return [flag for section, names in FLAGS.items() for flag in changed(config, [section], names)]


def check_add_ons(config: RunConfig) -> None:
    """Raise a ConfigError with a sentence for each flag of the add-on if its folder is gone."""
    if not extras.is_there(RESILIENCE) and (flags := given_flags(config)):
        raise ConfigError([extras.missing(RESILIENCE, flag) for flag in flags])
