"""8-bit floating-point matrices: their formats, quantization, and matrix product.

The product ``a b^T`` needs both matrices contiguous along the summed dimension. Therefore each of
the three matrices of a layer is used in two forms, plain (R, rows) and transposed (C, columns):

=================  ==========================  ===========  ============
product            sums over                   a            b
=================  ==========================  ===========  ============
forward            features of the input       input R      weight R
input's gradient   features of the output      gradient R   weight C
weight's gradient  tokens                      gradient C   input C
=================  ==========================  ===========  ============

For casts on a GPU, `fp8.casting` has kernels with the same results as these functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.rules.fp8 import UNIT

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

GRADIENT_FORMATS = {"e4m3": E4M3, "hybrid": E5M2}
"""Format of gradients by ``--fp8-format``; inputs and weights are always in e4m3."""


@dataclass(frozen=True)
class Quantized:
    """A contiguous 8-bit matrix ``[m, k]`` that represents ``values / scale``.

    The float32 scale is ``[]`` for the whole matrix, ``[m, 1]`` for rows, or ``[1, k]`` for
    columns. ``inverse`` is its reciprocal, None if not yet known.
    """

    values: Tensor
    scale: Tensor
    inverse: Tensor | None = None

    @property
    def factor(self) -> Tensor:
        """Return ``1 / scale``, by which a product of ``values`` must be multiplied."""
        return self.scale.reciprocal() if self.inverse is None else self.inverse

    def dequantized(self) -> Tensor:
        """Return ``values / scale``, ``[m, k]``, in float32."""
        return self.values.float() * self.factor

    def transposed(self) -> Quantized:
        """Return the transpose ``[k, m]``; columns of zeros pad m to a multiple of 16."""
        inverse = None if self.inverse is None else self.inverse.t()
        return Quantized(turned(self.values), self.scale.t(), inverse)

    def gathered(self, group: ProcessGroup) -> Quantized:
        """Gather the rows of a group's ranks; scales must be per row, or equal on all ranks."""
        values = _gather_along_first_dim(self.values.view(torch.uint8), group)
        scale = self.scale
        inverse = self.inverse
        if scale.dim() and scale.size(1) == 1:
            scale = _gather_along_first_dim(scale, group)
            inverse = None
        return Quantized(values.view(self.values.dtype), scale, inverse)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * scale`` in an 8-bit format, contiguous and clamped to the format's range.

    For ``x`` of shape ``[m, k]`` the float32 scale is ``[]``, ``[m, 1]`` or ``[1, k]``. NaN stays
    NaN.
    """
    limit = torch.finfo(dtype).max
    # A scale without dimensions would leave the product of 16-bit numbers in 16 bits.
    scale = scale if scale.dim() else scale.reshape(1, 1)
    # `contiguous` would not change the strides of a single row.
    return (x * scale).clamp_(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def turned(values: Tensor) -> Tensor:
    """Return the transpose ``[k, m]`` of 8-bit values ``[m, k]``, contiguous.

    Columns of zeros pad m to a multiple of 16, which matrix products on a GPU require.
    """
    missing = -values.size(0) % UNIT
    if missing:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)
    return values.t().contiguous()


def largest(x: Tensor, along: int | None = None) -> Tensor:
    """Return the largest magnitudes of ``[m, k]`` in float32; 0 if empty, NaN if a value is NaN.

    ``along`` None reduces the whole matrix to ``[]``, 1 each row to ``[m, 1]``, and 0 each column
    to ``[1, k]``.
    """
    if not x.numel():
        shape = [] if along is None else [1 if d == along else n for d, n in enumerate(x.shape)]
        return torch.zeros(shape, device=x.device)
    norm: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=along, keepdim=along is not None)
    return norm.float()


def scale_for(amax: Tensor, limit: float | Tensor, margin: int = 0) -> Tensor:
    """Return the scale ``limit / amax / 2^margin`` (Transformer Engine's formula).

    It maps the largest magnitude ``amax`` to ``limit / 2^margin``, where ``limit`` is the format's
    largest number. The scale is 1 if ``amax`` is 0. If ``amax`` is not finite, the scale is NaN;
    this makes the loss or gradients NaN, so that the step is skipped.
    """
    scale = limit / amax / 2.0**margin
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    return torch.where(amax.isfinite(), scale, torch.full_like(scale, torch.nan))


def known_scale(
    amax: Tensor, history: Tensor, given: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    """Return the scale of a tensor for delayed scaling, and the scale's reciprocal, both ``[]``.

    If the history ``[steps]`` has a nonzero entry, this is ``given``, a scale computed earlier from
    the history. Otherwise it is computed from ``amax``, the tensor's largest magnitude now. If
    ``amax`` is not finite, the scale is NaN in either case. ``limit`` is the format's largest
    number.
    """
    uses_given = history.any() & amax.isfinite()
    scale = torch.where(uses_given, given, scale_for(amax, limit))
    return scale, scale.reciprocal()


Wanted = Literal["rows", "columns", "both"]


Layouts = tuple[Tensor | None, Tensor | None]
"""An 8-bit matrix and its transpose, as `turned` returns it; either is None if not requested."""


class Pass(NamedTuple):
    """A matrix ``[m, k]`` in 8 bits, together with the scale that was computed for it.

    ``rows`` is the matrix and ``columns`` its transpose, None if not requested. ``inverse`` is the
    reciprocal of the scale.
    """

    scale: Tensor
    inverse: Tensor
    rows: Tensor | None
    columns: Tensor | None


def quantize(
    x: Tensor, amax: Tensor | None, dtype: torch.dtype, along: int | None, layout: Wanted
) -> Pass:
    """Cast ``[m, k]`` to 8 bits with scales computed from its largest magnitudes ``amax``.

    If ``amax`` is None, the magnitudes are computed here: of the whole matrix if ``along`` is None,
    of each row if it is 1, of each column if it is 0. Otherwise ``along`` is unused; the shape of
    ``amax`` (``[]``, ``[m, 1]`` or ``[1, k]``) is that of the scales. ``layout`` selects the
    results: "rows" is the matrix itself, "columns" its transpose, "both" is both.
    """
    amax = largest(x, along) if amax is None else amax
    scale = scale_for(amax, torch.finfo(dtype).max)
    return Pass(scale, scale.reciprocal(), *_layouts(x, scale, dtype, layout))


def quantize_with(
    x: Tensor, scale: Tensor, dtype: torch.dtype, layout: Wanted, noted: Tensor | None = None
) -> Layouts:
    """Cast ``[m, k]`` to 8 bits with a given scale ``[]``; infinities become NaN.

    ``layout`` selects the results: "rows" is the matrix itself, "columns" its transpose, "both" is
    both. If ``noted`` (float32 ``[]``) is given, it is replaced by the maximum of itself and the
    largest magnitude of ``x``, which is NaN if ``x`` contains NaN.
    """
    if noted is not None:
        noted.copy_(torch.maximum(noted, largest(x)))
    # A plain cast would clamp infinity to the largest number of the format.
    return _layouts(torch.where(x.isinf(), torch.nan, x), scale, dtype, layout)


def _layouts(x: Tensor, scale: Tensor, dtype: torch.dtype, layout: Wanted) -> Layouts:
    rows = cast(x, scale, dtype) if layout != "columns" else None
    if layout == "rows":
        return rows, None
    missing = -x.size(0) % UNIT
    if rows is not None and not missing:
        return rows, turned(rows)
    # Padding before the cast becomes part of the same kernel.
    return rows, turned(cast(F.pad(x, (0, 0, 0, missing)) if missing else x, scale, dtype))


def product(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    *,
    fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the matrix product ``a b^T``, ``[m, n]``, of ``[m, k]`` and ``[n, k]``.

    ``a`` may be in e5m2; ``b`` is in e4m3. A CPU computes in float32, where products of 8-bit
    numbers are exact; only the order of the sums differs from ``torch._scaled_mm`` on a GPU. With
    ``fast``, tensor cores sum with fewer bits, as Transformer Engine does in forward passes. With
    ``out``, a matrix of this dtype, the product overwrites and returns it.

    Raises:
        ValueError: `check_layout` refuses the matrices or scales.
    """
    if not (a.values.numel() and b.values.numel()):
        shape = a.values.size(0), b.values.size(0)
        zeros = torch.zeros(shape, dtype=dtype, device=a.values.device)
        return zeros if out is None else out.copy_(zeros)
    given = arguments(a, b, dtype)
    check_layout(**given)
    if a.values.is_cuda:
        factors = given.pop("a"), given.pop("b")
        if out is not None and given["out_dtype"] == out.dtype and _is_aligned(out):
            return torch._scaled_mm(*factors, **given, use_fast_accum=fast, out=out)
        result = torch._scaled_mm(*factors, **given, use_fast_accum=fast)
    else:
        sums = a.values.float() @ b.values.float().t()
        result = sums * a.factor * b.factor.t()
    return result.to(dtype) if out is None else out.copy_(result)


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether cuBLASLt can write to this matrix with every algorithm that it may choose.

    torch does not pass a matrix's alignment to cuBLASLt, which then assumes 256 bytes. torch's
    allocations and megatron-core's padded buffers have this alignment.
    """
    offset = matrix.storage_offset() * matrix.element_size()
    return matrix.is_contiguous() and offset % 256 == 0


def arguments(a: Quantized, b: Quantized, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of ``torch._scaled_mm`` for ``a b^T``, by name.

    ``out_dtype`` is ``dtype``, but bfloat16 if ``a`` has a scale for each row.
    """
    return {
        "a": a.values,
        "b": b.values.t(),
        "scale_a": a.factor,
        "scale_b": b.factor.t(),
        # Older torch, and some of its kernels, return only bfloat16 with scales per row.
        "out_dtype": torch.bfloat16 if a.scale.dim() else dtype,
    }


def check_layout(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> None:
    """Check that ``torch._scaled_mm`` can multiply two matrices on every supported GPU.

    ``a`` is ``[m, k]``, row-major; ``b`` is ``[k, n]``, column-major. The rules are the strictest
    of ATen's ``ScaledBlas.cpp`` and ``RowwiseScaledMM.cu`` in torch 2.6 to 2.13.

    Raises:
        ValueError: a rule is broken; the message names it.
    """
    m = a.size(0)
    k = a.size(1)
    n = b.size(1)
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
