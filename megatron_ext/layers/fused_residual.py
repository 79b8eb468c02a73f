"""A compiled function that adds the gradient of a residual connection in its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.compiled import Compiled, compiled, compiles, with_plain_strides


class FusedResidual:
    """A pure function of ``x`` that also returns ``x`` for a residual connection.

    Autograd would add the gradients of the two uses of ``x`` in a separate kernel. Here the kernel
    of the function's backward pass adds them. By default that kernel recomputes the function from
    its arguments, so no other tensors are saved. With ``saving`` and ``gradients`` it uses saved
    statistics instead.

    Args:
        function: takes ``x`` and further arguments, and returns a tuple of tensors.
        saving: replaces ``function`` when gradients are needed: it returns the same outputs,
            followed by statistics for the backward pass.
        gradients: the backward pass, called as ``gradients(x_gradient, (n, positions),
            *output_gradients, *arguments, *statistics)``. ``x_gradient`` belongs to the returned
            ``x``, n is the number of outputs, and ``positions`` are the indices of the arguments of
            ``function`` that need a gradient. It returns one gradient per position, ``x`` first.
        num_outputs: number of outputs of ``saving`` before the statistics; None if it returns no
            statistics.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        *,
        saving: Callable[..., tuple[Tensor, ...]] | None = None,
        gradients: Callable[..., tuple[Tensor, ...]] | None = None,
        num_outputs: int | None = None,
    ) -> None:
        self.forward: Compiled[tuple[Tensor, ...]] = compiled(function)
        self.saving = self.forward if saving is None else compiled(saving)
        self.gradients = compiled(gradients or self._recomputing(function))
        self.num_outputs = num_outputs

    @staticmethod
    def _recomputing(
        function: Callable[..., tuple[Tensor, ...]],
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Return the default for ``gradients``, a backward pass that recomputes ``function``."""

        def gradients(
            residual_gradient: Tensor, plan: tuple[int, tuple[int, ...]], *args: Any
        ) -> tuple[Tensor, ...]:
            count, indices = plan
            output_gradients = args[:count]
            inputs = args[count:]

            def selected(*values: Tensor) -> tuple[Tensor, ...]:
                given = dict(zip(indices, values, strict=True))
                return function(*(given.get(i, arg) for i, arg in enumerate(inputs)))

            vjp: Any = torch.func.vjp
            _, pull = vjp(selected, *(inputs[i] for i in indices))
            results = pull(output_gradients)
            return (results[0] + residual_gradient, *results[1:])

        gradients.__name__ = f"{function.__name__}_gradients"
        return gradients

    def __call__(self, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        """Return ``x`` for the residual connection, and the function's outputs."""
        if not (compiles(x) and x.requires_grad and torch.is_grad_enabled()):
            return x, *self.forward(x, *args)
        x = with_plain_strides(x)
        both: tuple[Tensor, ...] = _FusedResidual.apply(self, x, *args)  # type: ignore[no-untyped-call]
        return both


class _FusedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: FusedResidual, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        results = pair.saving(x, *args)
        count = len(results) if pair.num_outputs is None else pair.num_outputs
        given = (x, *args, *results[count:])
        ctx.save_for_backward(*(arg for arg in given if isinstance(arg, Tensor)))
        ctx.fixed = [None if isinstance(arg, Tensor) else (arg,) for arg in given]
        ctx.pair = pair
        return x.view_as(x), *results[:count]

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, *of_outputs: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        given = [next(saved) if fixed is None else fixed[0] for fixed in ctx.fixed]
        indices = tuple(i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed)
        results = ctx.pair.gradients(of_x, (len(of_outputs), indices), *of_outputs, *given)
        gradients = dict(zip(indices, results, strict=True))
        return None, *(gradients.get(i) for i in range(len(ctx.needs_input_grad) - 1))
