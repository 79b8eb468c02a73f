"""Weight gradients that one product adds to the gradient buffer of data parallelism.

The role of the kernel ``fused_weight_gradient_mlp_cuda`` of NVIDIA apex, which megatron-core takes
for ``--gradient-accumulation-fusion``: without it each micro-batch writes the gradient in 16 bits,
reads it again, and reads and writes the float32 buffer. Here cuBLAS adds to the buffer itself,
and the sum over the tokens is never rounded to 16 bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def add_product(total: Tensor, gradient: Tensor, entered: Tensor) -> None:
    """``total += gradient^T entered``.

    Args:
        total: ``[out, in]``.
        gradient: of the output, ``[tokens, out]``.
        entered: the input ``[tokens, in]``, in the same dtype.
    """
    transposed = gradient.t()
    if total.dtype == entered.dtype:
        total.addmm_(transposed, entered)
    elif total.is_cuda and _adds_to_float32(total.device, entered.dtype):
        torch.addmm(total, transposed, entered, out_dtype=total.dtype, out=total)
    else:
        total.add_(transposed.matmul(entered))


@functools.cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch can: 2.8 and newer multiply so, some of them without a float32 summand."""
    total = torch.ones(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def add_gradient(weight: Tensor, gradient: Tensor, entered: Tensor) -> None:
    """Add ``gradient^T entered`` to the data-parallel gradient buffer of a weight.

    Args:
        weight: ``[out, in]`` with a ``main_grad``.
        gradient, entered: see `add_product`.
    """
    add_product(weight.main_grad, gradient, entered)  # type: ignore[attr-defined]


def handed_over(weight: Tensor) -> Tensor:
    """What autograd gets for a gradient that is in the buffer already, ``[out, in]``.

    megatron-core's hooks run on the thread of the backward pass only if there is a gradient; they
    see that they need not add it. Of a weight with other uses in the same step (``zero_out_wgrad``)
    they add it nevertheless, and then it is zero.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    shared: Tensor | None = getattr(weight, "handed_over", None)  # see models.graphs
    if shared is not None:
        return shared
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)
