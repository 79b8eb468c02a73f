"""What a checkpoint holds besides the model of a run: other networks, and where a task stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

CRITIC = "critic"
"""Begins the names of the weights of a network that judges the model of the run."""


class Companion(Protocol):
    """Adds its own keys to the state of a run; all ranks call each method together."""

    def state_to_save(self, metadata: dict[str, Any], *, with_optimizer: bool) -> dict[str, Any]:
        """Sharded and common state, under keys that no run of Megatron-LM has.

        Args:
            metadata: how megatron-core is to cut sharded state.
            with_optimizer: moments and schedules are wanted too.
        """

    def state_to_load(
        self, path: Path, metadata: dict[str, Any], *, with_optimizer: bool
    ) -> dict[str, Any]:
        """What is asked of a checkpoint; arguments as of `state_to_save`.

        Raises:
            CheckpointError: the checkpoint does not fit.
        """

    def load(self, loaded: dict[str, Any], *, with_optimizer: bool, notes: list[str]) -> None:
        """Take over what was read.

        Args:
            loaded: whole state, in which the entries of `state_to_load` are filled in.
            with_optimizer: as it was given to `state_to_load`.
            notes: gets a sentence about whatever starts anew.
        """
