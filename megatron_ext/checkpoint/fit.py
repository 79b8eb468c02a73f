"""Does a checkpoint fit this run?  Asked before anything is overwritten."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.state import SHARDING
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.errors import CheckpointError
from megatron_ext.layout import Layout

LENIENT = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
_ADVICE = "give the flags that it was saved with, or `--use-checkpoint-args`"
_ANEW = "give `--finetune` to start it at zero on its weights, or the flags that it was saved with"
_MODEL_AXES = ("tensor", "pipeline", "expert")


def is_new_branch(value: object) -> bool:
    """Whether a parameter belongs to a branch that starts at zero, and so changes no output."""
    return bool(getattr(value, "new_branch", False))


def same_model_ranks(arguments: Namespace, layout: Layout) -> bool:
    """Whether the run that saved had the same tensor, pipeline and expert parallel sizes."""
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
        arguments: of the run that saved.
        strictness: ``--dist-ckpt-strictness``; the lenient ones let names differ.

    Raises:
        CheckpointError: a weight that is not there, or has another shape.
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
    """Sharded tensors of a state, as they are stored."""
    expanded, _, _ = load_preprocess(state)
    return (value for value in nested_values(expanded) if isinstance(value, ShardedTensor))


def _padding_explains(
    theirs: tuple[int, ...], ours: tuple[int, ...], arguments: Namespace, layout: Layout
) -> bool:
    """Whether two vocabulary sizes can be one vocabulary, padded for two tensor-parallel sizes."""
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
    """Whether the saved optimizer state can be cut for this run.

    Args:
        stored: content metadata of the checkpoint.
        distributed: this run uses the distributed optimizer.
        has_main_weights: this run keeps fp32 weights beside those of the model.

    Raises:
        CheckpointError: saved with the other kind of optimizer, or for one layout only.
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
