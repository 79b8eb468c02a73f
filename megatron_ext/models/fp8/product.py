"""The product of two 8-bit matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.fp8_rules import UNIT
from megatron_ext.models.fp8.formats import Quantized


def product(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """``a b^T``, summed in float32.

    On a GPU by ``torch._scaled_mm``. On a CPU the same arithmetic step by step: products of 8-bit
    numbers are exact in float32, so only the order of the sums differs.

    Args:
        a: ``[m, k]``; may be in e5m2.
        b: ``[n, k]`` in e4m3; n divides by 16 on a GPU.
        dtype: of the result; bfloat16 on a GPU with scales for rows.
        fast: sum in the tensor cores' fewer bits, as Transformer Engine does in forward passes;
            without effect on a CPU.

    Returns:
        ``[m, n]``.
    """
    if a.values.is_cuda:
        return _on_gpu(a, b, dtype, fast=fast)
    sums = a.values.float() @ b.values.float().t()
    return (sums * a.scale.reciprocal() * b.scale.reciprocal().t()).to(dtype)


def _on_gpu(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool) -> Tensor:
    result: Tensor = torch._scaled_mm(
        _filled_up(a.values),
        _filled_up(b.values).t(),
        scale_a=a.scale.reciprocal(),
        scale_b=b.scale.reciprocal().t(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return result


def _filled_up(values: Tensor) -> Tensor:
    """With columns of zeros up to what the hardware can sum over."""
    missing = -values.size(1) % UNIT
    if not missing:
        return values
    return F.pad(values.view(torch.uint8), (0, missing)).view(values.dtype)
