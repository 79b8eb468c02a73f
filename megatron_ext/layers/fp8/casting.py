"""Casts matrices to 8 bits; on a GPU by a kernel of `fp8.kernels` or of `torch.compile`.

The functions of `fp8.matrices` define the results. On a GPU with Triton, a cast with one scale for
the whole matrix is a single kernel of `fp8.kernels`, which writes both layouts: the matrix and its
transpose. Two other passes are functions of `fp8.matrices`, compiled by `torch.compile`: a cast
with one scale per row or column, and a search for the largest magnitude that is not part of a cast.
The memory traffic per 16-bit number, in bytes read + bytes written for both layouts, depends on
``--fp8-recipe``:

- delayed, 2 + 2: the scale is given, and the casting kernel also finds the largest magnitude;
- tensorwise, 4 + 2: a pass over the tensor finds the scale before the cast;
- rowwise, 6 + 2: row scales are found while a row is in the cache, column scales in another pass.

Under sequence parallelism, the input's transpose is made from the gathered 8-bit rows. For experts
the delayed recipe costs as much as tensorwise, since an expert without tokens has no scale yet.
Between the two matrices of an MLP, delayed scaling fuses the activation with the cast of its
result, and the activation's gradient with the cast of that gradient (see `Activation`).
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

    The matrix must be on a GPU and not empty, Triton must be installed, and compilation allowed.
    """
    if not (x.is_cuda and compiles(x)):
        return None
    from megatron_ext.layers.fp8 import kernels  # Triton may be missing.

    return kernels


class Function:
    """A pure function whose first argument is a matrix, compiled for matrices on a GPU.

    Each shape is compiled separately, because a kernel for one shape transposes faster. A call with
    ``varies=True`` uses a kernel for any number of rows, for numbers of tokens that often change.
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
    """Cast a matrix to 8 bits with a given scale; on a GPU in a single kernel.

    For the arguments and the result see `matrices.quantize_with`.
    """
    kernels = kernels_for(x)
    function = matrices.quantize_with if kernels is None else kernels.cast
    layouts: Layouts = function(x, scale, dtype, layout, noted)
    return layouts


def cast_by_magnitude(
    x: Tensor, amax: Tensor, dtype: torch.dtype, layout: Wanted, *, varies: bool
) -> Pass:
    """Cast a matrix to 8 bits with one scale, computed from its largest magnitude ``amax`` ``[]``.

    On a GPU this is a single kernel. For ``layout`` see `matrices.quantize`, and for ``varies``
    `Function`.
    """
    kernels = kernels_for(x)
    if kernels is None:
        quantized: Pass = QUANTIZE(x, amax, dtype, None, layout, varies=varies)
    else:
        quantized = kernels.cast_by_magnitude(x, amax, dtype, layout)
    return quantized
