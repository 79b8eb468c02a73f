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

import functools
from collections.abc import Callable
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


CrossEntropy = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def hidden_states_loss(
    hidden: Tensor,
    head: OutputHead,
    batch: Batch,
    *,
    share: Tensor | float = 1.0,
    mtp_targets: MTPTargets | None = None,
    custom: TokenLoss[Any] | None = None,
    block_size: int | None = None,
    **cross_entropy: Any,
) -> tuple[Tensor, Tensor, Report]:
    """Return the loss of a micro-batch, with the gradients of all prediction depths attached.

    Args:
        hidden: states of the model and of each depth, ``[(1 + depths) * s, b, h]``.
        share: see `share_of_step`.
        custom: a user's own loss in place of cross-entropy; prediction depths keep cross-entropy.
        block_size, cross_entropy: see `weighted_linear_cross_entropy`.
    """
    # Wrappers for 16 bits return float32.
    hidden, weights = hidden.to(head.weight.dtype), batch.loss_weights
    layout: dict[str, Any] = {
        "tp_group": head.tp_group,
        "sequence_parallel": head.sequence_parallel,
        "block_size": block_size,
        "bias": head.bias,
    }
    options = {**layout, **cross_entropy}
    cross: CrossEntropy = functools.partial(weighted_linear_cross_entropy, **options)
    if mtp_targets is not None:
        hidden, *depths = torch.chunk(hidden, 1 + len(mtp_targets.labels), dim=0)
        for depth, of_depth in enumerate(depths):
            labels, of_labels = mtp_targets.labels[depth], mtp_targets.weights[depth]
            losses, total = cross(of_depth, head.weight, labels, of_labels)
            mtp_targets.record(depth, losses)
            hidden = attach(hidden, total, head.config)
    if custom is None:
        losses, total = cross(hidden, head.weight, batch.labels, weights * share)
        reported = {"lm loss": losses}
    else:
        losses, total, extra = blockwise_loss(
            custom.token_losses,
            hidden,
            head.weight,
            weights * share,
            batch.loss_inputs.tensors,
            **layout,
            extra_names=custom.extra_names,
        )
        reported = {custom.name: losses, **extra}
    each = weights.reshape(-1).float()
    report = {
        key: pair(torch.dot(values.reshape(-1), each), each.sum())
        for key, values in reported.items()
    }
    return total, number_of_targets(weights), {**report, **mtp_report(mtp_targets)}
