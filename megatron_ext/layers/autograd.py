"""The one way by which an auxiliary loss joins the graph: the loss auto-scaler.

An identity on the activations that carry the loss; its backward pass hands the activations'
gradient on and starts the gradient of the attached loss with the loss scale (Switch Transformer's
trick, as megatron-core uses it for experts and multi-token prediction). Scale and normalization
come from the step, so that the log and the gradients do not depend on the layout.

Weight gradients that one product adds to the gradient buffer of data parallelism.

The role of the kernel ``fused_weight_gradient_mlp_cuda`` of NVIDIA apex, which megatron-core takes
for ``--gradient-accumulation-fusion``: without it each micro-batch writes the gradient in 16 bits,
reads it again, and reads and writes the float32 buffer. Here cuBLAS adds to the buffer itself,
and the sum over the tokens is never rounded to 16 bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class AuxiliaryScale:
    """The factor that turns a micro-batch's auxiliary loss into its share of the step.

    The gradients of a step are divided by its number of targets N; an auxiliary loss that is to
    be averaged over M micro-batches on each of DP data-parallel ranks is therefore attached times
    N / (DP * M). In the mean of micro-batch means it is CP / M, which data parallelism divides by
    DP * CP. The step sets the factor before its first forward pass.
    """

    value: Tensor | float = 1.0


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, config: Any) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.config = config
        return carrier

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        start = torch.ones_like(loss)
        grad_scale = ctx.config.grad_scale_func
        return gradient, start if grad_scale is None else grad_scale(start), None


def attach(carrier: Tensor, loss: Tensor, config: Any) -> Tensor:
    """Add ``loss.sum()`` to what the backward pass through ``carrier`` differentiates.

    The step divides all gradients by its number of targets; a loss that is to be divided by
    something else is multiplied before.

    Args:
        carrier: activations that the main loss depends on.
        loss: of any shape.
        config: megatron-core's configuration of the model.

    Returns:
        The carrier; the loss is lost if it is not used.
    """
    attached: Tensor = _Attach.apply(carrier, loss, config)  # type: ignore[no-untyped-call]
    return attached


def attach_microbatch_loss(carrier: Tensor, loss: Tensor, config: Any) -> Tensor:
    """Attach a loss whose mean over all micro-batches of the step is to be minimized.

    For a task's own auxiliary loss, declare `Task.auxiliary_losses`. Context-parallel ranks give
    parts that add up, tensor-parallel ranks the same value each.

    Args:
        carrier: see `attach`.
        loss: of this micro-batch, scalar.
        config: see `attach`; it carries the step's `AuxiliaryScale`.
    """
    scale: AuxiliaryScale | None = getattr(config, "auxiliary_scale", None)
    return attach(carrier, loss if scale is None else loss * scale.value, config)


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
