"""Adapters, and branches that start at zero: new ones may start on weights saved without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_ext.checkpoint.ema import PREFIX
from megatron_ext.checkpoint.fit import LENIENT, is_new_branch
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.errors import CheckpointError
from megatron_ext.models.fp8.scaling import HISTORY

MARK = ".lora."


def adapters_among(names: Iterable[str]) -> list[str]:
    """The names that are matrices of adapters."""
    weights = (n for n in names if "optimizer." not in n and not n.startswith(PREFIX))
    return sorted(name for name in weights if MARK in name)


def stored_adapters(path: Path) -> list[str]:
    """Global names of the adapters in a checkpoint."""
    return adapters_among(stored_entries(path))


def leave_out_new(
    path: Path, state: dict[str, Any], chunks: Iterable[str]
) -> dict[str, dict[str, Tensor]]:
    """Take adapters and new branches that a checkpoint lacks out of what is asked of it.

    Args:
        state: sharded state of the run, changed in place.
        chunks: keys of the model chunks in it.

    Returns:
        Present values of what was taken out, by chunk and name.
    """
    stored = stored_entries(path)
    new: dict[str, dict[str, Tensor]] = {}
    for chunk in chunks:
        for name, entry in list(state.get(chunk, {}).items()):
            may_be_new = isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and (
                MARK in entry.key or is_new_branch(entry.data)
            )
            if may_be_new and entry.key not in stored:
                new.setdefault(chunk, {})[name] = entry.data
                del state[chunk][name]
    return new


def new_branches(path: Path, new: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Sentences about the branches that `leave_out_new` found.

    Args:
        path: the checkpoint.
        new: what it returned.
    """
    names = [n for values in new.values() for n, value in values.items() if is_new_branch(value)]
    notes = [
        f"{path} holds no `{name}`, so it starts at zero."
        for name in names
        if not name.endswith(HISTORY)
    ]
    if len(notes) < len(names):
        notes.append(f"{path} holds no scales of 8-bit products, so their history starts anew.")
    return notes


def check_adapters(
    path: Path, state: dict[str, Any], chunks: Iterable[str], strictness: str
) -> None:
    """Refuse adapters that would be dropped, and a resumed run whose adapters are not there.

    Args:
        state: sharded state that is asked of the checkpoint.
        chunks: keys of the model chunks in it.
        strictness: ``--dist-ckpt-strictness``; the lenient ones let names differ.

    Raises:
        CheckpointError: adapters on one side only.
    """
    if strictness in LENIENT:
        return
    entries = [entry for chunk in chunks for entry in state.get(chunk, {}).values()]
    # A stage whose layers have none, such as one without layers, knows nothing of the others.
    wanted = adapters_among(getattr(entry, "key", "") for entry in entries)
    stored = stored_adapters(path)
    layers = [getattr(entry, "key", "").rpartition(".")[0] for entry in entries]
    dropped = [x for x in stored if x.partition(MARK)[0] in layers and x not in wanted]
    missing = [name for name in wanted if name not in stored]
    if dropped:
        raise CheckpointError(
            f"{path} holds the adapter `{dropped[0]}`, which the model would drop; give the "
            "`--lora-rank` and `--lora-target-modules` that it was saved with, or merge the "
            "adapters first with `tools/lora.py merge`."
        )
    if missing:
        raise CheckpointError(
            f"{path} holds no adapter `{missing[0]}`, which the model needs; give `--finetune` to "
            "start new adapters on its weights."
        )
