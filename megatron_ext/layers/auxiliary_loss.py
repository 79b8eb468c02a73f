"""How an auxiliary loss joins the graph: the loss auto-scaler.

An identity on the activations carries the loss; its backward pass hands the activations' gradient
on and starts the gradient of the attached loss with the loss scale (Switch Transformer's trick, as
megatron-core uses it for experts and multi-token prediction). Scale and normalization come from the
step, so that the log and the gradients do not depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class AuxiliaryScale:
    """The factor that turns a micro-batch's auxiliary loss into its share of the step.

    The gradients of a step are divided by its number of targets N; an auxiliary loss that is to be
    averaged over M micro-batches on each of DP data-parallel ranks is therefore attached times N /
    (DP * M). In the mean of micro-batch means the factor is CP / M, which data parallelism divides
    by DP * CP. The step sets it before its first forward pass.
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


def attach(carrier: Tensor, loss: Tensor, transformer_config: Any) -> Tensor:
    """Add ``loss.sum()`` to what the backward pass through ``carrier`` differentiates.

    The step divides all gradients by its number of targets; multiply a loss that is to be divided
    by something else before.

    Args:
        carrier: activations that the main loss depends on.
        loss: a tensor of any shape.

    Returns:
        The carrier; the loss is lost if it is not used.
    """
    attached: Tensor = _Attach.apply(carrier, loss, transformer_config)  # type: ignore[no-untyped-call]
    return attached


def attach_microbatch_loss(carrier: Tensor, loss: Tensor, transformer_config: Any) -> Tensor:
    """Attach a scalar loss whose mean over all micro-batches of the step is to be minimized.

    For a task's own auxiliary loss, declare `Task.auxiliary_losses`. Context-parallel ranks give
    parts that add up, tensor-parallel ranks the same value each. See `attach` for the arguments;
    ``config`` carries the step's `AuxiliaryScale`.
    """
    scale: AuxiliaryScale | None = getattr(transformer_config, "auxiliary_scale", None)
    return attach(carrier, loss if scale is None else loss * scale.value, transformer_config)
