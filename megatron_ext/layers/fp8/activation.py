"""The activation between the two matrices of an MLP, fused with the casts before and after it.

With delayed scaling the scales are known in advance. So one kernel can compute the activation and
cast it to 8 bits for the second layer, and another kernel can compute the gradient of the
activation's input and cast it for the first layer. Neither result is ever written in 16 bits.

The second layer stores the 8-bit gradient in the `Scaling` of the first layer (`Scaling.handed`).
Autograd could not pass it on, because a gradient must have the dtype of the first layer's output.
Autograd passes a placeholder full of NaN instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatron_ext.layers.fp8.casting import kernels_for
from megatron_ext.layers.fp8.matrices import Layouts
from megatron_ext.layers.fp8.scaling import DelayedScaling, Pair, Role


@dataclass(frozen=True)
class Activation:
    """An activation that the MLP's second layer computes, fused with its casts to 8 bits.

    See `pointwise.activated` for the function. The activation's input, called ``wide``, is the
    first layer's output: ``[m, f]`` for m tokens, or ``[m, 2 f]`` with a gate.

    Attributes:
        name: name of the activation function, a key of `transformer_config.ACTIVATIONS`.
        gated: whether the activation has a gate.
        before: scaling of the first layer, which casts the gradient of ``wide`` to 8 bits.
        columns: whether the 8-bit gradient of ``wide`` is also computed in transposed form, which
            the first layer needs for its weight gradient.
    """

    name: str
    gated: bool
    before: DelayedScaling
    columns: bool

    def cast(self, wide: Tensor, after: DelayedScaling, *, columns: bool) -> Pair:
        """Return the activation ``[m, f]`` in 8 bits; with ``columns`` also its transpose.

        The result is the second layer's input, and ``after`` is that layer's scaling.
        """
        kernels: Any = kernels_for(wide)
        function = partial(kernels.activated, wide, self.name, self.gated)
        return after.pair_by(function, Role.INPUT, columns=columns)

    def hand_over(self, gradient: Tensor, wide: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Compute the 8-bit gradient of the activation's input, and store it for the first layer.

        It is stored in ``before.handed``, because autograd cannot pass it on. Return the
        placeholder that autograd passes to the first layer instead.

        Args:
            gradient: gradient of the activation's output.
            wide: the activation's input.
            shape: shape of the placeholder.
        """
        kernels: Any = kernels_for(wide)
        function: Callable[..., Layouts] = partial(
            kernels.gradient_before, gradient, wide, self.name, self.gated
        )
        pair = self.before.pair_by(function, Role.GRADIENT, columns=self.columns)
        placeholder = wide.new_full((), float("nan")).expand(shape)
        self.before.handed = placeholder, pair
        return placeholder


@contextmanager
def joined(first: Any, second: Any, wide: Tensor, name: str, gated: bool) -> Iterator[bool]:
    """Inside the block, let the second layer of an MLP compute the activation, if possible.

    Yield True if it does: the caller must then call ``second`` with ``wide``, the output of the
    layer ``first``. Yield False if not: the caller must apply the activation ``name`` (with a gate
    if ``gated``) to ``wide``, and call ``second`` with the result. It is possible on a GPU with
    Triton if both layers know their scales in advance, compute weight gradients in 8 bits and have
    no adapter, and ``first`` has no bias.
    """
    scalings = [getattr(layer, "fp8", None) for layer in (first, second)]
    possible = (
        all(isinstance(x, DelayedScaling) and x.is_given and x.config.fp8_wgrad for x in scalings)
        and (first.lora, second.lora, first.bias) == (None, None, None)
        and kernels_for(wide) is not None
    )
    if not possible:
        yield False
        return
    second.fp8.activation = Activation(name, gated, first.fp8, first.weight.requires_grad)
    try:
        yield True
    finally:
        second.fp8.activation = None
