"""Cross-entropy of a vocabulary-parallel linear head that never holds all logits at once.

The flattened tokens are processed in blocks of C. Only one block of logits ``[C, v/tp]`` exists at
a time, in float32, or on GPUs in the dtype of the matrix product (`softmax_kernels`). Since the
weights of the tokens are known in advance, the forward pass also computes the gradients.

With logits z, label y, vocabulary size v, label smoothing e, z-loss coefficient c (PaLM's,
arXiv:2204.02311, section 5), lse = log sum exp z and p = exp(z - lse), a token has

    l = lse - (1 - e) z_y - e/v sum z + c lse^2
    dl/dz = p (1 + 2 c lse) - (1 - e) onehot(y) - e/v

With c = 0 this is `torch.nn.functional.cross_entropy(label_smoothing=e)`. A block takes two
collectives in the forward pass, none in the backward pass, and no synchronization with the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.data.batch import Batch
from megatron_ext.errors import DataError
from megatron_ext.layers.auxiliary_loss import MTPTargets, OutputHead, attach
from megatron_ext.losses.contract import Report, mtp_report, number_of_targets, pair
from megatron_ext.losses.logit_blocks import (
    Gradients,
    Head,
    differentiate,
    exponentiate,
    logit_blocks,
    weighted_sum,
)

if TYPE_CHECKING:
    from megatron_ext.losses.custom import TokenLoss


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
    softcap: float | None = None,
    gradient_accumulation_fusion: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the losses of the tokens and their weighted sum.

    This takes no more matrix products than computing all logits at once. The gradients of the
    hidden states and (in float32) of the weight are kept until the backward pass, which scales them
    in place and can run only once. Under ``torch.no_grad`` no gradient is computed.

    Args:
        hidden: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism.
        weight, bias: this rank's part of the head, ``[v/tp, h]`` and ``[v/tp]``, of one dtype. Its
            first row belongs to the token id ``rank * v/tp``.
        labels: ``[b, s]`` int64 in ``[0, v)``. A token without a target needs the label
            ``ignore_index`` or a weight of 0.
        token_weights: ``[b, s]``, such as loss mask / tokens of the global batch.
        tp_group: the ranks that share the head; None means that this rank holds the whole head.
        block_size: tokens C of a block; None chooses an eighth of the tokens, at most 1024. The
            logits take C * v/tp * 4 bytes, and a 16-bit head needs a 16-bit copy of half that size.
            If a GPU keeps the logits in 16 bits, they take C * v/tp * 2 bytes, and None chooses a
            larger C (`config.training.fused_rows`).
        ignore_index: label of tokens whose loss and gradient are exactly 0.
        label_smoothing: share of the target probability spread over the whole vocabulary.
        z_loss_coefficient: c of the term ``c * lse^2`` in each token's loss.
        softcap: limit k of the logits z, which become ``k tanh(z / k)`` first.
        gradient_accumulation_fusion: add the weight's gradient to its ``main_grad``, if there is
            one, and pass none to autograd (see `weight_gradients.expect_additions`).

    Returns:
        losses: ``[b, s]`` float32 without gradient, equal on all tensor-parallel ranks.
        total: the weighted sum of the losses, a float32 scalar with gradient.

    Raises:
        ConfigError: an option is out of range, or a dtype or bias does not fit the weight.
        DataError: the shape of labels or token weights does not fit, or, on a CPU, a label is
            outside the head. On a GPU such a label gives a meaningless loss, since a check would
            wait for the GPU.
    """
    options = label_smoothing, z_loss_coefficient, gradient_accumulation_fusion, softcap
    head = Head(block_size, tp_group, sequence_parallel, ignore_index, *options)
    head.check(hidden, weight, labels, bias)
    if token_weights.shape != labels.shape:
        raise DataError(
            f"The token weights have shape {tuple(token_weights.shape)}, but the labels have "
            f"{tuple(labels.shape)}; pass one weight for each label."
        )

    check_labels(labels, token_weights, ignore_index, head.tp_size * weight.shape[0])

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


def check_labels(labels: Tensor, weights: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Raise a DataError for a label that is not an index of the head's ``vocab_size`` rows.

    The label ``ignore_index`` and labels of tokens with weight 0 are allowed to be outside. Labels
    on a GPU are not checked, since that would wait for the GPU.
    """
    if labels.device.type != "cpu":
        return
    outside = (labels < 0) | (labels >= vocab_size)
    wrong = labels[outside & (labels != ignore_index) & (weights != 0)]
    if len(wrong):
        raise DataError(
            f"A label is {int(wrong[0])}, but the head has {vocab_size} rows, so that labels are "
            f"0 to {vocab_size - 1}; give such labels, or tokens without a target the label "
            f"{ignore_index} or a weight of 0."
        )


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
    """Return the loss of a micro-batch, its number of targets and its log entries.

    The loss's backward pass also computes the gradients of the multi-token-prediction (MTP) losses.

    Args:
        hidden: states of the decoder, then of each MTP depth, ``[(1 + depths) * s, b, h]``.
        share: factor of the weighted sum of the losses, from `share_of_step`.
        mtp_targets: labels and weights of the MTP depths; it also stores their losses for the log.
            None for a model without MTP.
        custom: a user's own loss instead of cross-entropy; the MTP depths keep cross-entropy.
        block_size, cross_entropy: options of `weighted_linear_cross_entropy`.
    """
    if hidden.dtype != head.weight.dtype:
        # megatron-core's wrappers of 16-bit models return float32; the head needs the model's own
        # dtype.
        hidden = hidden.to(head.weight.dtype)
    weights = batch.loss_weights
    layout: dict[str, Any] = {
        "tp_group": head.tp_group,
        "sequence_parallel": head.sequence_parallel,
        "block_size": block_size,
        "bias": head.bias,
        "softcap": head.softcap,
    }
    options = {**layout, **cross_entropy}
    cross: CrossEntropy = functools.partial(weighted_linear_cross_entropy, **options)
    if mtp_targets is not None:
        hidden, *depths = torch.chunk(hidden, 1 + len(mtp_targets.labels), dim=0)
        for depth, depth_hidden in enumerate(depths):
            labels = mtp_targets.labels[depth]
            label_weights = mtp_targets.weights[depth]
            losses, total = cross(depth_hidden, head.weight, labels, label_weights)
            mtp_targets.record(depth, losses)
            hidden = attach(hidden, total, head.config)
    if custom is None:
        losses, total = cross(hidden, head.weight, batch.labels, weights * share)
        reported = {"lm loss": losses}
    else:
        ignored = cross_entropy.get("ignore_index", -100)
        rows = head.weight.shape[0] * (1 if head.tp_group is None else head.tp_group.size())
        check_labels(batch.labels, weights, ignored, rows)
        from megatron_ext.losses.blockwise_loss import blockwise_loss

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
