"""The product of two 8-bit matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.fp8_rules import UNIT
from megatron_ext.models.fp8.formats import E4M3, E5M2, Quantized


def product(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """``a b^T``, summed in float32.

    On a GPU by ``torch._scaled_mm``. On a CPU the same arithmetic step by step: products of 8-bit
    numbers are exact in float32, so only the order of the sums differs. The layout of the arguments
    is checked on both.

    Args:
        a: ``[m, k]``; may be in e5m2.
        b: ``[n, k]`` in e4m3.
        dtype: of the result. With scales for rows a GPU rounds to bfloat16 before.
        fast: sum in the tensor cores' fewer bits, as Transformer Engine does in forward passes;
            without effect on a CPU.

    Returns:
        ``[m, n]``.

    Raises:
        ValueError: matrices or scales that `check_layout` refuses.
    """
    if not (a.values.numel() and b.values.numel()):
        return torch.zeros(a.values.size(0), b.values.size(0), dtype=dtype, device=a.values.device)
    given = arguments(a, b, dtype)
    check_layout(**given)
    if a.values.is_cuda:
        result: Tensor = torch._scaled_mm(
            given.pop("a"), given.pop("b"), **given, use_fast_accum=fast
        )
        return result.to(dtype)
    sums = a.values.float() @ b.values.float().t()
    return (sums * a.scale.reciprocal() * b.scale.reciprocal().t()).to(dtype)


def arguments(a: Quantized, b: Quantized, dtype: torch.dtype) -> dict[str, Any]:
    """What ``torch._scaled_mm`` is given for ``a b^T``."""
    return {
        "a": a.values,
        "b": b.values.t(),
        "scale_a": a.scale.reciprocal(),
        "scale_b": b.scale.reciprocal().t(),
        # Only lately, and not in all of its kernels, does torch give anything else for rows.
        "out_dtype": torch.bfloat16 if a.scale.dim() else dtype,
    }


def check_layout(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> None:
    """Refuse what ``torch._scaled_mm`` could not multiply on some GPU.

    The rules are those of ATen's ``ScaledBlas.cpp`` and ``RowwiseScaledMM.cu`` in torch 2.6 to
    2.13, the strictest of them.

    Args:
        a: ``[m, k]``, row by row.
        b: ``[k, n]``, column by column.
        scale_a: what brings a back, float32; ``[]``, or ``[m, 1]`` for its rows.
        scale_b: ``[]`` or ``[1, n]``.
        out_dtype: of the result.

    Raises:
        ValueError: with the rule.
    """
    m, k, n = a.size(0), a.size(1), b.size(1)
    by_rows = bool(scale_a.dim() or scale_b.dim())
    shapes = ((m, 1), (1, n)) if by_rows else ((), ())
    rules = (
        (a.dtype in (E4M3, E5M2) and b.dtype == E4M3, "the second is in e4m3 and both in 8 bits"),
        (b.size(0) == k, "both have the side that is summed over"),
        (a.stride() == (k, 1), "the first lies row by row"),
        (b.stride() == (1, k), "the second lies column by column"),
        (k % UNIT == 0, f"the side that is summed over divides by {UNIT}"),
        (n % UNIT == 0, f"the last side divides by {UNIT}"),
        ((scale_a.shape, scale_b.shape) == shapes, "both have one scale, or one for each row"),
        (scale_a.dtype == scale_b.dtype == torch.float32, "scales are in float32"),
        (scale_a.is_contiguous() and scale_b.is_contiguous(), "scales are contiguous"),
        (
            out_dtype == torch.bfloat16 or (not by_rows and out_dtype == torch.float32),
            "the result is in bfloat16, or in float32 where both have one scale",
        ),
    )
    for holds, rule in rules:
        if not holds:
            raise ValueError(
                f"A GPU cannot multiply {_shown(a)} and {_shown(b)} with scales "
                f"{list(scale_a.shape)} and {list(scale_b.shape)} to {out_dtype}, since it wants "
                f"that {rule}."
            )


def _shown(matrix: Tensor) -> str:
    return f"{list(matrix.shape)} {matrix.dtype} with strides {list(matrix.stride())}"
