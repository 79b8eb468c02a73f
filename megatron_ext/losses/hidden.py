"""Losses of a language model from its hidden states: chunked cross-entropy, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ext.data.batch import Batch
from megatron_ext.losses.chunked_loss import chunked_loss
from megatron_ext.losses.contract import Report, pair
from megatron_ext.losses.cross_entropy import mtp_report, number_of_targets
from megatron_ext.losses.custom import TokenLoss
from megatron_ext.losses.linear_cross_entropy import weighted_linear_cross_entropy
from megatron_ext.models.auto_scaler import attach
from megatron_ext.models.head import OutputHead, in_type_of
from megatron_ext.models.mtp import MTPTargets


@dataclass(frozen=True)
class HiddenStatesLoss:
    """The loss of a micro-batch whose logits exist for a chunk of tokens at a time.

    Attributes:
        chunk_size: tokens of a chunk; None leaves it to `linear_cross_entropy`.
        cross_entropy: further options of `linear_cross_entropy`.
        own: a loss of the user's own in place of cross-entropy; prediction depths keep that.
    """

    chunk_size: int | None = None
    cross_entropy: Mapping[str, Any] = field(default_factory=dict)
    own: TokenLoss[Any] | None = None

    def __call__(
        self,
        hidden: Tensor,
        *,
        head: OutputHead,
        batch: Batch,
        share: Tensor | float = 1.0,
        mtp_targets: MTPTargets | None = None,
    ) -> tuple[Tensor, Tensor, Report]:
        """The loss, with the gradients of all multi-token-prediction depths attached.

        Args:
            hidden: of the model and of each depth, ``[(1 + depths) * s, b, h]``.
            head: the output head.
            batch: labels, weights, and what `TokenLoss.build` gave.
            share: see `share_of_step`.
            mtp_targets: labels and weights of the depths; None where there are none.
        """
        hidden = in_type_of(hidden, head)
        if mtp_targets is not None:
            hidden = self._with_mtp_losses(hidden, head, mtp_targets)
        weights = batch.loss_mask
        losses, total, extra = self._main(hidden, head, batch, weights * share)
        name = "lm loss" if self.own is None else self.own.name
        each = weights.reshape(-1).float()
        report = {
            key: pair(torch.dot(values.reshape(-1), each), each.sum())
            for key, values in {name: losses, **extra}.items()
        }
        return total, number_of_targets(weights), {**report, **mtp_report(mtp_targets)}

    def _main(
        self, hidden: Tensor, head: OutputHead, batch: Batch, weights: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.own is None:
            return *self._cross_entropy(hidden, head, batch.labels, weights), {}
        return chunked_loss(
            self.own.token_losses,
            hidden,
            head.weight,
            weights,
            batch.loss_inputs.tensors,
            tp_group=head.tp_group,
            sequence_parallel=head.sequence_parallel,
            chunk_size=self.chunk_size,
            bias=head.bias,
            extra_names=self.own.extra_names,
        )

    def _cross_entropy(
        self, hidden: Tensor, head: OutputHead, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        return weighted_linear_cross_entropy(
            hidden,
            head.weight,
            labels,
            weights,
            tp_group=head.tp_group,
            sequence_parallel=head.sequence_parallel,
            chunk_size=self.chunk_size,
            bias=head.bias,
            **self.cross_entropy,
        )

    def _with_mtp_losses(self, chunks: Tensor, head: OutputHead, targets: MTPTargets) -> Tensor:
        """Hidden states ``[s, b, h]`` that carry the gradients of all depths' losses."""
        hidden, *depths = torch.chunk(chunks, 1 + len(targets.labels), dim=0)
        for depth, of_depth in enumerate(depths):
            labels, weights = targets.labels[depth], targets.weights[depth]
            losses, total = self._cross_entropy(of_depth, head, labels, weights)
            targets.record(depth, losses)
            hidden = attach(hidden, total, head.config)
        return hidden
