"""The activation between the two matrices of an MLP, joined to the casts on both sides of it.

With delayed scaling the scales are known before the numbers. One kernel can then compute the
activation and cast it for the second matrix, and another can compute the gradient of its input and
cast it for the first. The 16-bit results of both are never written.

The gradient reaches the first layer through its scaling (`Scaling.handed`), since autograd passes
on only tensors of the output's dtype. Autograd gets a placeholder full of NaN.
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
    """An activation that the layer after it computes, as `pointwise.activated` does.

    Attributes:
        name, gated: see `pointwise.activated`; f is the width of its result.
        before: the scaling of the layer whose output ``wide`` is the activation's input, ``[m, f]``
            or with a gate ``[m, 2 f]``.
        columns: that layer's weight needs a gradient.
    """

    name: str
    gated: bool
    before: DelayedScaling
    columns: bool

    def cast(self, wide: Tensor, after: DelayedScaling, *, columns: bool) -> Pair:
        """Return the activation ``[m, f]`` in 8 bits, with ``columns`` also transposed."""
        kernels: Any = kernels_for(wide)
        function = partial(kernels.activated, wide, self.name, self.gated)
        return after.pair_by(function, Role.INPUT, columns=columns)

    def hand_over(self, gradient: Tensor, wide: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Hand the gradient of ``wide`` to the layer before, given that of the activation.

        Return a placeholder of this shape for autograd.
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
    """Let the layer ``second`` compute the activation inside the block; yield whether it can.

    If so, ``second`` must be called with ``wide``, the output of the layer ``first``, else with the
    activation of ``wide``. Both layers must have given scales, in whose products nothing but
    ``wide`` takes part: no adapter, no bias of the first layer, no gradient in 16 bits.
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
