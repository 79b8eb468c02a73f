"""The two 8-bit floating-point formats, and matrices in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.fp8_rules import UNIT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

GRADIENT_FORMATS = {"e4m3": E4M3, "hybrid": E5M2}
"""Of ``--fp8-format``; inputs and weights are in e4m3 always."""


@dataclass(frozen=True)
class Quantized:
    """A matrix that is ``values / scale``.

    Attributes:
        values: ``[m, k]`` in an 8-bit format, contiguous.
        scale: float32; ``[]`` for the whole matrix, ``[m, 1]`` for its rows or ``[1, k]`` for its
            columns.
    """

    values: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """``[m, k]`` in float32."""
        return self.values.float() * self.scale.reciprocal()

    def transposed(self) -> Quantized:
        """``[k, m]``, filled up as `turned` does."""
        return Quantized(turned(self.values), self.scale.t())

    def gathered(self, group: ProcessGroup) -> Quantized:
        """The rows of all ranks, which have the same scales or one for each row."""
        values = _gather_along_first_dim(self.values.view(torch.uint8), group)
        scale = self.scale
        if scale.dim() and scale.size(1) == 1:
            scale = _gather_along_first_dim(scale, group)
        return Quantized(values.view(self.values.dtype), scale)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in an 8-bit format, contiguous; what is beyond its range is cut off.

    Args:
        x: any floating-point matrix ``[m, k]``.
        scale: float32 ``[]``, ``[m, 1]`` or ``[1, k]``; NaN gives NaN.
        dtype: the format; rounds to nearest even.
    """
    limit = torch.finfo(dtype).max
    # A scale without dimensions would not raise the product of 16-bit numbers to float32.
    scale = scale if scale.dim() else scale.reshape(1, 1)
    # Also of one row, whose strides `contiguous` would leave as they are.
    return (x * scale).clamp_(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def turned(values: Tensor) -> Tensor:
    """The transpose ``[k, m]`` of 8-bit values ``[m, k]``, contiguous.

    A product sums over m, which on a GPU must divide by 16, so that columns of zeros fill it up.
    """
    missing = -values.size(0) % UNIT
    if missing:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)
    return values.t().contiguous()


def largest(x: Tensor, along: int | None = None) -> Tensor:
    """The largest magnitude, in float32; 0 of nothing, NaN where there is one.

    Args:
        x: a matrix ``[m, k]``.
        along: None for one of all numbers, ``[]``; 1 for one of each row, ``[m, 1]``; 0 for one of
            each column, ``[1, k]``.
    """
    if not x.numel():
        shape = [] if along is None else [1 if d == along else n for d, n in enumerate(x.shape)]
        return torch.zeros(shape, device=x.device)
    norm: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=along, keepdim=along is not None)
    return norm.float()


def scale_for(amax: Tensor, limit: float | Tensor, margin: int = 0) -> Tensor:
    """What brings magnitudes of up to ``amax`` to the largest number of a format over 2^margin.

    Transformer Engine's formula, ``limit / amax / 2^margin``. Nothing but zeros has the scale 1,
    and what holds an infinity or a NaN the scale NaN, so that it gives NaN wherever it goes, as
    without quantization, and the step is skipped.

    Args:
        amax: float32, at least 0, of any shape.
        limit: the largest number of the format.
        margin: powers of two to leave free.
    """
    scale = limit / amax / 2.0**margin
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    return torch.where(amax.isfinite(), scale, torch.full_like(scale, torch.nan))
