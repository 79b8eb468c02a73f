"""What of a checkpoint, besides its weights, is there, fits, and is asked for."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron_ext.checkpoint.changes import check_changes
from megatron_ext.checkpoint.fit import check_optimizer
from megatron_ext.checkpoint.manifest import checksum_fault, read_manifest
from megatron_ext.checkpoint.random_state import why_states_do_not_fit
from megatron_ext.checkpoint.stored import RUN_CONFIG, Found, find, read_json, refusal
from megatron_ext.checkpoint.unpickling import common_state_of
from megatron_ext.errors import CheckpointError
from megatron_ext.layout import Layout

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.config.checkpoint import CheckpointConfig


def check_resume(config: RunConfig) -> None:
    """Compare a run with the checkpoint that it loads, as far as that needs no model.

    Ranks compare all of it again, and weights too. Every rank may call this by itself.

    Args:
        config: the resolved configuration of the run.

    Raises:
        CheckpointError: flags of the model, or optimizer state, that do not go with the run's.
    """
    found = find(config.checkpoint)
    if found is None:
        return
    path = found.path
    files = read_manifest(path) or {}
    small = [name for name in (COMMON_STATE_FNAME, RUN_CONFIG) if name in files]
    fault = checksum_fault(path, files, small)
    if fault is not None:
        raise CheckpointError(refusal(found.root, found.iteration, fault))
    common = common_state_of(path)
    arguments = common.get("args", Namespace())
    trains = not config.training.skip_train
    goes_on = trains and loads_optimizer(found, config.checkpoint, arguments, [])
    check_changes(
        path,
        config.to_dict(),
        read_json(path / RUN_CONFIG),
        weights_only=found.weights_only,
        optimizer=config.optimizer.optimizer if goes_on else None,
    )
    if goes_on:
        check_optimizer(
            path,
            dict(common.get("content_metadata") or {}),
            arguments,
            Layout.from_config(config),
            distributed=config.optimizer.use_distributed_optimizer,
            has_main_weights=config.precision.bf16 or config.precision.fp16,
        )


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
