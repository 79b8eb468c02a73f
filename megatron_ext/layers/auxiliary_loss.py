"""How an auxiliary loss joins the graph, and the losses of multi-token prediction that do so.

An identity on the activations carries the loss; its backward pass hands the activations' gradient
on and starts the gradient of the attached loss with the loss scale (Switch Transformer's trick, as
megatron-core uses it for experts and multi-token prediction). Scale and normalization come from the
step, so that the log and the gradients do not depend on the layout.

In multi-token prediction depth k of K predicts the token k+1 positions ahead (DeepSeek-V3,
arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass
class AuxiliaryScale:
    """The factor that turns a micro-batch's auxiliary loss into its share of the step.

    With M micro-batches on each of DP data-parallel ranks it is N / (DP * M) where the gradients
    are divided by the number N of targets, and CP / M in the mean of micro-batch means, which data
    parallelism divides by DP * CP. The step sets it before its first forward pass.
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
    """Return ``carrier``, whose backward pass also differentiates ``loss.sum()``.

    The step divides all gradients by its number of targets; multiply a loss that is to be divided
    by something else before.
    """
    attached: Tensor = _Attach.apply(carrier, loss, transformer_config)  # type: ignore[no-untyped-call]
    return attached


def attach_microbatch_loss(carrier: Tensor, loss: Tensor, transformer_config: Any) -> Tensor:
    """Attach a scalar loss whose mean over all micro-batches of the step is to be minimized.

    For a task's own auxiliary loss, declare `Task.auxiliary_losses`. Context-parallel ranks give
    parts that add up, tensor-parallel ranks the same value each.
    """
    scale: AuxiliaryScale | None = getattr(transformer_config, "auxiliary_scale", None)
    return attach(carrier, loss if scale is None else loss * scale.value, transformer_config)


@dataclass
class MTPTargets:
    """The targets of a micro-batch's multi-token-prediction depths, and what came out.

    Attributes:
        labels, masks, weights: ids, 0 or 1, and the gradient weights of the losses, ``[b, s/c]``.
        reports: ``[sum, count]`` of the masked losses, filled by the forward pass.
    """

    labels: Sequence[Tensor]
    masks: Sequence[Tensor]
    weights: Sequence[Tensor]
    reports: list[Tensor] = field(default_factory=list)

    def record(self, depth: int, losses: Tensor) -> None:
        """Keep sum and count of one depth's losses ``[b, s/c]`` for the log; depths start at 0."""
        mask = self.masks[depth]
        with torch.no_grad():
            self.reports.append(torch.stack([(losses.float() * mask).sum(), mask.sum()]))


def per_token_weights(
    masks: Sequence[Tensor], scaling_factor: float, main_count: Tensor, depth_counts: Tensor
) -> list[Tensor]:
    """Return the weights of the depths' losses under per-token normalization.

    The gradients of a step are divided by the number N of its main targets, so depth k, with D_k
    targets in the step, is weighted by N / D_k: its share of the loss is then exactly
    ``scaling_factor / K`` times its own mean over the global batch. The masks are ``[b, s/c]``, N
    and D_k ``[K]``.
    """
    coefficient = scaling_factor / len(masks)
    ratios = main_count / depth_counts.clamp(min=1)
    return [mask * (coefficient * ratio) for mask, ratio in zip(masks, ratios, strict=True)]


def mean_of_means_weights(masks: Sequence[Tensor], scaling_factor: float) -> list[Tensor]:
    """Return the weights where each micro-batch is averaged by itself, Megatron-LM's default.

    ``scaling_factor`` is ``--mtp-loss-scaling-factor`` over the number of micro-batches.
    """
    coefficient = scaling_factor / len(masks)
    return [mask * (coefficient / mask.sum().clamp(min=1)) for mask in masks]


@dataclass(frozen=True)
class OutputHead:
    """This rank's part ``[v/tp, h]`` of an output head, from token ``rank * v/tp`` on.

    The bias is ``[v/tp]``, in the weight's type. Hidden states may come cut along the sequence.
    """

    weight: Tensor
    tp_group: ProcessGroup
    sequence_parallel: bool
    config: Any
    bias: Tensor | None = None
