"""Accumulation of weight gradients in the data-parallel buffer, and their deferral.

With ``--gradient-accumulation-fusion`` the matrix product that computes a weight gradient also adds
it to the float32 buffer. The sum over the tokens is then never rounded to 16 bits, and the buffer
is read and written once. Megatron-LM uses a kernel of NVIDIA apex for this; here cuBLAS does it.

A zero-bubble schedule computes weight gradients when the rank would otherwise be idle
(arXiv:2401.10241). Until then `DeferredWeightGradients` queues their computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Key = tuple[int, int]
"""Index of a micro-batch and of a pipeline stage."""


def add_product(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Add ``gradient^T inputs`` to ``total`` in place.

    ``gradient`` is ``[tokens, out]``, ``inputs`` is ``[tokens, in]`` and ``total`` ``[out, in]``.
    """
    transposed = gradient.t()
    if total.dtype == inputs.dtype:
        total.addmm_(transposed, inputs)
    elif adds_in_float32(total.device, inputs.dtype):
        torch.addmm(total, transposed, inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(transposed.matmul(inputs))


@functools.cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds a product of 16-bit matrices to a float32 matrix in one call.

    Torch 2.8 and later can do so on GPUs. Some releases ignore the float32 matrix, which a small
    test product reveals.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return False
    total = torch.ones(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def gradient_placeholder(weight: Tensor) -> Tensor:
    """Mark a weight's gradient as added to the buffer; return a tensor ``[out, in]`` for autograd.

    Autograd needs some gradient to run megatron-core's hooks on the thread of the backward pass.
    The mark stops the hooks from adding the returned tensor, whose values are undefined. A weight
    that the step also uses elsewhere has the attribute ``zero_out_wgrad``: for it, the hooks ignore
    the mark, and the tensor is zero.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    shared: Tensor | None = getattr(weight, "gradient_placeholder", None)  # see layers.graphs
    if shared is not None:
        return shared
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add a gradient to ``weight.main_grad`` if that exists, else to ``weight.grad``."""
    if hasattr(weight, "main_grad"):
        weight.main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class DeferredWeightGradients:
    """Queues of weight gradients to compute later, one for each micro-batch and stage."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[Callable[[], object]]] = {}
        self._collecting: list[Callable[[], object]] | None = None

    def __deepcopy__(self, _memo: Any) -> DeferredWeightGradients:
        """Return this object, so that modules that copy their configuration share its queues."""
        return self

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Queue under ``key`` the weight gradients of the backward passes inside the block."""
        self._collecting = self._waiting.setdefault(key, [])
        try:
            yield
        finally:
            self._collecting = None

    @property
    def collecting(self) -> bool:
        return self._collecting is not None

    def add(self, compute: Callable[[], object]) -> None:
        """Queue the computation of one weight gradient; outside of `collect`, run it at once."""
        if self._collecting is None:
            compute()
        else:
            self._collecting.append(compute)

    def compute(self, key: Key) -> None:
        """Compute and remove the queued gradients of a micro-batch and stage."""
        with torch.no_grad():
            for compute in self._waiting.pop(key, ()):
                compute()


@dataclass(frozen=True)
class LinearCall:
    """The settings of one call of a linear layer.

    Attributes:
        parameter: the layer's weight.
        queue: queue for the weight's gradient; None computes it in the backward pass.
        in_place: add the gradient to the weight's ``main_grad``, if it has one.
        tp_group: ranks among which the weight is split; None for a layer without communication.
        sequence_parallel: gather the input along the sequence, and reduce-scatter its gradient.
        allreduce_dgrad: sum the input's gradient over the ranks of ``tp_group``.
        scaling: scales of 8-bit matrix products (see `layers.fp8`).
    """

    parameter: Tensor
    queue: DeferredWeightGradients | None = None
    in_place: bool = False
    tp_group: ProcessGroup | None = None
    sequence_parallel: bool = False
    allreduce_dgrad: bool = False
    scaling: Any = None
