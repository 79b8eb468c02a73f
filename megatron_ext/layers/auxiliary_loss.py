"""Auxiliary losses in the autograd graph, and the targets of multi-token prediction (MTP).

An identity function attaches an auxiliary loss to activations. The backward pass of this function
returns the activations' gradient unchanged, and starts the backward pass of the loss with the loss
scale as its gradient. megatron-core does the same for experts and MTP. The training step normalizes
the losses so that their gradients and logged values do not depend on the parallel layout.

MTP has K depths (prediction modules); depth k predicts the token k+1 positions ahead (DeepSeek-V3,
arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

INDEXER_LOSS = "indexer loss"
"""Megatron-LM's name in the log for the loss of the indexer of sparse attention."""

INDEXER_LOSS_COUNT = "indexer loss count"
"""Name in megatron-core's log under which each layer counts how many such losses it has logged."""


@dataclass
class AuxiliaryScale:
    """The factor by which `attach_microbatch_loss` multiplies a micro-batch's auxiliary loss.

    The training step sets it before its first forward pass, so that the step minimizes the mean
    auxiliary loss over all micro-batches: M on each of DP data-parallel ranks. If the step divides
    the summed gradients by its number of targets N, the factor is N / (DP * M). If its loss is the
    mean of micro-batch means, the factor is CP / M for CP context-parallel ranks, because the
    data-parallel reduction then divides by DP * CP.
    """

    value: Tensor | float = 1.0

    def __deepcopy__(self, _memo: Any) -> AuxiliaryScale:
        """Return this object itself, so that copies of a TransformerConfig share the factor."""
        return self


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

    The loss is scaled by ``grad_scale_func`` of ``transformer_config``. The training step divides
    all gradients by its number of targets N. To divide a loss by another number D, multiply it by
    N / D before calling this.
    """
    attached: Tensor = _Attach.apply(carrier, loss, transformer_config)  # type: ignore[no-untyped-call]
    return attached


def attach_microbatch_loss(carrier: Tensor, loss: Tensor, transformer_config: Any) -> Tensor:
    """Return ``carrier``, whose backward pass also differentiates a scalar auxiliary loss.

    The training step minimizes the mean of this loss over its micro-batches. The losses of
    context-parallel ranks are summed; the losses of tensor-parallel ranks must be equal. A task
    whose model calls this must set `Task.auxiliary_losses`.
    """
    scale: AuxiliaryScale | None = getattr(transformer_config, "auxiliary_scale", None)
    return attach(carrier, loss if scale is None else loss * scale.value, transformer_config)


@dataclass
class MTPTargets:
    """The targets of a micro-batch, one for each MTP depth, and the losses to log.

    Attributes:
        labels: for each depth, token ids ``[b, s/cp]``.
        masks: for each depth, the data's loss weights ``[b, s/cp]``, not normalized; 0 for tokens
            without a target.
        weights: for each depth, the normalized weights ``[b, s/cp]`` with which the training loss
            sums the token losses.
        reports: for each depth, ``[sum, count]`` of the token losses weighted by ``masks``; filled
            by the forward pass.
    """

    labels: Sequence[Tensor]
    masks: Sequence[Tensor]
    weights: Sequence[Tensor]
    reports: list[Tensor] = field(default_factory=list)

    def record(self, depth: int, losses: Tensor) -> None:
        """Append to ``reports`` the ``[sum, count]`` of the masked token losses of ``depth``.

        ``losses`` is ``[b, s/cp]``; depths count from 0.
        """
        mask = self.masks[depth]
        with torch.no_grad():
            self.reports.append(torch.stack([(losses.float() * mask).sum(), mask.sum()]))


def per_token_weights(
    masks: Sequence[Tensor], scaling_factor: float, main_count: Tensor, depth_counts: Tensor
) -> list[Tensor]:
    """Return the weights of each MTP depth's token losses, for losses normalized per token.

    The training step divides all gradients by its number of main targets, ``main_count``. To make
    each of the K depths add ``scaling_factor / K`` times its mean loss over the global batch, the
    mask of depth k is multiplied by ``scaling_factor / K * main_count / depth_counts[k]``.

    Args:
        masks: loss weights from the data for each depth, ``[b, s/cp]``.
        scaling_factor: ``--mtp-loss-scaling-factor``.
        main_count: number of targets of the main loss in the global batch, a scalar.
        depth_counts: sum of each depth's masks over the global batch, ``[K]``.

    Returns:
        Weights ``[b, s/cp]`` for each depth.
    """
    coefficient = scaling_factor / len(masks)
    ratios = main_count / _divisor(depth_counts)
    return [mask * (coefficient * ratio) for mask, ratio in zip(masks, ratios, strict=True)]


def mean_of_means_weights(masks: Sequence[Tensor], scaling_factor: float) -> list[Tensor]:
    """Return the weights of each MTP depth's token losses for a mean of micro-batch means.

    In this loss, Megatron-LM's default, each depth's mask ``[b, s/cp]`` is divided by its own sum.
    ``scaling_factor`` is ``--mtp-loss-scaling-factor`` divided by the number of micro-batches; each
    of the K depths gets a K-th of it.
    """
    coefficient = scaling_factor / len(masks)
    return [mask * (coefficient / _divisor(mask.sum())) for mask in masks]


def _divisor(counts: Tensor) -> Tensor:
    """Return the counts, with 1 in place of 0 to avoid a division by zero.

    A positive count is kept even if it is below 1, because loss weights may be fractions.
    """
    return torch.where(counts > 0, counts, 1.0)


@dataclass(frozen=True)
class OutputHead:
    """This rank's part of an output head.

    The weight is ``[v/tp, h]``; its first row belongs to the token id ``tp_rank * v/tp``. The bias
    is ``[v/tp]``, in the weight's dtype. With ``sequence_parallel`` the hidden states are split
    along the sequence. With ``softcap`` c, logits z become ``c tanh(z / c)``.
    """

    weight: Tensor
    tp_group: ProcessGroup
    sequence_parallel: bool
    config: Any
    bias: Tensor | None = None
    softcap: float | None = None
