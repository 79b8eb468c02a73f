"""Holds the tensors of a checkpoint of another program, by the names of the whole model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.table import OurName, parse

Key = OurName | str
"""Identifies a parameter: an `OurName` within layers, a name outside of them."""
_EQUIVALENT = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
"""Pairs of names within a layer for the same norm: joined to the layer after it, or on its own."""


def key_of(name: str) -> Key:
    """Return the key of a parameter, given its name with the numbers of the whole model."""
    return parse(name) or name


def equivalents(key: Key) -> list[Key]:
    """Return the keys under which a parameter may be stored, ``key`` first."""
    keys = [key]
    if isinstance(key, OurName):
        for pair in _EQUIVALENT:
            for one, other in (pair, pair[::-1]):
                if key.rest.startswith(one):
                    rest = other + key.rest.removeprefix(one)
                    keys.append(OurName(key.block, key.layer, rest, key.expert))
    return keys


@dataclass(frozen=True)
class Stored:
    """A tensor of the whole model as a checkpoint stores it.

    Attributes:
        name: the name in the checkpoint, for messages.
        parts: functions that return its parts, in the order of tensor-parallel ranks. A file is
            read when its function is called.
        is_joined: whether the parts follow each other in the whole tensor in any case. Otherwise,
            the parts of a gated MLP's first layer each hold rows of the gate, then as many others.
    """

    name: str
    parts: Sequence[Callable[[], Tensor]]
    is_joined: bool = False

    def whole(self, shape: Sequence[int], *, gated: bool, is_vocabulary: bool) -> Tensor:
        """Return the tensor of the whole model, with the shape ``shape``.

        Args:
            gated: whether the rows are those of a gate, then as many others.
            is_vocabulary: whether the rows are entries of a vocabulary; missing ones become zeros.

        Raises:
            CheckpointError: the parts do not make up a tensor of this shape, or are copies of it
                that differ.
        """
        parts = [read() for read in self.parts]
        first, *others = parts
        if tuple(first.shape) == tuple(shape):
            if any(not torch.equal(first, other) for other in others):
                raise CheckpointError(
                    f"`{self.name}` is the same on all tensor-parallel ranks, but the files of "
                    "these hold different values; save the checkpoint again."
                )
            return first
        axis = self._axis(parts, shape, is_vocabulary)
        if gated and axis == 0 and others and not self.is_joined:
            halves = [part.chunk(2) for part in parts]
            parts = [gate for gate, _ in halves] + [other for _, other in halves]
        whole = torch.cat(parts, axis)
        lacking = shape[0] - whole.shape[0]
        return torch.cat([whole, whole.new_zeros(lacking, *shape[1:])]) if lacking else whole

    def _axis(self, parts: Sequence[Tensor], shape: Sequence[int], is_vocabulary: bool) -> int:
        """Return the axis along which ``parts`` make up a tensor of the shape ``shape``."""
        for axis, size in enumerate(shape):
            rest = [(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts]
            expected = (*shape[:axis], *shape[axis + 1 :])
            if parts[0].dim() != len(shape) or any(sizes != expected for sizes in rest):
                continue
            total = sum(part.shape[axis] for part in parts)
            if total == size or (axis == 0 and is_vocabulary and total < size):
                return axis
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise CheckpointError(
            f"`{self.name}` has {shapes} on the tensor-parallel ranks, which do not make up "
            f"{list(shape)}, the shape that its flags imply; give another checkpoint."
        )


@dataclass
class Source:
    """An opened checkpoint of another program.

    Attributes:
        path: its folder.
        arguments: the flags of the run that saved it.
        iteration: the number of steps that it had made; None if the checkpoint does not tell.
        tensors: the tensors of the whole model, by key.
        vocabulary: number of rows of the embedding.
        dtype: dtype of the embedding.
        unused: names of what is in the checkpoint but not imported, each with the reason.
        opened: a context in which tensors can be read.
    """

    path: Path
    arguments: Namespace
    iteration: int | None
    tensors: dict[Key, Stored]
    vocabulary: int
    dtype: torch.dtype
    unused: dict[str, str] = field(default_factory=dict)
    opened: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def take(self, key: Key) -> Stored:
        """Remove a tensor and return it; raise a CheckpointError if there is none."""
        for other in equivalents(key):
            stored = self.tensors.pop(other, None)
            if stored is not None:
                return stored
        raise CheckpointError(
            f"{self.path} holds no `{shown(key)}`, which a model of its flags has; give a whole "
            "checkpoint."
        )


def shown(key: Key) -> str:
    """Return a parameter's name for a message."""
    if isinstance(key, str):
        return key
    block = {"decoder": "decoder.layers", "depth": "mtp.layers"}.get(key.block)
    name = f"{block or 'mtp.layers'}.{key.layer}.{'' if block else 'transformer_layer.'}{key.rest}"
    return name if key.expert is None else f"{name} of expert {key.expert}"


def arguments_of(content: Mapping[str, Any], place: Path) -> Namespace:
    """Return the flags stored in a file; raise a CheckpointError if there are none."""
    arguments = content.get("args")
    if not isinstance(arguments, Namespace):
        raise CheckpointError(
            f"{place} holds no `args`, the flags of the run that saved it, without which the model "
            "is not known; give a checkpoint of Megatron-LM's pretrain_gpt.py."
        )
    return arguments
