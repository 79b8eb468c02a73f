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


_LIMITS = {
    name: 4096
    for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit")
    if hasattr(torch._dynamo.config, name)
}
"""Of the compiler, under the names that torch 2.6 and later ones have."""


class Compiled:
    """A function of a matrix that is compiled where the matrix lies on a GPU.

    Once for each shape, since kernels of known sizes are faster; with sizes left open where they
    vary from step to step.

    Args:
        function: pure; its first argument is the matrix.
        backend: of ``torch.compile``.
    """

    def __init__(self, function: Callable[..., Any], backend: str = "inductor") -> None:
        self.function = function
        self._backend = backend
        self._made: dict[bool, Callable[..., Any]] = {}
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, x: Tensor, *more: Any, varies: bool = False) -> Any:
        """The function's value.

        Args:
            x: the matrix.
            more: further arguments.
            varies: this matrix has another size every time.
        """
        if not x.is_cuda or not x.numel():
            return self.function(x, *more)
        return self.compiled(x, *more, varies=varies)

    def compiled(self, x: Tensor, *more: Any, varies: bool = False) -> Any:
        """The same, on any device."""
        if varies not in self._made:
            # Without this option rows and columns would be written by a kernel each.
            options: dict[str, Any] = {"loop_ordering_after_fusion": True}
            self._made[varies] = torch.compile(
                self.function,
                dynamic=varies,
                fullgraph=True,
                backend=self._backend,
                options=options if self._backend == "inductor" else None,
            )
        run = self._made[varies]
        shapes = [tuple(given.shape) if torch.is_tensor(given) else given for given in more]
        key = (varies, varies or tuple(x.shape), x.stride(), x.dtype, *shapes)
        if key in self._seen:
            return run(x, *more)
        self._seen.add(key)
        # Its limit is 8 for all shapes, formats and layouts of a function. Settings hold for a
        # thread, and backward passes have one of their own.
        with torch._dynamo.config.patch(_LIMITS):
            return run(x, *more)


LARGEST = Compiled(largest)
QUANTIZE = Compiled(quantize)
QUANTIZE_WITH = Compiled(quantize_with)
