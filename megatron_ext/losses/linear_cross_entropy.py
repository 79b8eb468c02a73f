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

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import DataError
from megatron_ext.losses.logit_blocks import (
    Gradients,
    Head,
    differentiate,
    exponentiate,
    flat,
    logit_blocks,
    relative,
    scaled_to,
    unflat,
)


def _placeholder(weight_dtype: torch.dtype, main: Tensor) -> Tensor:
    """Return zeros for autograd, whose hook adds them to the gradient that is already in the
    buffer.

    Overlapped reductions refuse a missing gradient, so None would not do.
    """
    return main.new_zeros((), dtype=weight_dtype).expand_as(main)


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses and their weighted sum; the gradients are taken in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        tokens, token_weights = head.tokens(hidden), flat(weights).float()
        over_largest, largest = relative(token_weights)
        gradients = Gradients(ctx.needs_input_grad, tokens, weight)
        losses = token_weights.new_empty(labels.numel())
        for block in logit_blocks(head, tokens, weight, labels, bias):
            losses[block.span], lse, total = exponentiate(head, block)
            differentiate(head, block, over_largest[block.span], lse, total)
            gradients.add(block, weight)
        if gradients.hidden is not None:
            gradients.hidden = head.reduce(gradients.hidden, hidden)
        ctx.gradients, ctx.largest = gradients, largest
        # Saved tensors come back without their attributes.
        ctx.main_grad = getattr(weight, "main_grad", None) if head.main_grad else None
        ctx.weight_dtype = weight.dtype
        rows = unflat(losses, labels)
        ctx.mark_non_differentiable(rows)
        return rows, torch.dot(token_weights, losses)

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad_total: Tensor) -> Any:
        scale = grad_total * ctx.largest
        of_hidden, of_weight, of_bias = ctx.gradients.take(scale)
        of_bias = None if of_bias is None else of_bias.to(ctx.weight_dtype)
        if of_weight is not None and ctx.main_grad is not None:
            ctx.main_grad.addcmul_(of_weight, scale)
            of_weight = _placeholder(ctx.weight_dtype, ctx.main_grad)
        elif of_weight is not None:
            of_weight = scaled_to(ctx.weight_dtype, of_weight, scale)
        return of_hidden, of_weight, of_bias, None, None, None


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
        weight: this rank's part of the head, ``[v/tp, h]``; part r starts at token ``r * v/tp``.
        labels: ``[b, s]`` int64. A label outside ``[0, v)`` gives the loss lse, so tokens that do
            not count need ``ignore_index`` or a weight of 0.
        token_weights: ``[b, s]``, such as loss mask / tokens of the global batch.
        tp_group: tensor-parallel ranks; None means this rank alone.
        block_size: C. The logits of a block take C * v/tp * 4 bytes, and half of that more in 16
            bits. None takes an eighth of the tokens, 1024 at most: a 24th of the logits that eager
            holds. On GPUs they take half in 16 bits, and None follows `vocabulary.fused_rows`.
        bias: this rank's part of the head's bias, ``[v/tp]``, in the weight's type.
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
        block_size=block_size,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss_coefficient,
        main_grad=gradient_accumulation_fusion,
    )
    head.check(hidden, weight, labels, bias)
    if token_weights.shape != labels.shape:
        raise DataError(
            f"The token weights have shape {tuple(token_weights.shape)}, but the labels have "
            f"{tuple(labels.shape)}; pass one weight for each label."
        )
    if not torch.is_grad_enabled():
        losses = hidden.new_empty(labels.numel(), dtype=torch.float32)
        for block in logit_blocks(head, head.tokens(hidden), weight, labels, bias):
            losses[block.span] = exponentiate(head, block)[0]
        return unflat(losses, labels), torch.dot(flat(token_weights).float(), losses)
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, token_weights, head
    )
    return result
