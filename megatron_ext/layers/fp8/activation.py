"""The activation between the two matrices of an MLP, fused with the casts before and after it.

With delayed scaling the scales are known in advance. So one kernel can compute the activation and
cast it for the second matrix, and another kernel can compute the gradient of the activation's input
and cast it for the first. The 16-bit results of both are never written.

The gradient reaches the first layer through its scaling (`Scaling.handed`), because autograd can
only pass on tensors with the output's dtype. Autograd gets a placeholder full of NaN instead.
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
    """An activation that the layer after it computes; see `pointwise.activated`.

    Attributes:
        name, gated: arguments of `pointwise.activated`; f is the width of its result.
        before: scaling of the previous layer. That layer's output ``wide`` is the activation's
            input, ``[m, f]``, or ``[m, 2 f]`` with a gate.
        columns: whether the weight of the previous layer needs a gradient.
    """

    name: str
    gated: bool
    before: DelayedScaling
    columns: bool

    def cast(self, wide: Tensor, after: DelayedScaling, *, columns: bool) -> Pair:
        """Return the activation ``[m, f]`` in 8 bits; with ``columns`` also its transpose."""
        kernels: Any = kernels_for(wide)
        function = partial(kernels.activated, wide, self.name, self.gated)
        return after.pair_by(function, Role.INPUT, columns=columns)

    def hand_over(self, gradient: Tensor, wide: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Compute the 8-bit gradient of the activation's input; leave it for the previous layer.

        Return the placeholder that autograd passes to that layer instead, in the shape ``shape``.

        Args:
            gradient: gradient of the activation's output.
            wide: the activation's input.
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
    """Inside the block, let the second layer of an MLP compute the activation, if that is possible.

    Yield whether it is. If so, call ``second`` with ``wide``, the output of the layer ``first``;
    otherwise with the activation of ``wide``. It is possible if both layers know their scales in
    advance, and nothing but ``wide`` enters their products: no adapter, no bias of the first layer,
    no 16-bit gradient.
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
