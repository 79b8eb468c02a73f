"""Quantization by as few passes over memory as there can be.

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
written by one of them. Bytes read + written for one number, the unquantized one having two:

==================================  =======  ==========  =======
what                                delayed  tensorwise  rowwise
==================================  =======  ==========  =======
input, at each forward pass: R, C   2 + 2    4 + 2       6 + 2
gradient, at each backward: R, C    2 + 2    4 + 2       6 + 2
weight, once a step: R, C           2 + 2    4 + 2       6 + 2
=================================  =======  ==========  =======

The delayed recipe knows its scale beforehand, so that the largest magnitude is a by-product; one
scale for the tensor takes a pass before the cast; scales of rows are found while a row lies in the
cache, those of columns take a pass. Step by step, as on a CPU, the same is 6 to 10 passes. Under
sequence parallelism the input's C is made of the 8-bit rows that were sent (1 + 1 in the backward
pass instead of 1 in the forward pass). With experts the delayed recipe is as tensorwise, since one
that had no tokens yet has no scale either. A reference: torchao's float8 training, whose kernels
are compiled alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.fp8_rules import UNIT
from megatron_ext.models.compiled import compiled
from megatron_ext.models.fp8.formats import cast, largest, scale_for, turned

Wanted = Literal["rows", "columns", "both"]


class Pass(NamedTuple):
    """What a pass over a matrix ``[m, k]`` gives.

    Attributes:
        number: scale or largest magnitude; float32 ``[]``, ``[m, 1]`` or ``[1, k]``.
        rows: ``[m, k]`` in 8 bits; None unless wanted.
        columns: the transpose ``[k, m]``, with columns of zeros up to a multiple of 16; None unless
            wanted.
    """

    number: Tensor
    rows: Tensor | None
    columns: Tensor | None


def quantize(
    x: Tensor, amax: Tensor | None, dtype: torch.dtype, along: int | None, wanted: Wanted
) -> Pass:
    """Scale by the matrix's largest magnitudes, and cast; the number is the scale.

    Args:
        x: ``[m, k]``.
        amax: as `largest` gives; None to find it here.
        dtype: an 8-bit format.
        along: see `largest`.
        wanted: layouts.
    """
    amax = largest(x, along) if amax is None else amax
    scale = scale_for(amax, torch.finfo(dtype).max)
    return Pass(scale, *_layouts(x, scale, dtype, wanted))


def quantize_with(x: Tensor, scale: Tensor, dtype: torch.dtype, wanted: Wanted) -> Pass:
    """Cast with a scale ``[]``; the number is the largest magnitude, a by-product."""
    return Pass(largest(x), *_layouts(x, scale, dtype, wanted))


def _layouts(
    x: Tensor, scale: Tensor, dtype: torch.dtype, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    rows = cast(x, scale, dtype) if wanted != "columns" else None
    if wanted == "rows":
        return rows, None
    missing = -x.size(0) % UNIT
    if rows is None or missing:
        # Before the cast, so that filling up is a part of the same kernel.
        filled = F.pad(x, (0, 0, 0, missing)) if missing else x
        return rows, turned(cast(filled, scale, dtype))
    return rows, turned(rows)


class Function:
    """A pure function of a matrix, which is compiled where the matrix lies on a GPU.

    Once for each shape, since a kernel that knows its lengths writes a transpose faster; with the
    number of rows left open where it differs from step to step.

    Args:
        function: its first argument is the matrix.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._fixed, self._open = compiled(function, by_shape=True), compiled(function)

    def __call__(self, x: Tensor, *more: Any, varies: bool = False) -> Any:
        """The function's value.

        Args:
            x: the matrix.
            more: further arguments.
            varies: this matrix has another number of rows every time.
        """
        return (self._open if varies else self._fixed)(x, *more)


LARGEST = Function(largest)
QUANTIZE = Function(quantize)
QUANTIZE_WITH = Function(quantize_with)
