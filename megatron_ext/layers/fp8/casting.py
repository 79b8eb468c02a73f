"""Casts to 8 bits on a GPU: which kernel makes which pass, and what it costs.

The functions of `fp8.matrices` define the numbers. On a GPU with Triton a cast with one scale for
the whole matrix is one kernel of `fp8.kernels`, which writes both layouts; magnitudes and casts by
row or column are compiled by `torch.compile`. The memory traffic for each 16-bit number in both
layouts, in bytes read + bytes written, depends on the recipe:

- delayed, 2 + 2: the scale is given, and the kernel that casts also finds the largest magnitude;
- tensorwise, 4 + 2: a pass over the tensor finds the scale before the cast;
- rowwise, 6 + 2: row scales are found while a row is in the cache, column scales by another pass.

Under sequence parallelism the input's transpose is made from the 8-bit rows that were gathered. For
experts the delayed recipe costs as much as tensorwise, since an expert without tokens has no scale
yet. Between the two matrices of an MLP, delayed scaling joins the activation to the cast of its
result, and the activation's gradient to the cast of that (see `Activation`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.compiled import compiled, compiles
from megatron_ext.layers.fp8 import matrices
from megatron_ext.layers.fp8.matrices import Layouts, Pass, Wanted


def kernels_for(x: Tensor) -> ModuleType | None:
    """Return `fp8.kernels` if its kernels can run on a matrix, else None.

    It must be on a GPU and not be empty, Triton must be there, and compilation must be allowed.
    """
    if not (x.is_cuda and compiles(x)):
        return None
    from megatron_ext.layers.fp8 import kernels  # Triton may be missing.

    return kernels


class Function:
    """A pure function whose first argument is a matrix, compiled for matrices on a GPU.

    A kernel that is specialized to a shape transposes faster, so each shape is compiled separately.
    With ``varies`` the number of rows stays dynamic, for matrices whose token count changes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._fixed = compiled(function, by_shape=True)
        self._open = compiled(function)

    def __call__(self, x: Tensor, *more: Any, varies: bool = False) -> Any:
        """Call the function; ``varies`` selects the kernel for any number of rows."""
        return (self._open if varies else self._fixed)(x, *more)


LARGEST = Function(matrices.largest)
QUANTIZE = Function(matrices.quantize)
KNOWN_SCALE = compiled(matrices.known_scale)


def cast_with(
    x: Tensor, scale: Tensor, dtype: torch.dtype, layout: Wanted, noted: Tensor | None = None
) -> Layouts:
    """Do what `matrices.quantize_with` does, on a GPU in one kernel."""
    kernels = kernels_for(x)
    function = matrices.quantize_with if kernels is None else kernels.cast
    layouts: Layouts = function(x, scale, dtype, layout, noted)
    return layouts


def cast_by_magnitude(
    x: Tensor, amax: Tensor, dtype: torch.dtype, layout: Wanted, *, varies: bool
) -> Pass:
    """Do what `matrices.quantize` does for a whole matrix, on a GPU in one kernel.

    ``amax`` ``[]`` is the largest magnitude; ``varies`` is as in `Function`.
    """
    kernels = kernels_for(x)
    if kernels is None:
        quantized: Pass = QUANTIZE(x, amax, dtype, None, layout, varies=varies)
    else:
        quantized = kernels.cast_by_magnitude(x, amax, dtype, layout)
    return quantized
