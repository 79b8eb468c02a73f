"""Where the gradient of a weight goes: into the data-parallel buffer, or into a queue for later.

With ``--gradient-accumulation-fusion`` the product that makes a weight gradient adds it to the
float32 buffer itself, so that the sum over the tokens is never rounded to 16 bits and the buffer is
read and written once. Megatron-LM takes a kernel of NVIDIA apex for this; here cuBLAS does it.

A zero-bubble schedule computes weight gradients when the rank would otherwise be idle
(arXiv:2401.10241); until then they wait in `DeferredWeightGradients`.
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
"""Micro-batch and stage."""


def add_product(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Add ``gradient^T inputs``, of ``[tokens, out]`` and ``[tokens, in]``, to ``[out, in]``."""
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

    From torch 2.8 on GPUs do; some releases ignore the summand, so it is tried.
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
    """Return a tensor ``[out, in]`` for autograd in place of a gradient that is in the buffer.

    megatron-core's hooks run on the thread of the backward pass only if there is a gradient; the
    mark on the weight tells them not to add it. For a weight with ``zero_out_wgrad``, which is used
    elsewhere in the step too, they add it nevertheless, so it is zero; else it is undefined.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    shared: Tensor | None = getattr(weight, "gradient_placeholder", None)  # see layers.graphs
    if shared is not None:
        return shared
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add a gradient to the data-parallel buffer, or to ``weight.grad`` where there is none."""
    if hasattr(weight, "main_grad"):
        weight.main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class DeferredWeightGradients:
    """A queue of weight gradients that are computed later, by micro-batch and stage."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[Callable[[], object]]] = {}
        self._collecting: list[Callable[[], object]] | None = None

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Defer the weight gradients of the backward passes inside the block."""
        self._collecting = self._waiting.setdefault(key, [])
        try:
            yield
        finally:
            self._collecting = None

    @property
    def collecting(self) -> bool:
        return self._collecting is not None

    def add(self, compute: Callable[[], object]) -> None:
        """Defer one weight gradient, or compute it at once outside of `collect`."""
        if self._collecting is None:
            compute()
        else:
            self._collecting.append(compute)

    def compute(self, key: Key) -> None:
        """Compute the queued gradients of a micro-batch and stage."""
        with torch.no_grad():
            for compute in self._waiting.pop(key, ()):
                compute()


@dataclass(frozen=True)
class LinearCall:
    """The settings of one call of a linear layer.

    Attributes:
        parameter: the layer's weight.
        queue: queue for its gradient; None computes the gradient in the backward pass.
        in_place: add the gradient to the weight's ``main_grad``, where it has one.
        tp_group: ranks that hold the other parts of the weight; None where nothing is sent.
        sequence_parallel: the input is gathered, and its gradient reduce-scattered, along s.
        allreduce_dgrad: the input's gradient is summed over the ranks.
        scaling: scales of 8-bit products (see `layers.fp8`).
    """

    parameter: Tensor
    queue: DeferredWeightGradients | None = None
    in_place: bool = False
    tp_group: ProcessGroup | None = None
    sequence_parallel: bool = False
    allreduce_dgrad: bool = False
    scaling: Any = None
