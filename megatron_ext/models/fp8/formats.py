"""The two 8-bit floating-point formats, and matrices in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim
from torch import Tensor
from torch.distributed import ProcessGroup

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

GRADIENT_FORMATS = {"e4m3": E4M3, "hybrid": E5M2}
"""Of ``--fp8-format``; inputs and weights are in e4m3 always."""


@dataclass(frozen=True)
class Quantized:
    """A matrix that is ``values / scale``.

    Attributes:
        values: ``[m, k]`` in an 8-bit format, contiguous.
        scale: float32; ``[]`` for the whole matrix or ``[m, 1]`` for its rows.
    """

    values: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """``[m, k]`` in float32."""
        return self.values.float() * self.scale.reciprocal()

    def transposed(self) -> Quantized:
        """``[k, m]``; of a matrix with one scale."""
        assert self.scale.dim() == 0
        # Not every device can copy 8-bit floats with strides; it can copy bytes.
        values = self.values.view(torch.uint8).t().contiguous().view(self.values.dtype)
        return Quantized(values, self.scale)

    def gathered(self, group: ProcessGroup) -> Quantized:
        """The rows of all ranks, which have the same scale or one for each row."""
        values = _gather_along_first_dim(self.values.view(torch.uint8), group)
        scale = self.scale
        if scale.dim():
            scale = _gather_along_first_dim(scale, group)
        return Quantized(values.view(self.values.dtype), scale)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in an 8-bit format, contiguous; what is beyond its range is cut off.

    Args:
        x: any floating-point matrix ``[m, k]``.
        scale: float32 ``[]`` or ``[m, 1]``; NaN gives NaN.
        dtype: the format; rounds to nearest even.
    """
    limit = torch.finfo(dtype).max
    # A scale without dimensions would not raise the product of 16-bit numbers to float32.
    return (x * scale.reshape(-1, 1)).clamp_(-limit, limit).to(dtype).contiguous()


def largest(x: Tensor, *, of_rows: bool = False) -> Tensor:
    """The largest magnitude in a matrix ``[]``, or in each of its rows ``[m, 1]``, in float32.

    A NaN gives NaN.
    """
    dim = -1 if of_rows else None
    norm: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=dim, keepdim=of_rows)
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
