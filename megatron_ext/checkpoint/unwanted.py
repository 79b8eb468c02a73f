"""Weights in a checkpoint that no rank's model takes.

Each rank knows the names of its own stage only, so that the names of all must be united first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.companion import CRITIC
from megatron_ext.checkpoint.ema import PREFIX
from megatron_ext.checkpoint.fit import LENIENT, tensors_in
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.errors import CheckpointError

_OF_A_BLOCK = re.compile(r"((?:.*\.)?(?:\w*blocks|layers))\.(\d+)\.")
_CRITIC = f"{CRITIC}."
_HEADS = "mtp."
"""Begins the names of heads of multi-token prediction, which a run may leave out one by one."""


def weights_in(state: dict[str, Any]) -> set[str]:
    """Names of the weights in a sharded state."""
    return {tensor.key for tensor in tensors_in(state)}


def check_unwanted(path: Path, wanted: Collection[str], strictness: str = "") -> list[str]:
    """Compare what a checkpoint holds with what is asked of it.

    Optimizer and random states, averages, and other networks are not looked at.

    Args:
        path: the checkpoint.
        wanted: names of the weights of one network on all ranks; the critic's begin as it does.
        strictness: ``--dist-ckpt-strictness``; the lenient ones let names differ.

    Returns:
        A sentence about the weights that are left out, where there are some.

    Raises:
        CheckpointError: the model has fewer numbered blocks of a kind.
    """
    if strictness in LENIENT:
        return []
    asked = {name.removeprefix(PREFIX) for name in wanted}
    stored = _of_network(path, critic=any(name.startswith(_CRITIC) for name in wanted))
    _check_blocks(path, stored, asked)
    left = sorted(stored - asked)
    if not left:
        return []
    return [
        f"{path} holds {len(left)} weight(s) that the model does not take, such as `{left[0]}`; "
        "they are left out."
    ]


def _of_network(path: Path, *, critic: bool) -> set[str]:
    """Names of the weights of the critic or of the model in a checkpoint."""
    stored = stored_entries(path)
    return {
        name
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
        and "optimizer." not in name
        and not name.startswith(PREFIX)
        and name.startswith(_CRITIC) == critic
    }


def _check_blocks(path: Path, stored: Iterable[str], asked: Iterable[str]) -> None:
    theirs, ours = _blocks(stored), _blocks(asked)
    for kind, numbers in theirs.items():
        own = ours.get(kind, set())
        if numbers > own and not kind.startswith(_HEADS):
            raise CheckpointError(
                f"{path} holds {len(numbers)} `{kind}`, but the model has only {len(own)}, so that "
                f"`{kind}.{min(numbers - own)}` would be dropped; give the flags that it was saved "
                "with, or `--use-checkpoint-args`."
            )


def _blocks(names: Iterable[str]) -> dict[str, set[int]]:
    """Numbers of blocks by what their names begin with."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = _OF_A_BLOCK.match(name)
        if match is not None:
            found.setdefault(match[1], set()).add(int(match[2]))
    return found
