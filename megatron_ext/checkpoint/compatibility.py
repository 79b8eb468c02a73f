"""Checks that a checkpoint fits the model and the optimizer of a run, before anything is loaded."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.averages import PREFIX
from megatron_ext.checkpoint.state import CRITIC, SHARDING
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.grid import Layout

LENIENT = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
_ADVICE = "give the flags that it was saved with, or `--use-checkpoint-args`"
_ANEW = "give `--finetune` to start it at zero on its weights, or the flags that it was saved with"
_MODEL_AXES = ("tensor", "pipeline", "expert")


def is_new_branch(value: object) -> bool:
    """Return whether a parameter belongs to a branch that starts at zero and changes no output."""
    return bool(getattr(value, "new_branch", False))


def same_model_ranks(arguments: Namespace, layout: Layout) -> bool:
    """Return whether the run that saved had the same tensor, pipeline and expert sizes."""
    return all(
        getattr(arguments, f"{axis}_model_parallel_size", 1)
        == getattr(layout, f"{axis}_model_parallel_size")
        for axis in _MODEL_AXES
    )


def check_model(
    path: Path, model_state: dict[str, Any], arguments: Namespace, layout: Layout, strictness: str
) -> None:
    """Compare names and shapes of this rank's weights with the checkpoint's.

    Args:
        model_state: sharded tensors of the model chunks.
        arguments: flags of the run that saved.
        strictness: ``--dist-ckpt-strictness``; the lenient values let names differ.

    Raises:
        CheckpointError: the checkpoint lacks a weight, or has it in another shape.
    """
    stored = stored_entries(path)
    for tensor in tensors_in(model_state):
        known = stored.get(tensor.key)
        if not isinstance(known, TensorStorageMetadata):
            if strictness in LENIENT:
                continue
            advice = _ANEW if is_new_branch(tensor.data) else _ADVICE
            raise CheckpointError(
                f"{path} holds no `{tensor.key}`, which the model needs; {advice}."
            )
        theirs, ours = tuple(known.size), tuple(tensor.global_shape)
        if theirs == ours or (
            tensor.allow_shape_mismatch and _padding_explains(theirs, ours, arguments, layout)
        ):
            continue
        raise CheckpointError(
            f"{path} holds `{tensor.key}` with shape {list(theirs)}, but the model's has shape "
            f"{list(ours)}; {_ADVICE}."
        )


def tensors_in(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Return the sharded tensors of a state, as they are stored."""
    expanded, _, _ = load_preprocess(state)
    return (value for value in nested_values(expanded) if isinstance(value, ShardedTensor))


def _padding_explains(
    theirs: tuple[int, ...], ours: tuple[int, ...], arguments: Namespace, layout: Layout
) -> bool:
    """Return whether two sizes can be one vocabulary padded for two tensor-parallel sizes."""
    if theirs[1:] != ours[1:]:
        return False
    ranks = max(
        getattr(arguments, "tensor_model_parallel_size", 1), layout.tensor_model_parallel_size
    )
    unit = getattr(arguments, "make_vocab_size_divisible_by", 128) * ranks
    return abs(theirs[0] - ours[0]) < unit


def check_optimizer(
    path: Path,
    stored: dict[str, Any],
    arguments: Namespace,
    layout: Layout,
    *,
    distributed: bool,
    has_main_weights: bool = False,
) -> None:
    """Check that the saved optimizer state can be cut for this run.

    Args:
        stored: content metadata of the checkpoint.
        arguments: flags of the run that saved.
        distributed: this run uses the distributed optimizer.
        has_main_weights: this run keeps fp32 weights beside those of the model.

    Raises:
        CheckpointError: the state was saved by the other kind of optimizer, or for one layout.
    """
    kind = stored.get(SHARDING)
    if (kind is not None) != distributed:
        there, here = ("with", "without") if kind else ("without", "with")
        raise CheckpointError(
            f"{path} was saved {there} `--use-distributed-optimizer`, but this run is {here} it; "
            "use the same, or give `--no-load-optim`."
        )
    held_them = any(getattr(arguments, name, False) for name in ("bf16", "fp16"))
    if not distributed and held_them != has_main_weights:
        there, here = ("bf16 or fp16", "fp32") if held_them else ("fp32", "bf16 or fp16")
        raise CheckpointError(
            f"{path} was saved in {there}, but this run is in {here}, whose optimizer state only "
            "`--use-distributed-optimizer` can take over; use the same precision, or give "
            "`--no-load-optim`."
        )
    if kind == "dp_reshardable" and not same_model_ranks(arguments, layout):
        raise CheckpointError(
            f"{path} was saved with `--no-dist-ckpt-optim-fully-reshardable`, so that its "
            "optimizer state loads only with the same tensor, pipeline and expert parallel sizes; "
            "use those, or give `--no-load-optim`."
        )


_OF_A_BLOCK = re.compile(r"((?:.*\.)?(?:\w*blocks|layers))\.(\d+)\.")
_CRITIC = f"{CRITIC}."
_HEADS = "mtp."
"""Begins the names of heads of multi-token prediction. A run may leave them out one by one."""


def weights_in(state: dict[str, Any]) -> set[str]:
    """Return the names of the weights in a sharded state."""
    return {tensor.key for tensor in tensors_in(state)}


def check_unexpected(path: Path, expected: Collection[str], strictness: str = "") -> list[str]:
    """Compare the weights in a checkpoint with those that a network has on all ranks.

    Each rank knows the names of its own stage only, so the caller unites them. Optimizer and random
    states, averages, and other networks are not compared.

    Args:
        expected: names of the network's weights; those of the second network begin with `CRITIC`.
        strictness: ``--dist-ckpt-strictness``; the lenient values let names differ.

    Returns:
        A sentence about the weights that are left out, where there are some.

    Raises:
        CheckpointError: the model has fewer numbered blocks of a kind.
    """
    if strictness in LENIENT:
        return []
    asked = {name.removeprefix(PREFIX) for name in expected}
    stored = _names_of(path, critic=any(name.startswith(_CRITIC) for name in expected))
    _check_blocks(path, stored, asked)
    left = sorted(stored - asked)
    if not left:
        return []
    return [
        f"{path} holds {len(left)} weight(s) that the model does not take, such as `{left[0]}`; "
        "they are left out."
    ]


def _names_of(path: Path, *, critic: bool) -> set[str]:
    """Return the names of the weights of one network in a checkpoint."""
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
    """Return the numbers of blocks by the beginning of their names."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = _OF_A_BLOCK.match(name)
        if match is not None:
            found.setdefault(match[1], set()).add(int(match[2]))
    return found
