"""Frozen weights in 4 bits under adapters (QLoRA, arXiv:2305.14314), by bitsandbytes.

Each block of 64 numbers of a weight is stored as 4-bit codes and one float32 factor, 4.5 bits for a
number. The codes are those of NF4 or FP4, and bitsandbytes reads and writes them. A product
restores the plain weight and frees it again, in the forward and in the backward pass.

The layer's parameter keeps its name, shape and dtype, but is NaN: one number takes the place of
all. So whatever lists the model's weights finds it; who needs its values calls `weight_of`. It gets
values from a folder of published weights alone, one parameter after another (`shards_to_fill`), so
that no rank ever holds its part of the model in 16 bits. Blocks lie within a row of the weight
where a rank's number of inputs is a multiple of 64; every layout then has the same values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.initialization import Shard
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear, WholeLinear, enter

BLOCK = 64
"""Numbers that share a factor, as in QLoRA."""
_IN_A_LAYER = re.compile(r"(^|\.)layers\.")


class QuantizedWeight:
    """A layer's weight ``[out, in]`` in 4 bits; it has no values before `set`.

    Args:
        kind: ``nf4`` or ``fp4``.
    """

    def __init__(self, kind: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.kind = kind
        self.shape = shape
        self.dtype = dtype
        self._codes: Tensor | None = None
        self._state: Any = None

    def set(self, values: Tensor) -> None:
        """Store the values of a plain weight."""
        from bitsandbytes.functional import quantize_4bit

        flat = values.detach().to(self.dtype).flatten()
        # On a CPU bitsandbytes 0.50 reads blocks that go on in another row with wrong factors, so
        # let each block be a row.
        rows = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        self._codes, self._state = quantize_4bit(rows, blocksize=BLOCK, quant_type=self.kind)

    def values(self) -> Tensor:
        """Return the plain weight ``[out, in]``."""
        assert self._codes is not None, "the weight has got no values"
        from bitsandbytes.functional import dequantize_4bit

        flat: Tensor = dequantize_4bit(self._codes, self._state).flatten()
        return flat[: math.prod(self.shape)].view(self.shape)

    def multiply(
        self,
        x: Tensor,
        *,
        bias: Tensor | None,
        tp_group: Any,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        **_unused: Any,
    ) -> Tensor:
        """Return ``x W^T + bias`` for x ``[s, b, in]``; the options are those of megatron-core.

        Args:
            sequence_parallel: whether x is ``[s/tp, b, in]``, and is gathered over ``tp_group``.
            allreduce_dgrad: whether the gradient of x is summed over the group.
        """
        if sequence_parallel or allreduce_dgrad:
            x = enter(x, tp_group, sequence_parallel)
        product: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias


class _Product(torch.autograd.Function):
    """``x W^T`` with a frozen weight in 4 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
        ctx.weight = weight
        return x @ weight.values().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.weight.values(), None


def mark_weights(chunk: torch.nn.Module, kind: str) -> None:
    """Let the linear layers in a chunk's transformer layers keep their weights in 4 bits."""
    for name, layer in chunk.named_modules():
        is_linear = isinstance(layer, ColumnParallelLinear | RowParallelLinear | WholeLinear)
        if is_linear and _IN_A_LAYER.search(name):
            weight = layer.weight
            layer.quantized = QuantizedWeight(kind, weight.shape, weight.dtype)
            weight.quantized = layer.quantized
            _keep_from_loads(layer)


def _keep_from_loads(layer: Any) -> None:
    """Let ``load_state_dict`` neither write nor miss the layer's weight, which has no memory."""
    names: list[str] = []

    def leave_out(_layer: Any, state: dict[str, Any], prefix: str, *_unused: Any) -> None:
        names.append(f"{prefix}weight")
        state.pop(names[-1], None)

    def expect_none(_layer: Any, keys: Any) -> None:
        keys.missing_keys.remove(names.pop())

    layer.register_load_state_dict_pre_hook(leave_out)
    layer.register_load_state_dict_post_hook(expect_none)


def drop_values(parameter: Any) -> None:
    """Free the memory of a parameter whose weight is kept in 4 bits; leave others alone."""
    if getattr(parameter, "quantized", None) is not None:
        parameter.data = parameter.data.new_full((), math.nan).expand(parameter.shape)


def weight_of(layer: Any) -> Tensor:
    """Return the values of a layer's weight, whichever way they are kept."""
    quantized: QuantizedWeight | None = getattr(layer, "quantized", None)
    weight: Tensor = layer.weight.detach() if quantized is None else quantized.values()
    return weight


def restore_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """Give the parameters of 4-bit weights their values, as plain weights."""
    for chunk in chunks:
        for layer in chunk.modules():
            if getattr(layer, "quantized", None) is not None:
                module: Any = layer
                module.weight.data = module.quantized.values()
                module.weight.quantized = module.quantized = None


def shards_to_fill(
    chunks: Sequence[torch.nn.Module],
    shards_of: Callable[..., Iterator[Shard]],
) -> Iterator[Shard]:
    """Yield the shards of all parameters; what the caller writes into them becomes their values.

    A 4-bit weight has memory in 16 bits until the shards of the next parameter are asked for.
    Then the shards of the one before it must have their values.

    Args:
        shards_of: ``shards_of(chunk, tensor_of)`` yields a chunk's shards, with
            ``tensor_of(parameter)`` as their memory.
    """
    waiting: list[tuple[QuantizedWeight, Tensor]] = []

    def settle() -> None:
        for quantized, values in waiting:
            quantized.set(values)
        waiting.clear()

    def memory_of(parameter: Any) -> Tensor:
        settle()
        quantized: QuantizedWeight | None = getattr(parameter, "quantized", None)
        if quantized is None:
            plain: Tensor = parameter
            return plain
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        waiting.append((quantized, values))
        return values

    for chunk in chunks:
        yield from shards_of(chunk, memory_of)
    settle()
