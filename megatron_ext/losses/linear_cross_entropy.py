"""Cross-entropy of a vocabulary-parallel linear head whose logits never exist as a whole.

Tokens are taken in chunks of C, flattened; one block of C x v/tp logits is alive at a time, in
float32, or on GPUs in the type of the product (`fused_softmax`).
`linear_cross_entropy` gives the loss of every token and computes its logits once more in the
backward pass; `weighted_linear_cross_entropy` is told the tokens' weights beforehand and takes the
gradients while it has the logits.

With logits z, label y, vocabulary size v, label smoothing e, z-loss coefficient c (PaLM's,
arXiv:2204.02311, section 5), lse = log sum exp z and p = exp(z - lse), a token has

    l = lse - (1 - e) z_y - e/v sum z + c lse^2
    dl/dz = p (1 + 2 c lse) - (1 - e) onehot(y) - e/v

which without c is `torch.nn.functional.cross_entropy(label_smoothing=e)`. Two collectives per chunk
of the forward pass, none per chunk of a backward pass, and no wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import DataError
from megatron_ext.losses.chunked_logits import (
    Gradients,
    Head,
    chunks,
    differentiate,
    exponentiate,
    flat,
    recall,
    relative,
    scaled_to,
    unflat,
)


def _handed_over(weight_dtype: torch.dtype, main: Tensor) -> Tensor:
    """Zeros for autograd, whose hook adds them to the gradient that is in the buffer already.

    None would do but for overlapped reductions, which refuse a missing gradient.
    """
    return main.new_zeros((), dtype=weight_dtype).expand_as(main)


def _main_grad(head: Head, weight: Tensor) -> Tensor | None:
    """The data-parallel buffer of a weight, where its gradient goes there past autograd."""
    return getattr(weight, "main_grad", None) if head.main_grad else None


def _losses(
    head: Head, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exp of all tokens, each ``[s * b]`` float32."""
    losses = hidden.new_empty(labels.numel(), dtype=torch.float32)
    lse = torch.empty_like(losses)
    for chunk in chunks(head, head.tokens(hidden), weight, labels, bias):
        losses[chunk.span], lse[chunk.span], _ = exponentiate(head, chunk)
    return losses, lse


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses of the tokens; the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head
    ) -> Tensor:
        losses, lse = _losses(head, hidden, weight, labels, bias)
        ctx.save_for_backward(hidden, weight, bias, labels, lse)
        # Saved tensors come back without their attributes.
        ctx.head, ctx.main_grad = head, _main_grad(head, weight)
        return unflat(losses, labels)

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> Any:
        hidden, weight, bias, labels, lse = ctx.saved_tensors
        head, main = ctx.head, ctx.main_grad
        tokens, incoming = head.tokens(hidden), flat(grad_losses).float()
        gradients = Gradients(ctx.needs_input_grad, tokens, weight, main)
        for chunk in chunks(head, tokens, weight, labels, bias):
            part = lse[chunk.span]
            recall(chunk, part)
            differentiate(head, chunk, incoming[chunk.span], part)
            gradients.add(chunk, weight)
        of_hidden, of_weight = gradients.hidden, gradients.weight
        if of_hidden is not None:
            of_hidden = head.reduce(of_hidden, hidden)
        if of_weight is not None and main is not None:
            if of_weight is not main:
                main.add_(of_weight)
            of_weight = _handed_over(weight.dtype, main)
        of_bias = None if gradients.bias is None else gradients.bias.to(weight.dtype)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, of_bias, None, None


class _WeightedLinearCrossEntropy(torch.autograd.Function):
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
        for chunk in chunks(head, tokens, weight, labels, bias):
            losses[chunk.span], lse, total = exponentiate(head, chunk)
            differentiate(head, chunk, over_largest[chunk.span], lse, total)
            gradients.add(chunk, weight)
        if gradients.hidden is not None:
            gradients.hidden = head.reduce(gradients.hidden, hidden)
        ctx.gradients, ctx.largest = gradients, largest
        ctx.main_grad, ctx.weight_dtype = _main_grad(head, weight), weight.dtype
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
            of_weight = _handed_over(ctx.weight_dtype, ctx.main_grad)
        elif of_weight is not None:
            of_weight = scaled_to(ctx.weight_dtype, of_weight, scale)
        return of_hidden, of_weight, of_bias, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    chunk_size: int | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_coefficient: float = 0.0,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """Cross-entropy of each token; saves hidden states, weight, labels and log-sum-exp only.

    Args:
        hidden: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism.
        weight: this rank's part of the head, ``[v/tp, h]``; part r starts at token ``r * v/tp``.
        labels: ``[b, s]`` int64. One outside ``[0, v)`` gives the loss lse, so tokens that do not
            count need ``ignore_index`` or a weight of 0.
        tp_group: the tensor-parallel ranks; None means this rank alone.
        sequence_parallel: the hidden states are cut along the sequence.
        chunk_size: C; its logits take C * v/tp * 4 bytes, and half of that more in 16 bits. None
            takes an eighth of the tokens, 1024 at most: a 24th of the logits that eager holds. On
            GPUs they take C * v/tp * 2 bytes in 16 bits, and None takes a quarter of the tokens,
            the larger of 2 h and 4096 at most; see `chunk_size.fused_rows`.
        bias: this rank's part of the head's bias, ``[v/tp]``, in the weight's type; None for none.
        ignore_index: label of tokens with loss 0 and gradient exactly 0.
        label_smoothing: share of the target that is spread over the whole vocabulary.
        z_loss_coefficient: c in ``c * lse^2``, a part of each token's loss.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad``, where that
            exists, and give autograd zeros, from which megatron-core's hooks see that it is there.

    Returns:
        losses ``[b, s]`` float32, the same on every tensor-parallel rank.

    Raises:
        ConfigError: an option out of its range, or hidden states and weight of different types.
        DataError: labels whose shape does not fit the hidden states.
    """
    head = Head(
        chunk_size=chunk_size,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss_coefficient,
        main_grad=gradient_accumulation_fusion,
    )
    head.check(hidden, weight, labels, bias)
    losses: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, head)  # type: ignore[no-untyped-call]
    return losses


def weighted_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    *,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    chunk_size: int | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_coefficient: float = 0.0,
    gradient_accumulation_fusion: bool = False,
) -> tuple[Tensor, Tensor]:
    """Losses of the tokens and their weighted sum, with the gradients taken in the forward pass.

    As many products with the head as whole logits need, one less than `linear_cross_entropy`. It
    holds the gradients of the hidden states and, in float32, of the weight until the backward
    pass, which scales them in place and so can run once only. Under ``torch.no_grad`` it computes
    no gradients.

    Args:
        hidden: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism.
        weight: this rank's part of the head, ``[v/tp, h]``.
        labels: ``[b, s]`` int64.
        token_weights: ``[b, s]``, such as loss mask / tokens of the global batch.
        tp_group, sequence_parallel, chunk_size, bias, ignore_index, label_smoothing,
            z_loss_coefficient, gradient_accumulation_fusion: as in `linear_cross_entropy`.

    Returns:
        losses ``[b, s]`` float32, outside the graph, and the sum of weights times losses, a
        float32 scalar inside it.

    Raises:
        ConfigError: as in `linear_cross_entropy`.
        DataError: labels or token weights whose shape does not fit.
    """
    head = Head(
        chunk_size=chunk_size,
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
        losses, _ = _losses(head, hidden, weight, labels, bias)
        return unflat(losses, labels), torch.dot(flat(token_weights).float(), losses)
    result: tuple[Tensor, Tensor] = _WeightedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, token_weights, head
    )
    return result
