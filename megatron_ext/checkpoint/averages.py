"""Averaged weights in a checkpoint: whole fp32 tensors ``ema.<name>``, cut as the weights are.

They load in any layout, and tools read them as they read weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.parallel.collectives import gather_or_raise

EMA = "ema"
PREFIX = f"{EMA}."


def holds_averages(path: Path) -> bool:
    """Return whether a checkpoint holds averaged weights."""
    stored = stored_entries(path)
    return any(name.startswith(PREFIX) for name in stored)


def goes_on_averaging(path: Path, ema: ShardedEMA | None, notes: list[str]) -> bool:
    """Return whether a run takes the averages of a checkpoint; all ranks call this together.

    Args:
        ema: averages of the run, None where it keeps none.
        notes: gets a sentence where only run or checkpoint has averages.
    """
    there = gather_or_raise(lambda: holds_averages(path), f"{path} cannot be read")[0]
    if ema is not None and not there:
        notes.append(f"{path} holds no averaged weights, so they start from the loaded ones.")
    if ema is None and there:
        notes.append(
            f"{path} holds averaged weights, which a run without `--ema-decay` leaves out."
        )
    return there and ema is not None


def take_named(
    path: Path, state: dict[str, Any], chunks: Iterable[str], prefixes: Sequence[str]
) -> None:
    """Ask a checkpoint for weights by prefixed names, where it has them.

    Args:
        state: sharded state of the run, changed in place.
        chunks: keys of the model chunks in it.
        prefixes: candidates such as `PREFIX` for averaged weights; the first that the checkpoint
            has is taken.
    """
    stored = stored_entries(path)
    for chunk in chunks:
        sharded, _ = extract_sharded_tensors_and_factories(state[chunk])
        for entry in nested_values(sharded):
            names = (f"{prefix}{entry.key}" for prefix in prefixes)
            entry.key = next((name for name in names if name in stored), entry.key)


def averages_to_save(ema: ShardedEMA, weights: dict[str, Any]) -> dict[str, Any]:
    """Return sharded state with the averages, in the host's memory; all ranks call this together.

    Args:
        weights: sharded state of the model chunks.
    """
    return _cut_like(weights, ((parameter, average.cpu()) for parameter, average in ema.gathered()))


def averages_to_load(ema: ShardedEMA, weights: dict[str, Any]) -> dict[str, Any]:
    """Return sharded state to be filled with averages.

    A vocabulary may be padded for another layout. Rows that the checkpoint lacks keep the model's
    values, as they do in the weights.
    """
    values = (p.detach().to("cpu", torch.float32, copy=True) for p in ema.parameters)
    return _cut_like(weights, zip(ema.parameters, values, strict=True))


def load_averages(ema: ShardedEMA, loaded: dict[str, Tensor]) -> None:
    """Take over the averages that were read into the state of `averages_to_load`."""
    ema.load([loaded[key] for key in sorted(loaded, key=int)])


def _cut_like(
    weights: dict[str, Any], averages: Iterable[tuple[Parameter, Tensor]]
) -> dict[str, Any]:
    sharded, _ = extract_sharded_tensors_and_factories(weights)
    entries = {id(entry.data): entry for entry in nested_values(sharded)}
    return {
        str(index): make_sharded_optimizer_tensor(entries[id(parameter)], average, prefix=EMA)
        for index, (parameter, average) in enumerate(averages)
    }
