"""The parts of full tensors that a rank holds, under names that no layout changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A part of one full tensor.

    Attributes:
        name: of the full tensor, with the indices of its layer and expert along the whole model,
            such as ``decoder.layers.mlp.linear_fc1.weight[3]``.
        full_shape: of the full tensor.
        offset: where the part begins along each dimension.
        tensor: the part, a view of the memory it was asked for.
        is_main: false for a copy that another rank, or this one, holds too.
        is_vocabulary: the rows are entries of a vocabulary that the layout may pad differently.
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    is_main: bool
    is_vocabulary: bool

    def cut(self, full: Tensor) -> Tensor:
        """This part of the full tensor."""
        parts = zip(self.offset, self.tensor.shape, strict=True)
        return full[tuple(slice(start, start + size) for start, size in parts)]


def shards_of(
    chunk: Any, tensor_of: Callable[[Tensor], Tensor | None] = lambda parameter: parameter
) -> Iterator[Shard]:
    """Parts of all parameters of a model chunk, with fused ones taken apart.

    megatron-core's ``sharded_state_dict`` tells each part's global name, shape and offset, whatever
    the layout; gated and grouped weights come as the parts that they are made of.

    Args:
        chunk: without wrappers.
        tensor_of: what to take in place of a parameter, such as its gradient; None leaves it out.
    """
    known = {_place(parameter): parameter for parameter in chunk.parameters()}
    state: dict[str, Any] = {}
    for key, entry in chunk.sharded_state_dict(metadata=_METADATA).items():
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and entry.data is not None:
            parameter = known.get(_place(entry.data))
            tensor = None if parameter is None else tensor_of(parameter)
            if tensor is not None:
                entry.data = tensor.view(entry.data.shape)
                state[key] = entry
    apply_factories(state)
    for entry in nested_values(state):
        layers = entry.prepend_axis_num
        indices = "".join(f"[{index}]" for index in entry.global_offset[:layers])
        yield Shard(
            name=entry.key + indices,
            full_shape=tuple(entry.global_shape[layers:]),
            offset=tuple(entry.global_offset[layers:]),
            tensor=entry.data,
            is_main=is_main_replica(entry.replica_id),
            is_vocabulary=entry.allow_shape_mismatch,
        )


def _place(tensor: Tensor) -> int:
    """What tells a parameter from others: its memory, or, of one kept in 8 bits, itself."""
    return id(tensor) if is_float8tensor(tensor) else tensor.data_ptr()


_METADATA = {"singleton_local_shards": False}
