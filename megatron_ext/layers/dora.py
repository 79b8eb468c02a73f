"""Adapters that learn the lengths of a weight's rows apart from their directions (DoRA).

The adapted weight is ``m V / |V|`` with ``V = W + scale * B A`` (arXiv:2402.09353). |V| are the
lengths of V's rows, one for each output, and the trained magnitudes m start as them, so that the
layer starts as it was. As in section 4.3 of the paper, |V| is a constant to the backward pass.
Where the layer's input is split over the tensor-parallel ranks, so are the rows, and the ranks sum
their squares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.lora import Adapter, Layer
from megatron_ext.layers.quantized import weight_of

_SMALLEST = 1e-30
"""Rows of zeros, as of a layer that starts at zero, are divided by this."""


class MagnitudeAdapter(Adapter):
    """The matrices A and B, and the magnitudes ``[out]``, split like the rows of B.

    The magnitudes are NaN until `layers.adapter_start` has seen the weights, or a checkpoint has
    them.
    """

    groups = False

    def __init__(self, layer: Layer, *args: Any, **options: Any) -> None:
        super().__init__(layer, *args, **options)
        self.magnitude = torch.nn.Parameter(torch.full_like(layer.weight[:, 0], torch.nan))
        if "b" in self.sides_cut:
            self.sides_cut = {**self.sides_cut, "magnitude": 0}
        self._mark("magnitude", layer)

    def forward(self, layer: Layer, x: Tensor, output: Tensor) -> Tensor:
        """Return the output of the adapted layer, given the layer's input and own output."""
        factor = self._whole("magnitude") if not self.communicates else self.magnitude
        factor = factor / self._lengths(weight_of(layer))
        bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
        kept = self._kept(x, output)
        dropped = self._dropped(x)
        if self.dropout and self.training:
            # As in peft, the layer itself then multiplies the dropped input as well.
            plain = layer.without_adapter(dropped)
            plain = self._kept(dropped, plain if bias is None else plain - bias)
            return kept - plain + factor * (plain + self._term(dropped))
        plain = kept if bias is None else kept - bias
        adapted = factor * (plain + self._term(dropped))
        return adapted if bias is None else adapted + bias

    @torch.no_grad()
    def _lengths(self, weight: Tensor) -> Tensor:
        """Return the lengths of V's rows ``[out]``, given the layer's own weight, without a copy.

        They are rounded as the magnitudes are, so that both are alike at the start.
        """
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        factors: list[tuple[float, Adapter]] = [(self.scale, self)]
        if self.removed is not None:
            factors.append((-self.removed.scale, self.removed))
        # |W + L R|^2 by rows, with L and R of all low-rank parts side by side.
        left = torch.cat([scale * part._outputs(part.b.float()) for scale, part in factors], dim=1)
        right = torch.cat([part.a.float() for _, part in factors])
        squares += (left * (2 * (weight @ right.to(weight.dtype).t()).float())).sum(dim=1)
        squares += (left * (left @ (right @ right.t()))).sum(dim=1)
        if self.is_row and self.tp_group.size() > 1:
            torch.distributed.all_reduce(squares, group=self.tp_group)
        lengths: Tensor = squares.clamp(min=0).sqrt().clamp(min=_SMALLEST)
        return lengths.to(self.magnitude.dtype)

    @torch.no_grad()
    def start_from(self, layer: Layer) -> None:
        """Let the magnitudes be the lengths of the adapted rows, so that these stay as they are."""
        self.magnitude.copy_(self._lengths(weight_of(layer)))

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight of the adapted layer in float32, given the layer's own weight."""
        adapted = super().merged(weight)
        return adapted * (self.magnitude.float() / self._lengths(weight).float()).unsqueeze(1)
