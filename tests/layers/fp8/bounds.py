"""How far a product of 8-bit matrices may be from the exact one."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.layers.fp8.matrices import Quantized

ROUNDING = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""Half of the distance to the next number, relative."""

SMALLEST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}
"""The smallest number above zero."""


def error_of(x: Tensor, quantized: Quantized) -> Tensor:
    """Return the most that rounding can change each number of a matrix that no scale cuts off."""
    dtype = quantized.values.dtype
    return ROUNDING[dtype] * x.double().abs() + SMALLEST[dtype] / 2 / quantized.scale.double()


def error_of_product(a: Tensor, b: Tensor, qa: Quantized, qb: Quantized) -> Tensor:
    """Return the most that rounding can change each number of ``a b^T``.

    ``|a b - qa qb| <= |da| |b| + |a| |db| + |da| |db|``, and the sums in float32 of k numbers.
    """
    a, b = a.double().abs(), b.double().abs()
    da, db = error_of(a, qa), error_of(b, qb)
    sums = a.size(1) * 2.0**-23 * ((a + da) @ (b + db).t())
    return da @ b.t() + a @ db.t() + da @ db.t() + sums
