"""The loss of a step for a custom training loop, without a run or a configuration.

The loss of a step is one weighted mean over the tokens of all its micro-batches, on all ranks that
share the step. So its gradient does not depend on how the step is divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.data.batch import reduced_weights
from megatron_ext.losses.blockwise_loss import TokenLosses, blockwise_loss
from megatron_ext.losses.linear_cross_entropy import check_labels, weighted_linear_cross_entropy


class LossValue(NamedTuple):
    """The loss of a micro-batch.

    Attributes:
        loss: the micro-batch's part of the step's loss, a scalar with gradient.
        losses: the losses of the tokens, ``[b, s]`` without gradient.
        extra: further values that a custom loss returns, each ``[b, s]``, by name.
    """

    loss: Tensor
    losses: Tensor
    extra: Mapping[str, Tensor]


@dataclass(frozen=True)
class StepLoss:
    """Computes the loss of training steps from the hidden states before an output head.

    Attributes:
        weight, bias: this rank's part of the head, ``[v/tp, h]`` and ``[v/tp]``.
        reduction: "token" keeps the tokens' weights; "sample" divides each by the sum of the
            weights in its row, and "square" by the square root of this sum.
        ignore_index: label of tokens that do not count.
        token_losses: a custom loss in place of cross-entropy; see `blockwise_loss`.
        extra_names: names of the further values that ``token_losses`` returns.
        group: the data-parallel ranks that share a step. The caller must sum the gradients over
            them. None means all ranks, or only this one if there are no process groups.
        tp_group: ranks over which the head is split; None means that this rank holds all of it.
        sequence_parallel: whether the hidden states are split over ``tp_group`` along the sequence.
        options: further options of `weighted_linear_cross_entropy` or `blockwise_loss`.
    """

    weight: Tensor
    bias: Tensor | None = None
    reduction: str = "token"
    ignore_index: int = -100
    token_losses: TokenLosses | None = None
    extra_names: Sequence[str] = ()
    group: ProcessGroup | None = None
    tp_group: ProcessGroup | None = None
    sequence_parallel: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def of_step(
        self, labels: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> list["MicroBatchLoss"]:
        """Return a loss function for each micro-batch of a step, given its labels ``[b, s]``.

        ``weights`` are the token weights ``[b, s]`` of each micro-batch; None means weights of 1.
        All ranks of the group call this together.
        """
        given = [torch.ones_like(x, dtype=torch.float32) for x in labels]
        counted = [
            reduced_weights(own.float() * (each != self.ignore_index), None, self.reduction)
            for own, each in zip(weights or given, labels, strict=True)
        ]
        total = torch.stack([each.sum() for each in counted]).sum()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total, group=self.group)
        total = total.clamp(min=1e-30)
        return [
            MicroBatchLoss(self, each, own / total)
            for each, own in zip(labels, counted, strict=True)
        ]


@dataclass(frozen=True)
class MicroBatchLoss:
    """A function from the hidden states of one micro-batch to its part of a step's loss.

    ``weights`` are ``[b, s]`` and sum to 1 over all micro-batches of the step on all its ranks.
    """

    step: StepLoss
    labels: Tensor
    weights: Tensor

    def __call__(self, hidden: Tensor, inputs: Mapping[str, Tensor] | None = None) -> LossValue:
        """Return the loss of hidden states ``[s, b, h]``.

        ``inputs`` are further tensors ``[b, s, ...]`` for a custom loss, besides ``labels``.
        """
        step = self.step
        shared: dict[str, Any] = {
            "tp_group": step.tp_group,
            "sequence_parallel": step.sequence_parallel,
            "bias": step.bias,
            **step.options,
        }
        if step.token_losses is None:
            losses, total = weighted_linear_cross_entropy(
                hidden,
                step.weight,
                self.labels,
                self.weights,
                ignore_index=step.ignore_index,
                **shared,
            )
            return LossValue(total, losses, {})
        ranks = 1 if step.tp_group is None else step.tp_group.size()
        check_labels(self.labels, self.weights, step.ignore_index, ranks * step.weight.shape[0])
        losses, total, extra = blockwise_loss(
            step.token_losses,
            hidden,
            step.weight,
            self.weights,
            {"labels": self.labels, **(inputs or {})},
            extra_names=step.extra_names,
            **shared,
        )
        return LossValue(total, losses, extra)
