"""Verifying a checkpoint, and reading its sharded state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint.agreement import together
from megatron_ext.checkpoint.manifest import checksum_fault, read_manifest
from megatron_ext.checkpoint.stored import Found, refusal
from megatron_ext.checkpoint.strategies import load_strategy
from megatron_ext.checkpoint.unpickling import PlainCommonStrategy
from megatron_ext.checkpoint.writing import one_line, refusal_within
from megatron_ext.errors import CheckpointError
from megatron_ext.layout.context import contact_fault

if TYPE_CHECKING:
    from megatron_ext.config.checkpoint import CheckpointConfig
    from megatron_ext.layout import ParallelContext


def verify(found: Found, context: ParallelContext) -> None:
    """Compare the checksums, each rank its share of the files.

    Raises:
        CheckpointError: on every rank, where one file differs.
    """
    path = found.path

    def compare() -> None:
        files = read_manifest(path) or {}
        largest_first = sorted(files, key=lambda name: (-files[name]["bytes"], name))
        own = largest_first[context.rank :: context.layout.world_size]
        fault = checksum_fault(path, files, own)
        if fault is not None:
            raise CheckpointError(refusal(found.root, found.iteration, fault))

    together(compare, f"{path} cannot be read")


def read_state(
    path: Path,
    state: dict[str, Any],
    config: CheckpointConfig,
    context: ParallelContext,
    notes: list[str],
) -> dict[str, Any]:
    """Fill a sharded state, together with what is the same on all ranks; all ranks call this.

    Args:
        path: the checkpoint.
        state: what is asked of it.
        config: which names may differ, and how to read.
        context: of this rank.
        notes: gets sentences about names that differ.

    Raises:
        CheckpointError: the checkpoint does not fit.
    """
    strategy = load_strategy(context.pgs.dp_cp, fully_parallel=config.ckpt_fully_parallel_load)
    strictness = config.dist_ckpt_strictness
    raises = strictness == "raise_all"
    try:
        loaded = dist_checkpointing.load(
            state,
            str(path),
            sharded_strategy=strategy,
            common_strategy=PlainCommonStrategy(),
            strict="return_all" if raises else strictness,
        )
    # torch's exception of a collective read derives from BaseException.
    except (Exception, CheckpointException) as error:
        if contact_fault(error) is not None:
            raise
        told = refusal_within(error)
        if told is not None:
            raise CheckpointError(f"{path} cannot be loaded: {told}") from None
        raise CheckpointError(
            f"{path} does not fit this run: {one_line(error)}; give the flags that it was "
            "saved with, or `--no-load-optim` where only the optimizer differs."
        ) from error
    if isinstance(loaded, tuple):
        loaded, missing, unexpected = loaded
        # Random states of another layout are left, which has been said.
        missing = {key for key in missing if not key.startswith("rng_state")}
        named = (("not wanted by the run", missing), ("not in it", unexpected))
        differ = [
            f"Of {path} these names are {kind}: {sorted(keys)}" for kind, keys in named if keys
        ]
        if raises:
            together(lambda: _refuse(differ), f"{path} cannot be loaded")
        notes += [f"{text}." for text in differ]
    return dict(loaded)


def _refuse(differ: list[str]) -> None:
    """Raise the first sentence about names that differ, where there is one."""
    if differ:
        raise CheckpointError(
            f"{differ[0]}; give the flags that it was saved with, or another "
            "`--dist-ckpt-strictness` than raise_all."
        )
