"""Cross-entropy of a vocabulary-parallel linear head whose logits never exist as a whole.

Tokens are taken in blocks of C, flattened; one block of C x v/tp logits is alive at a time, in
float32, or on GPUs in the type of the product (`vocabulary.statistics`). The weights of the tokens
are known beforehand, so the gradients are taken while the logits are there.

With logits z, label y, vocabulary size v, label smoothing e, z-loss coefficient c (PaLM's,
arXiv:2204.02311, section 5), lse = log sum exp z and p = exp(z - lse), a token has

    l = lse - (1 - e) z_y - e/v sum z + c lse^2
    dl/dz = p (1 + 2 c lse) - (1 - e) onehot(y) - e/v

which without c is `torch.nn.functional.cross_entropy(label_smoothing=e)`. A block costs two
collectives in the forward pass, none in the backward pass, and no wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.data.batch import Batch
from megatron_ext.errors import DataError
from megatron_ext.layers.auxiliary_loss import MTPTargets, OutputHead, attach
from megatron_ext.losses.blockwise_loss import blockwise_loss
from megatron_ext.losses.contract import Report, mtp_report, number_of_targets, pair
from megatron_ext.losses.custom import TokenLoss
from megatron_ext.losses.logit_blocks import (
    Gradients,
    Head,
    differentiate,
    exponentiate,
    logit_blocks,
    weighted_sum,
)


def weighted_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    *,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    block_size: int | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_coefficient: float = 0.0,
    gradient_accumulation_fusion: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the losses of the tokens and their weighted sum.

    This takes as many products with the head as whole logits do. The gradients of the hidden states
    and, in float32, of the weight are held until the backward pass, which scales them in place and
    so can run once only. Under ``torch.no_grad`` no gradients are computed.

    Args:
        hidden: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism.
        weight, bias: this rank's part of the head, ``[v/tp, h]`` and ``[v/tp]``, from token
            ``rank * v/tp`` on, of one type.
        labels: ``[b, s]`` int64. A label outside ``[0, v)`` gives the loss lse, so tokens that do
            not count need ``ignore_index`` or a weight of 0.
        token_weights: ``[b, s]``, such as loss mask / tokens of the global batch.
        tp_group: None means this rank alone.
        block_size: C. The logits of a block take C * v/tp * 4 bytes, and half of that more in 16
            bits. None takes an eighth of the tokens, 1024 at most: a 24th of the logits that eager
            holds. On GPUs they take half in 16 bits, and None follows `vocabulary.fused_rows`.
        ignore_index: label of tokens with loss 0 and gradient exactly 0.
        label_smoothing: share of the target that is spread over the whole vocabulary.
        z_loss_coefficient: c in ``c * lse^2``, a part of each token's loss.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad``, where that
            exists, and give autograd marked zeros, which megatron-core's hooks know.

    Returns:
        losses ``[b, s]`` float32, outside the graph and alike on every tensor-parallel rank, and
        their weighted sum, a float32 scalar inside the graph.

    Raises:
        ConfigError: an option out of its range, or hidden states and weight of different types.
        DataError: labels or token weights whose shape does not fit.
    """
    head = Head(
        block_size, tp_group, sequence_parallel, ignore_index, label_smoothing,
        z_loss=z_loss_coefficient, main_grad=gradient_accumulation_fusion,
    )  # fmt: skip
    head.check(hidden, weight, labels, bias)
    if token_weights.shape != labels.shape:
        raise DataError(
            f"The token weights have shape {tuple(token_weights.shape)}, but the labels have "
            f"{tuple(labels.shape)}; pass one weight for each label."
        )

    def values_of(tokens: Tensor, weights: Tensor, gradients: Gradients) -> list[Tensor]:
        losses = weights.new_empty(labels.numel())
        for block in logit_blocks(head, tokens, weight, labels, bias):
            losses[block.span], lse, total = exponentiate(head, block)
            if gradients.wanted:
                differentiate(head, block, weights[block.span], lse, total)
                gradients.add(block, weight)
        return [losses]

    total, losses = weighted_sum(hidden, weight, bias, token_weights, head, values_of)
    return losses, total


@dataclass(frozen=True)
class HiddenStatesLoss:
    """The loss of a micro-batch whose logits exist for a block of tokens at a time.

    Attributes:
        block_size: tokens of a block; None leaves it to `weighted_linear_cross_entropy`.
        cross_entropy: further options of `weighted_linear_cross_entropy`.
        custom: a user's own loss in place of cross-entropy; prediction depths keep cross-entropy.
    """

    block_size: int | None = None
    cross_entropy: Mapping[str, Any] = field(default_factory=dict)
    custom: TokenLoss[Any] | None = None

    def __call__(
        self,
        hidden: Tensor,
        *,
        head: OutputHead,
        batch: Batch,
        share: Tensor | float = 1.0,
        mtp_targets: MTPTargets | None = None,
    ) -> tuple[Tensor, Tensor, Report]:
        """Return the loss, with the gradients of all multi-token-prediction depths attached.

        The hidden states of the model and of each depth are ``[(1 + depths) * s, b, h]``.
        """
        # Wrappers for 16 bits return float32.
        hidden = hidden.to(head.weight.dtype)
        if mtp_targets is not None:
            hidden = self._with_mtp_losses(hidden, head, mtp_targets)
        weights = batch.loss_weights
        losses, total, extra = self._main(hidden, head, batch, weights * share)
        name = "lm loss" if self.custom is None else self.custom.name
        each = weights.reshape(-1).float()
        report = {
            key: pair(torch.dot(values.reshape(-1), each), each.sum())
            for key, values in {name: losses, **extra}.items()
        }
        return total, number_of_targets(weights), {**report, **mtp_report(mtp_targets)}

    def _main(
        self, hidden: Tensor, head: OutputHead, batch: Batch, weights: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.custom is None:
            return *self._cross_entropy(hidden, head, batch.labels, weights), {}
        return blockwise_loss(
            self.custom.token_losses,
            hidden,
            head.weight,
            weights,
            batch.loss_inputs.tensors,
            tp_group=head.tp_group,
            sequence_parallel=head.sequence_parallel,
            block_size=self.block_size,
            bias=head.bias,
            extra_names=self.custom.extra_names,
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
            block_size=self.block_size,
            bias=head.bias,
            **self.cross_entropy,
        )

    def _with_mtp_losses(self, blocks: Tensor, head: OutputHead, targets: MTPTargets) -> Tensor:
        """Return hidden states ``[s, b, h]`` that carry the gradients of all depths' losses."""
        hidden, *depths = torch.chunk(blocks, 1 + len(targets.labels), dim=0)
        for depth, of_depth in enumerate(depths):
            labels, weights = targets.labels[depth], targets.weights[depth]
            losses, total = self._cross_entropy(of_depth, head, labels, weights)
            targets.record(depth, losses)
            hidden = attach(hidden, total, head.config)
        return hidden
