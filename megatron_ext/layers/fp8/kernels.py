"""Triton kernels that cast a matrix to 8 bits in one pass; imported only where Triton is installed.

A kernel reads tiles of a matrix and writes them in 8 bits, unchanged (rows), transposed (columns),
or both. It can also record the largest magnitude in a one-element tensor, ``noted``. `cast` reads
the matrix from memory. `activated` and `gradient_before` compute it from the tensors around an
MLP's activation, so that it never exists in 16 bits. The memory traffic for each number of the
result, in bytes read + written with both layouts and 16-bit inputs:

=================  ===========  ==============
function           with a gate  without a gate
=================  ===========  ==============
`cast`             2 + 2        2 + 2
`activated`        4 + 2        2 + 2
`gradient_before`  3 + 2        4 + 2
=================  ===========  ==============

`matrices.quantize`, `matrices.quantize_with` and `pointwise.activated` define the results. `cast`
agrees with them bit for bit. The other kernels differ only because they do not round the activation
to 16 bits.
"""

# ruff: noqa: N803 – Triton's constants are in capitals.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.config.rules.fp8 import UNIT
from megatron_ext.layers.fp8.matrices import Layouts, Pass, Wanted

WARPS = 8
TILE = (128, 64)
NARROW_TILE = (64, 64)
"""Rows and columns of a tile; `_gradient_kernel` needs narrow ones, since it holds three inputs."""


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    matrix, first_m, first_k, m, stride: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile of a matrix ``[m, K]`` in float32, with zeros outside the matrix.

    The tile begins at row ``first_m`` and column ``first_k``; rows are ``stride`` elements apart.
    """
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_K)[None, :]
    start = matrix + first_m.to(tl.int64) * stride + first_k
    inside = (first_m + i < m) & (first_k + j < K)
    return tl.load(start + i * stride + j, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    x, scale, noted, rows, columns, first_m, first_k, m, stride: tl.constexpr, end: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Multiply a float32 tile ``x`` by ``scale``, and write it in 8 bits.

    The results are ``rows``, a matrix ``[m, stride]``, and ``columns``, its transpose with m padded
    to a multiple of 16; each may be None. The tile begins at row ``first_m`` and column ``first_k``
    of the matrix; columns from ``end`` on are not written.
    ``noted``, if not None, becomes the maximum of itself and the magnitudes of ``x``. Results are
    clamped to ``LIMIT``, the largest number of the 8-bit format. Numbers that are not finite become
    NaN. Elements of the tile outside the matrix must be zero.
    """
    i = tl.arange(0, x.shape[0])
    j = tl.arange(0, x.shape[1])
    if noted is not None:
        # The bits of magnitudes sort like the magnitudes, with NaN above infinity.
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(noted, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    y = tl.clamp(x * scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    y = tl.where(tl.abs(x) == float("inf"), float("nan"), y)
    in_k = first_k + j < end
    if rows is not None:
        start = rows + first_m.to(tl.int64) * stride + first_k
        inside = (first_m + i < m)[:, None] & in_k[None, :]
        tl.store(start + i[:, None] * stride + j[None, :], y.to(rows.dtype.element_ty), mask=inside)
    if columns is not None:
        padded = tl.cdiv(m, 16) * 16
        start = columns + first_k.to(tl.int64) * padded + first_m
        turned = tl.trans(y.to(columns.dtype.element_ty))
        inside = in_k[:, None] & (first_m + i < padded)[None, :]
        tl.store(start + j[:, None].to(tl.int64) * padded + i[None, :], turned, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _activation(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the value and derivative at ``x`` of ``NAME``, a key of `ACTIVATIONS`."""
    if NAME == "silu":
        part = tl.sigmoid(x)
        value = x * part
        slope = part * (1 + x * (1 - part))
    elif NAME == "quick_gelu":
        part = tl.sigmoid(1.702 * x)
        value = x * part
        slope = part * (1 + 1.702 * x * (1 - part))
    elif NAME == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z; the numbers are 2 sqrt(2 / pi) and 3 * 0.044715.
        part = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        inner = 1.5957691216057308 * (1 + 0.134145 * x * x)
        value = x * part
        slope = part * (1 + x * (1 - part) * inner)
    elif NAME == "gelu":
        # The numbers are sqrt(1 / 2) and 1 / sqrt(2 pi).
        part = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        value = x * part
        slope = part + 0.3989422804014327 * x * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(NAME == "squared_relu")
        part = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = part * part
        slope = 2 * part
    return value, slope


@triton.jit  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    x, given, scales, noted, rows, columns, m, K: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast the matrix ``x`` ``[m, K]`` to 8 bits with the scale in ``given``.

    If ``scales`` is not None, ``given`` holds the largest magnitude of the matrix instead. The
    kernel then computes the scale from it (`matrices.scale_for`), and writes the scale and its
    inverse to ``scales``. For ``noted``, ``rows``, ``columns`` and ``LIMIT`` see `_write`.
    """
    tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first_m = tl.program_id(0) // tiles * BLOCK_M
    first_k = tl.program_id(0) % tiles * BLOCK_K
    scale = tl.load(given)
    if scales is not None:
        amax = scale
        # torch divides a number by a tensor in these two steps, which round like this.
        scale = tl.div_rn(tl.full([], 1.0, tl.float32), amax) * LIMIT
        scale = tl.minimum(scale, 3.4028234663852886e38)
        scale = tl.where(amax > 0, scale, 1.0)
        scale = tl.where(amax < float("inf"), scale, float("nan"))
        if tl.program_id(0) == 0:
            tl.store(scales, scale)
            tl.store(scales + 1, tl.div_rn(tl.full([], 1.0, tl.float32), scale))
    tile = _read(x, first_m, first_k, m, K, K, BLOCK_M, BLOCK_K)
    _write(tile, scale, noted, rows, columns, first_m, first_k, m, K, K, LIMIT)


@triton.jit  # type: ignore[untyped-decorator]
def _activation_kernel(  # type: ignore[no-untyped-def]
    wide, given, noted, rows, columns, m, K: tl.constexpr, LIMIT: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast the activation of ``wide`` to 8 bits, ``[m, K]``.

    ``wide`` is ``[m, K]``, or if ``GATED`` ``[m, 2 K]`` with the activated half first. The other
    arguments are as in `_cast_kernel`.
    """
    tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    stride: tl.constexpr = 2 * K if GATED else K
    first_m = tl.program_id(0) // tiles * BLOCK_M
    first_k = tl.program_id(0) % tiles * BLOCK_K
    result, _ = _activation(_read(wide, first_m, first_k, m, stride, K, BLOCK_M, BLOCK_K), NAME)
    if GATED:
        result = result * _read(wide + K, first_m, first_k, m, stride, K, BLOCK_M, BLOCK_K)
    _write(result, tl.load(given), noted, rows, columns, first_m, first_k, m, K, K, LIMIT)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    gradient, wide, given, noted, rows, columns, m, K: tl.constexpr, LIMIT: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast the gradient of ``wide`` to 8 bits, given the activation's ``gradient`` ``[m, K]``.

    For ``wide`` see `_activation_kernel`, and for the other arguments `_cast_kernel`. The result
    has the shape of ``wide``.
    """
    tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    stride: tl.constexpr = 2 * K if GATED else K
    first_m = tl.program_id(0) // tiles * BLOCK_M
    first_k = tl.program_id(0) % tiles * BLOCK_K
    scale = tl.load(given)
    outer = _read(gradient, first_m, first_k, m, K, K, BLOCK_M, BLOCK_K)
    value, slope = _activation(_read(wide, first_m, first_k, m, stride, K, BLOCK_M, BLOCK_K), NAME)
    if GATED:
        linear = _read(wide + K, first_m, first_k, m, stride, K, BLOCK_M, BLOCK_K)
        linear_gradient = outer * value
        second = K + first_k
        _write(
            linear_gradient, scale, noted, rows, columns, first_m, second, m, stride, stride, LIMIT
        )
        outer = outer * linear
    _write(outer * slope, scale, noted, rows, columns, first_m, first_k, m, stride, K, LIMIT)


_KERNELS = {
    "cast": (_cast_kernel, TILE),
    "activated": (_activation_kernel, TILE),
    "gradient_before": (_gradient_kernel, NARROW_TILE),
}


def _launch(
    name: str,
    inputs: list[Tensor],
    given: Tensor,
    scales: Tensor | None,
    noted: Tensor | None,
    rows: Tensor | None,
    columns: Tensor | None,
    activation: str,
    gated: bool,
) -> None:
    """Launch a kernel on matrices with at least one row.

    ``name`` is "cast", "activated" or "gradient_before"; ``given`` is the scale or, with
    ``scales``, the largest magnitude. The kernel writes its results to ``scales``, ``noted``,
    ``rows`` and ``columns``, where not None.
    """
    kernel, (block_m, block_k) = _KERNELS[name]
    m, k = inputs[0].shape
    more: dict[str, Any] = {"scales": scales}
    if name != "cast":
        more = {"NAME": activation, "GATED": gated}
        k = inputs[-1].size(1) // (2 if gated else 1)
    result = columns if rows is None else rows
    assert result is not None
    kernel[(triton.cdiv(m, block_m) * triton.cdiv(k, block_k),)](
        *inputs,
        given=given,
        noted=None if noted is None else noted.view(torch.int32),
        rows=rows,
        columns=columns,
        m=m,
        K=k,
        LIMIT=torch.finfo(result.dtype).max,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=WARPS,
        **more,
    )


# A torch operator can also be called with tensors that have no memory, for tracing.
torch.library.define(
    "megatron_ext::to_8_bits",
    "(str name, Tensor[] inputs, Tensor given, Tensor(a!)? scales, Tensor(b!)? noted, "
    "Tensor(c!)? rows, Tensor(d!)? columns, str activation, bool gated) -> ()",
)
torch.library.impl("megatron_ext::to_8_bits", ("CUDA", "CPU"), _launch)
torch.library.register_fake("megatron_ext::to_8_bits", lambda *args: None)


def _run(
    name: str,
    inputs: list[Tensor],
    k: int,
    dtype: torch.dtype,
    layout: Wanted,
    given: Tensor,
    noted: Tensor | None,
    scales: Tensor | None = None,
    activation: str = "",
    gated: bool = False,
) -> Layouts:
    x = inputs[0]
    m = x.size(0)
    rows = None if layout == "columns" else x.new_empty((m, k), dtype=dtype)
    columns = None if layout == "rows" else x.new_empty((k, m + -m % UNIT), dtype=dtype)
    inputs = [matrix.contiguous() for matrix in inputs]
    results = scales, noted, rows, columns
    torch.ops.megatron_ext.to_8_bits(name, inputs, given, *results, activation, gated)
    return rows, columns


def cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, layout: Wanted, noted: Tensor | None = None
) -> Layouts:
    """Cast a matrix to 8 bits with a given scale in one kernel, like `matrices.quantize_with`."""
    return _run("cast", [x], x.size(1), dtype, layout, scale, noted)


def cast_by_magnitude(x: Tensor, amax: Tensor, dtype: torch.dtype, layout: Wanted) -> Pass:
    """Cast a matrix in one kernel like `matrices.quantize`; ``amax`` ``[]`` sets the scale."""
    scales = x.new_empty(2, dtype=torch.float32)
    rows, columns = _run("cast", [x], x.size(1), dtype, layout, amax, None, scales)
    scale, inverse = scales.unbind()
    return Pass(scale, inverse, rows, columns)


def activated(
    wide: Tensor,
    activation: str,
    gated: bool,
    scale: Tensor,
    dtype: torch.dtype,
    layout: Wanted,
    noted: Tensor | None = None,
) -> Layouts:
    """Compute an MLP's activation of ``wide`` and cast it to 8 bits, ``[m, f]``.

    ``wide`` is ``[m, f]``, or ``[m, 2 f]`` if ``gated``; see `pointwise.activated`. For the last
    four arguments see `matrices.quantize_with`.
    """
    f = wide.size(1) // 2 if gated else wide.size(1)
    more = activation, gated
    return _run("activated", [wide], f, dtype, layout, scale, noted, None, *more)


def gradient_before(
    gradient: Tensor,
    wide: Tensor,
    activation: str,
    gated: bool,
    scale: Tensor,
    dtype: torch.dtype,
    layout: Wanted,
    noted: Tensor | None = None,
) -> Layouts:
    """Compute the gradient of an activation's input ``wide`` and cast it to 8 bits.

    ``gradient`` is the gradient of the activation, ``[m, f]``; ``wide`` and the result are ``[m,
    f]``, or ``[m, 2 f]`` if ``gated``. For the last four arguments see `matrices.quantize_with`.
    """
    inputs = [gradient, wide]
    more = (activation, gated)
    return _run("gradient_before", inputs, wide.size(1), dtype, layout, scale, noted, None, *more)


Types = dict[str, str | None]
Signature = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]


def signatures() -> list[Signature]:
    """Return what is needed to compile each form of each kernel without a GPU, as in tests.

    A signature has a kernel, the types of its arguments, its constants, and its options. Each is to
    be compiled twice, as Triton does when it is called: for addresses that are multiples of 16
    bytes, and for others, since scales and magnitudes are single numbers inside longer tensors.
    """
    written: Types = {"given": "*fp32", "m": "i32"}
    entries: list[Signature] = []
    for eight, limit in (("*fp8e4nv", 448.0), ("*fp8e5", 57344.0)):
        for x in ("*bf16", "*fp32"):
            both: Types = {"rows": eight, "columns": eight}
            for layout in (both, {**both, "rows": None}, {**both, "columns": None}):
                types: Types = {"x": x, **written, **layout}
                entries.append(_entry("cast", {**types, "scales": None, "noted": "*i32"}, limit))
                entries.append(_entry("cast", {**types, "scales": "*fp32", "noted": None}, limit))
    for name in ("silu", "gelu", "gelu_tanh", "squared_relu", "quick_gelu"):
        for gated in (True, False):
            more = {"NAME": name, "GATED": gated}
            forward: Types = {"wide": "*bf16", **written, "noted": "*i32"}
            forward |= dict.fromkeys(("rows", "columns"), "*fp8e4nv")
            entries.append(_entry("activated", forward, 448.0, **more))
            backward: Types = {"gradient": "*bf16", **forward}
            backward |= dict.fromkeys(("rows", "columns"), "*fp8e5")
            entries.append(_entry("gradient_before", backward, 57344.0, **more))
    return entries


def _entry(name: str, types: Types, limit: float, **more: Any) -> Signature:
    """Return the signature of the kernel ``name``; 14336 stands for any number of columns.

    ``types`` maps the kernel's arguments to their types; a type of None passes None for the
    argument. ``limit`` is the 8-bit format's largest number; ``more`` are further constants.
    """
    kernel, (block_m, block_k) = _KERNELS[name]
    constants = {"K": 14336, "LIMIT": limit, "BLOCK_M": block_m, "BLOCK_K": block_k, **more}
    constants |= {arg: None for arg, kind in types.items() if kind is None}
    given = {arg: kind for arg, kind in types.items() if kind is not None}
    return kernel, given, constants, {"num_warps": WARPS}
