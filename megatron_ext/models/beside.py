"""Functions whose input goes on beside their output, as a residual connection does.

Autograd adds the gradients of the two uses of a tensor in a kernel of its own: two reads and one
write of the residual stream. Here they are added where the function's own gradient is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.models.compiled import Compiled, compiled, compiles


class Beside:
    """``x`` and the outputs of a pure function of ``x`` and more.

    The backward pass computes the function again from its arguments, within its one kernel; nothing
    else is kept.

    Args:
        function: see `compiled`; it gives a tuple of tensors.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.forward: Compiled[tuple[Tensor, ...]] = compiled(function)

        def gradients(
            of_x: Tensor, plan: tuple[int, tuple[int, ...]], *args: Any
        ) -> tuple[Tensor, ...]:
            count, wanted = plan
            of_outputs, inputs = args[:count], args[count:]

            def of_wanted(*values: Tensor) -> tuple[Tensor, ...]:
                given = dict(zip(wanted, values, strict=True))
                return function(*(given.get(i, arg) for i, arg in enumerate(inputs)))

            vjp: Any = torch.func.vjp
            _, pull = vjp(of_wanted, *(inputs[i] for i in wanted))
            found = pull(of_outputs)
            return (found[0] + of_x, *found[1:])

        gradients.__name__ = f"{function.__name__}_gradients"
        self.gradients: Compiled[tuple[Tensor, ...]] = compiled(gradients)

    def __call__(self, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        """``x``, to use beside the function, and the function's outputs."""
        if not (compiles(x) and x.requires_grad and torch.is_grad_enabled()):
            return x, *self.forward(x, *args)
        both: tuple[Tensor, ...] = _Beside.apply(self, x, *args)  # type: ignore[no-untyped-call]
        return both


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: Beside, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        given = (x, *args)
        ctx.save_for_backward(*(arg for arg in given if isinstance(arg, Tensor)))
        ctx.fixed = [None if isinstance(arg, Tensor) else (arg,) for arg in given]
        ctx.pair = pair
        return x.view_as(x), *pair.forward(x, *args)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, *of_outputs: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        given = [next(saved) if fixed is None else fixed[0] for fixed in ctx.fixed]
        wanted = tuple(i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed)
        found = ctx.pair.gradients(of_x, (len(of_outputs), wanted), *of_outputs, *given)
        gradients = dict(zip(wanted, found, strict=True))
        return None, *(gradients.get(i) for i in range(len(given)))
