"""8-bit floating-point matrices: their formats, quantization in few passes, and their product.

A product ``a b^T`` wants both matrices contiguous along what it sums over. So each of the three
matrices of a layer is wanted twice, as it is (R, rows) and transposed (C, columns):

=================  ==========================  ===========  ============
product            sums over                   a            b
=================  ==========================  ===========  ============
forward            features of the input       input R      weight R
input's gradient   features of the output      gradient R   weight C
weight's gradient  tokens                      gradient C   input C
=================  ==========================  ===========  ============

On a GPU these functions are compiled, each to as many kernels as there are passes, and R and C are
written by one of them. The delayed recipe knows its scale beforehand, so the largest magnitude is a
by-product (2 bytes read and 2 written for each number of two bytes); one scale for the tensor takes
a pass before the cast (4 + 2); scales of rows are found while a row lies in the cache, those of
columns take a pass (6 + 2). Under sequence parallelism the input's C is made of the 8-bit rows that
were sent. With experts the delayed recipe costs what tensorwise costs, since an expert without
tokens has no scale yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.rules.precision import UNIT
from megatron_ext.layers.compiled import compiled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

GRADIENT_FORMATS = {"e4m3": E4M3, "hybrid": E5M2}
"""Format of gradients by ``--fp8-format``; inputs and weights are in e4m3 always."""


@dataclass(frozen=True)
class Quantized:
    """A contiguous matrix ``values / scale``, ``[m, k]`` in an 8-bit format.

    The float32 scale is ``[]``, ``[m, 1]`` for its rows or ``[1, k]`` for its columns.
    """

    values: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """Return ``[m, k]`` in float32."""
        return self.values.float() * self.scale.reciprocal()

    def transposed(self) -> Quantized:
        """Return ``[k, m]``, filled up as `turned` does."""
        return Quantized(turned(self.values), self.scale.t())

    def gathered(self, group: ProcessGroup) -> Quantized:
        """Gather the rows of all ranks, which have the same scales or one for each row."""
        values = _gather_along_first_dim(self.values.view(torch.uint8), group)
        scale = self.scale
        if scale.dim() and scale.size(1) == 1:
            scale = _gather_along_first_dim(scale, group)
        return Quantized(values.view(self.values.dtype), scale)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * scale`` in an 8-bit format, contiguous; what is beyond its range is cut off.

    The scale of ``[m, k]`` is float32 ``[]``, ``[m, 1]`` or ``[1, k]``; NaN gives NaN.
    """
    limit = torch.finfo(dtype).max
    # A scale without dimensions would not raise the product of 16-bit numbers to float32.
    scale = scale if scale.dim() else scale.reshape(1, 1)
    # `contiguous` would leave the strides of a single row as they are.
    return (x * scale).clamp_(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def turned(values: Tensor) -> Tensor:
    """Return the transpose ``[k, m]`` of 8-bit values ``[m, k]``, contiguous.

    Columns of zeros fill it up, since a product on a GPU sums over a multiple of 16.
    """
    missing = -values.size(0) % UNIT
    if missing:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)
    return values.t().contiguous()


def largest(x: Tensor, along: int | None = None) -> Tensor:
    """Return the largest magnitude of ``[m, k]`` in float32; 0 of nothing, NaN where there is one.

    ``along`` None gives one of all numbers, ``[]``; 1 one of each row, ``[m, 1]``; 0 one of each
    column, ``[1, k]``.
    """
    if not x.numel():
        shape = [] if along is None else [1 if d == along else n for d, n in enumerate(x.shape)]
        return torch.zeros(shape, device=x.device)
    norm: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=along, keepdim=along is not None)
    return norm.float()


def scale_for(amax: Tensor, limit: float | Tensor, margin: int = 0) -> Tensor:
    """Return what brings magnitudes of up to ``amax`` to a format's largest number over 2^margin.

    This is Transformer Engine's formula, ``limit / amax / 2^margin``. Nothing but zeros has the
    scale 1. An infinity or a NaN has the scale NaN, so that the step is skipped.
    """
    scale = limit / amax / 2.0**margin
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    return torch.where(amax.isfinite(), scale, torch.full_like(scale, torch.nan))


Wanted = Literal["rows", "columns", "both"]


class Pass(NamedTuple):
    """Results of a pass over a matrix ``[m, k]``; what is not wanted is None.

    The number, a scale or a largest magnitude, is float32 ``[]``, ``[m, 1]`` or ``[1, k]``. Rows
    are ``[m, k]`` in 8 bits, columns the transpose ``[k, m]`` as `turned` fills it up.
    """

    number: Tensor
    rows: Tensor | None
    columns: Tensor | None


def quantize(
    x: Tensor, amax: Tensor | None, dtype: torch.dtype, along: int | None, wanted: Wanted
) -> Pass:
    """Cast ``[m, k]`` by its largest magnitudes, found here if None; the number is the scale."""
    amax = largest(x, along) if amax is None else amax
    scale = scale_for(amax, torch.finfo(dtype).max)
    return Pass(scale, *_layouts(x, scale, dtype, wanted))


def quantize_with(x: Tensor, scale: Tensor, dtype: torch.dtype, wanted: Wanted) -> Pass:
    """Cast with a scale ``[]``; the number of the pass is the largest magnitude, a by-product."""
    return Pass(largest(x), *_layouts(x, scale, dtype, wanted))


def _layouts(
    x: Tensor, scale: Tensor, dtype: torch.dtype, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    rows = cast(x, scale, dtype) if wanted != "columns" else None
    if wanted == "rows":
        return rows, None
    missing = -x.size(0) % UNIT
    if rows is not None and not missing:
        return rows, turned(rows)
    # Filling up before the cast makes it a part of the same kernel.
    return rows, turned(cast(F.pad(x, (0, 0, 0, missing)) if missing else x, scale, dtype))


class Function:
    """A pure function of a matrix, its first argument, which is compiled where it lies on a GPU.

    A kernel that knows its lengths writes a transpose faster, so each shape is compiled by itself,
    or the number of rows is left open where it differs from step to step.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._fixed, self._open = compiled(function, by_shape=True), compiled(function)

    def __call__(self, x: Tensor, *more: Any, varies: bool = False) -> Any:
        """Call the function; ``varies`` leaves the number of rows open."""
        return (self._open if varies else self._fixed)(x, *more)


LARGEST = Function(largest)
QUANTIZE = Function(quantize)
QUANTIZE_WITH = Function(quantize_with)


def product(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return ``a b^T`` of ``[m, k]`` and ``[n, k]``, summed in float32, ``[m, n]``.

    A CPU multiplies step by step as ``torch._scaled_mm`` does on a GPU: products of 8-bit numbers
    are exact in float32, so only the order of the sums differs. ``a`` may be in e5m2, ``b`` is in
    e4m3. ``fast`` sums in the tensor cores' fewer bits, as Transformer Engine does forward.

    Raises:
        ValueError: matrices or scales that `check_layout` refuses.
    """
    if not (a.values.numel() and b.values.numel()):
        return torch.zeros(a.values.size(0), b.values.size(0), dtype=dtype, device=a.values.device)
    given = arguments(a, b, dtype)
    check_layout(**given)
    if a.values.is_cuda:
        factors = given.pop("a"), given.pop("b")
        return torch._scaled_mm(*factors, **given, use_fast_accum=fast).to(dtype)
    sums = a.values.float() @ b.values.float().t()
    return (sums * a.scale.reciprocal() * b.scale.reciprocal().t()).to(dtype)


def arguments(a: Quantized, b: Quantized, dtype: torch.dtype) -> dict[str, Any]:
    """Return what ``torch._scaled_mm`` is given for ``a b^T``."""
    return {
        "a": a.values,
        "b": b.values.t(),
        "scale_a": a.scale.reciprocal(),
        "scale_b": b.scale.reciprocal().t(),
        # Older torch, and some of its kernels, give nothing else for rows.
        "out_dtype": torch.bfloat16 if a.scale.dim() else dtype,
    }


def check_layout(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> None:
    """Refuse what ``torch._scaled_mm`` could not multiply on some GPU.

    The rules are the strictest of ATen's ``ScaledBlas.cpp`` and ``RowwiseScaledMM.cu`` in torch 2.6
    to 2.13, for ``[m, k]`` row by row and ``[k, n]`` column by column.

    Raises:
        ValueError: the rule that is broken.
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
