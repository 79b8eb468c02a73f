"""A function of many rows, computed a block of rows at a time, and again in the backward pass.

Only the inputs are kept for the backward pass. The intermediate results of one block fit into a
processor's cache, which makes them faster to compute again than to load from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_blocks(
    function: Callable[..., Tensor], rows: int, *tensors: Tensor | None, shared: int = 0
) -> Tensor:
    """Return ``function(*tensors)``, computed for some rows (entries of the first axis) at a time.

    Args:
        function: computes each row of its result from the same rows of its arguments.
        rows: the number of rows of a block.
        tensors: the arguments; None is passed as it is.
        shared: how many of the last arguments have no rows, so that each block needs all of them.
    """
    result: Tensor = _InBlocks.apply(function, rows, shared, *tensors)  # type: ignore[no-untyped-call]
    return result


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, rows: int, shared: int, *tensors: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.rows = rows
        ctx.with_rows = len(tensors) - shared
        ctx.save_for_backward(*tensors)
        result: Tensor | None = None
        for block in _blocks(tensors, rows):
            values = function(*_cut(tensors, block, ctx.with_rows))
            if result is None:
                result = values.new_empty(_count(tensors), *values.shape[1:])
            result[block] = values
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tensors = ctx.saved_tensors
        needed = [i for i, needs in enumerate(ctx.needs_input_grad[3:]) if needs]
        gradients: list[Tensor | None] = [None] * len(tensors)
        for i in needed:
            fill = torch.empty_like if i < ctx.with_rows else torch.zeros_like
            gradients[i] = fill(tensors[i])
        for block in _blocks(tensors, ctx.rows):
            inputs = [x if x is None else x.detach() for x in _cut(tensors, block, ctx.with_rows)]
            leaves = [inputs[i].requires_grad_() for i in needed]  # type: ignore[union-attr]
            with torch.enable_grad():
                values = ctx.function(*inputs)
            own = torch.autograd.grad(values, leaves, gradient[block])
            for i, change in zip(needed, own, strict=True):
                total = gradients[i]
                assert total is not None
                if i < ctx.with_rows:
                    total[block] = change
                else:
                    total += change
        return None, None, None, *gradients


def _count(tensors: tuple[Tensor | None, ...]) -> int:
    assert tensors[0] is not None
    return len(tensors[0])


def _blocks(tensors: tuple[Tensor | None, ...], rows: int) -> list[slice]:
    return [slice(first, first + rows) for first in range(0, _count(tensors), rows)]


def _cut(tensors: tuple[Tensor | None, ...], block: slice, with_rows: int) -> list[Tensor | None]:
    """Return the rows of a block of those tensors that have rows, and the others as they are."""
    return [x if x is None or i >= with_rows else x[block] for i, x in enumerate(tensors)]
