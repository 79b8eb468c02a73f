"""Cuts the distributed optimizer's state into boxes of whole parameters, without communication.

Each data-parallel rank holds the state of a range of elements of each parameter. megatron-core's
``fully_reshardable`` format gathers the state of all parameters on every rank, which costs time and
memory, and then divides the writing among the ranks. But the same file format can store a tensor as
boxes of any size. A range of elements in row-major order is a union of a few boxes, so each rank
can write its own range directly, and can read it straight into the optimizer's memory. A checkpoint
in boxes has the same tensors as a gathered one, so any reader of the format loads it in any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_ext.checkpoint.optimizer_state import RESHARDABLE, parameters_of
from megatron_ext.errors import CheckpointError
from megatron_ext.optim.update import parts_of

PREFIX = "optimizer.state"
_STEP = "step"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangular block of a tensor: its first index and its size, both along each axis."""


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Yield, in order, boxes that cover elements ``start`` to ``end - 1`` of a row-major tensor.

    The elements of each box are contiguous. With n axes there are at most 2n - 1 boxes.
    """
    if start == end:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(end, row)
    if first == last:
        yield from _in_row(first, shape, head, tail)
        return
    if head:
        yield from _in_row(first, shape, head, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(last, shape, 0, tail)


def _in_row(index: int, shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    for offset, size in boxes(shape[1:], start, end):
        yield (index, *offset), (1, *size)


def sharded_optimizer_state(
    optimizer: MegatronOptimizer,
    model_state: dict[str, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[Any, Any]:
    """Return an optimizer's sharded state in the ``fully_reshardable`` format.

    The state of distributed optimizers is cut into boxes instead of being gathered.

    Args:
        optimizer: an optimizer of megatron-core, or a chain of them.
        model_state: the sharded state of the model, whose weights the optimizer updates.
        metadata: megatron-core's description of the sharding, which is used only for optimizers
            that are not distributed.
        is_loading: whether the state will be filled from a checkpoint, rather than saved.

    Raises:
        CheckpointError: a weight is saved with its elements in another order than in memory.
    """
    parts = parts_of(optimizer)
    if len(parts) > 1:
        optimizer._synchronize_steps()
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    entries = {id(entry.data): entry for entry in nested_values(sharded)}
    states: list[dict[Any, Any]] = []
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            state = {
                **part.state_dict(),
                "param_state": dict(enumerate(_shards_by_kind(part, entries))),
            }
            states.append({**state, "param_state_sharding_type": RESHARDABLE})
        else:
            states.append(part.sharded_state_dict(model_state, is_loading, metadata=metadata))
    return states[0] if len(parts) == 1 else dict(enumerate(states))


def _shards_by_kind(
    part: DistributedOptimizer, entries: dict[int, Any]
) -> Iterator[dict[str, list[ShardedTensor]]]:
    """Yield the sharded optimizer state of each parameter that has elements on this rank.

    Each is a mapping from the kind of state, such as "exp_avg", to the sharded tensors of that
    kind.

    Args:
        part: one distributed optimizer.
        entries: the model's sharded tensors and factories, by the ids of their parameters.
    """
    instance = part.distributed_optimizer_instance_id
    for parameter in parameters_of(part):
        states = part._get_main_param_and_optimizer_states(parameter)
        shards = _shards(entries[id(parameter)])
        start = part._get_model_param_range_map(parameter)["param"].start
        yield {
            kind: list(_cut(shards, f"{PREFIX}.{kind}.", state.float(), start, instance))
            for kind, state in states.items()
            if kind != _STEP
        }


def in_boxes(
    entry: ShardedTensor | ShardedTensorFactory, prefix: str, values: Tensor, start: int
) -> list[ShardedTensor]:
    """Return sharded tensors that save a range of a parameter's optimizer state, cut into boxes.

    Args:
        entry: the parameter's own sharded tensor, or a factory that makes several.
        prefix: kind of state, put before the parameter's name in the checkpoint.
        values: one fp32 value per element, in any shape.
        start: index of the first element in the flattened parameter.
    """
    return list(_cut(_shards(entry), f"{prefix}.", values.float(), start, 0))


def cut_weights(state: dict[str, Any], chunks: Iterable[str]) -> None:
    """Replace sharded weights in a state by this rank's elements of them, cut into boxes.

    Args:
        state: the state to save or to load.
        chunks: the keys in ``state`` of the weights of the model's chunks.
    """
    found = [
        (state[key], name, entry)
        for key in chunks
        for name, entry in state.get(key, {}).items()
        if isinstance(getattr(entry, "data", None), torch.nn.Parameter)
    ]
    if not any(hasattr(entry.data, "weight_shard") for _, _, entry in found):
        return
    for weights, name, entry in found:
        shard = getattr(entry.data, "weight_shard", None)
        if shard is not None:
            weights[name] = list(_cut(_shards(entry), "", shard.values, shard.start, 0))
        elif not entry.data.requires_grad:
            # Frozen weights are whole; those of other layers are boxes of the same stored tensor.
            weights[name] = list(_cut(_shards(entry), "", entry.data, 0, None))
        if not weights[name]:
            del weights[name]  # the checkpoint's common part would hold an empty list


def _cut(
    shards: list[ShardedTensor], prefix: str, values: Tensor, start: int, instance: int | None
) -> Iterator[ShardedTensor]:
    """Cut values for a range of a parameter's elements into boxes; yield each as a sharded tensor.

    Args:
        shards: the parameter's own sharded tensors.
        prefix: what to put before the parameter's name in the checkpoint.
        values: one value for each element of the range.
        start: index of the range's first element in the flattened parameter.
        instance: index of the distributed-optimizer instance, if several hold copies of the range;
            None if data-parallel ranks hold copies, as they do of the whole parameter.
    """
    flat = values.detach().view(-1)
    end = start + flat.numel()
    for shard in shards:
        begin = shard.data.storage_offset()
        low = max(start, begin)
        high = min(end, begin + shard.data.numel())
        position = low - start
        ahead = shard.prepend_axis_num
        replica = shard.replica_id
        if instance is not None:
            # Replica 0: the ranks of a data-parallel group hold different elements, not copies.
            replica = (*replica[:-1], instance)
        for offset, size in boxes(tuple(shard.data.shape), low - begin, max(low, high) - begin):
            length = math.prod(size)
            full = (*(1 for _ in range(ahead)), *size)
            place = (*(0 for _ in range(ahead)), *offset)
            yield ShardedTensor(
                f"{prefix}{shard.key}",
                flat[position : position + length].view(full),
                flat.dtype,
                full,
                tuple(shard.global_shape),
                tuple(a + b for a, b in zip(shard.global_offset, place, strict=True)),
                None,
                replica_id=replica,
                allow_shape_mismatch=shard.allow_shape_mismatch,
            )
            position += length


def _shards(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the sharded tensors that describe a parameter, without its values.

    A factory makes several of one parameter, such as the two halves of a gated layer. Their data
    are views, on the meta device, of one empty tensor with the parameter's shape. So the offset of
    a view tells which elements of the parameter it covers.
    """
    whole = torch.empty(entry.data.shape, device="meta")
    if isinstance(entry, ShardedTensor):
        own = (entry.global_shape, entry.global_offset, entry.axis_fragmentations)
        return [
            ShardedTensor(
                entry.key,
                whole,
                whole.dtype,
                tuple(whole.shape),
                *own,
                replica_id=entry.replica_id,
                prepend_axis_num=entry.prepend_axis_num,
                allow_shape_mismatch=entry.allow_shape_mismatch,
            )
        ]
    built = entry.build_fn(entry.key, whole, entry.replica_id, entry.flattened_range)
    shards = list(nested_values({"built": built}))
    for shard in shards:
        if shard.data._base is not whole or not shard.data.is_contiguous():
            raise CheckpointError(
                f"The optimizer's state of `{entry.key}` cannot be saved in the format that loads "
                "in any layout, since the weight is stored in another order of its elements; give "
                "`--no-dist-ckpt-optim-fully-reshardable`."
            )
    return shards
