"""What of a checkpoint, besides its weights, is there, fits, and is asked for."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from megatron_ext.checkpoint.random_state import why_states_do_not_fit
from megatron_ext.checkpoint.stored import Found

if TYPE_CHECKING:
    from megatron_ext.config.checkpoint import CheckpointConfig
    from megatron_ext.layout import Layout


def loads_optimizer(
    found: Found, config: CheckpointConfig, arguments: Namespace, notes: list[str]
) -> bool:
    """Whether the optimizer is wanted and there.

    Args:
        found: the checkpoint.
        config: of the run that loads.
        arguments: of the run that saved.
        notes: gets a sentence where the optimizer starts anew.
    """
    if found.weights_only or config.no_load_optim:
        return False
    if getattr(arguments, "no_save_optim", False):
        notes.append(f"{found.path} holds no optimizer, so it starts anew.")
        return False
    return True


def loads_random(
    found: Found,
    config: CheckpointConfig,
    arguments: Namespace,
    layout: Layout,
    notes: list[str],
) -> bool:
    """Whether the random states are wanted, there, and fit a layout; arguments as above."""
    if found.weights_only or config.no_load_rng:
        return False
    note = why_states_do_not_fit(found.path, arguments, layout)
    notes += [] if note is None else [note]
    return note is None
