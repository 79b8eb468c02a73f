"""Decides who watches the ranks of a run, and what happens after a fault.

`Supervision` is the default: if one rank fails, all are ended. The add-on ``resilience`` replaces
it for runs with several ranks, and for runs with one of the flags in `FLAGS`. It detects hangs and
stragglers, restarts ranks, and keeps snapshots in memory for the restart.
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
from megatron_ext.train.exit_signal import ExitSignal

if TYPE_CHECKING:
    from megatron_ext.parallel.context import ParallelContext
    from megatron_ext.train.supervisor import SignalForwarder, Supervisor

RESILIENCE = "resilience"
"""The name of the add-on that replaces `Supervision`."""
FLAGS = {
    "fault_tolerance": None,
    "checkpoint": {
        "peer_checkpoint_interval",
        "non_persistent_save_interval",
        "non_persistent_ckpt_type",
        "non_persistent_local_ckpt_dir",
    },
}
"""The flags of the add-on ``resilience``: fields by section; None means all fields of a section."""

Configure = Callable[[int], RunConfig]
"""A function that takes a number of ranks, and returns the configuration of a run on them."""


class Supervision:
    """Ends all ranks of a run when one fails.

    Attributes:
        max_restarts: how often ranks are restarted; None if the first fault ends the run.
        is_elastic: whether the run may continue with another number of ranks.
    """

    max_restarts: int | None = None
    is_elastic = False

    def __init__(self, config: RunConfig | None = None) -> None:
        self.config = config

    def notes(self) -> list[str]:
        """Return notes on flags that have no effect, because of the way the run is started."""
        return []

    def prepare(self, configure: Configure) -> None:
        """Check that the flags suit every number of ranks with which an elastic run may continue.

        Args:
            configure: returns the configuration of the run for a number of ranks.

        Raises:
            ConfigError: a number of ranks does not fit the flags.
        """

    def run(
        self,
        fork: Callable[..., AbstractContextManager[None]],
        main_of: Callable[[int], Callable[[], int | None]],
        *,
        timeout_minutes: float,
        exit_signal: ExitSignal,
    ) -> int:
        """Start ranks, restart them after faults, and return the exit code of the run.

        Called only if `max_restarts`, the most restarts, is not None. ``fork`` starts the ranks.
        ``main_of`` takes the number of ranks, and returns the function that each rank runs.
        `launch.launch` explains the other arguments.
        """
        raise NotImplementedError

    def supervisor(
        self, world_size: int, forwarder: SignalForwarder, timeout_minutes: float, save: str | None
    ) -> Supervisor:
        """Return a `Supervisor` of ranks about to be forked; a subclass logs faults in ``save``."""
        from megatron_ext.train.supervisor import Supervisor

        return Supervisor(forwarder, timeout_minutes)

    def follow_earlier_process(self) -> None:
        """Do nothing; a subclass counts a restart if this process replaces an earlier one.

        torchrun starts such a process when it restarts the ranks.
        """

    def guard(self, rank: int) -> AbstractContextManager[None]:
        """Return a context around the rank's work (here empty); a subclass detects hangs in it."""
        return nullcontext()

    def stores(self, context: ParallelContext) -> Sequence[Any]:
        """Return where the run keeps snapshots of its state (here nowhere); all ranks call this."""
        return []

    def recoveries(self, stores: Sequence[Any], context: ParallelContext) -> Sequence[Any]:
        """Return, for each store, a `SnapshotRecovery` that finds a snapshot to resume from."""
        return []

    def callbacks(self, run: Any, settle: Callable[[], None]) -> Sequence[Any]:
        """Return the callbacks that this supervision needs in the training loop (here none).

        ``settle`` is a function that waits for the last update.
        """
        return []


def supervision_of(config: RunConfig) -> Supervision:
    """Return the supervision of a run by the add-on ``resilience``, if it is installed.

    Without the add-on, or for a single rank without torchrun and without flags of the add-on,
    return a plain `Supervision`.
    """
    if config.parallel.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        if not given_flags(config):
            return Supervision(config)
    return _chosen_supervision(config)


def supervision_of_ranks() -> Supervision:
    """Return the supervision for ranks that do not train, and so have no configuration."""
    return _chosen_supervision(None)


def _chosen_supervision(config: RunConfig | None) -> Supervision:
    module = extras.part(RESILIENCE, "supervision")
    return Supervision(config) if module is None else module.Resilience(config)


def given_flags(config: RunConfig) -> list[str]:
    """Return the flags of the add-on ``resilience`` whose values differ from their defaults."""
    return [flag for section, names in FLAGS.items() for flag in changed(config, [section], names)]


def check_add_ons(config: RunConfig) -> None:
    """Raise a ConfigError if flags of the add-on ``resilience`` are given but it is missing.

    The error has a sentence for each of these flags.
    """
    if not extras.is_there(RESILIENCE) and (flags := given_flags(config)):
        raise ConfigError([extras.missing(RESILIENCE, flag) for flag in flags])
