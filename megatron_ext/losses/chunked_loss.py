"""Any per-token loss on hidden states and head weight, chunk by chunk, gradients taken at once.

The same bargain as `losses.linear_cross_entropy`, for a loss that is written as a plain function
of a chunk: the graph of one chunk is alive at a time, its gradients are taken in the forward pass,
that of the weight is summed in float32, and the backward pass scales what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.losses.chunked_logits import Gradients, Head, flat, relative, unflat
from megatron_ext.losses.vocabulary import VocabularyHead

Inputs = Mapping[str, Tensor]
TokenLosses = Callable[[Tensor, VocabularyHead, Inputs], Tensor]


@dataclass(frozen=True)
class _Work:
    """What the chunks of one micro-batch have in common; inputs and weights are flattened."""

    loss: TokenLosses
    head: Head
    tokens: Tensor
    weight: Tensor
    token_weights: Tensor
    inputs: Inputs
    gradients: Gradients

    def losses(self) -> Tensor:
        """Losses of all tokens ``[s * b]``; their gradients are left in ``gradients``."""
        count = self.tokens.shape[0]
        rows = self.head.rows(count)
        losses = self.token_weights.new_empty(count)
        for start in range(0, count, rows):
            span = slice(start, min(start + rows, count))
            losses[span] = self._chunk(span)
        return losses

    def _chunk(self, span: slice) -> Tensor:
        of_hidden, of_weight = self.gradients.hidden, self.gradients.weight
        tokens = self.tokens[span].detach().requires_grad_(of_hidden is not None)
        weight = self.weight.detach().requires_grad_(of_weight is not None)
        leaves = [x for x in (tokens, weight) if x.requires_grad]
        inputs = {name: x if x.dim() == 0 else x[span] for name, x in self.inputs.items()}
        weights = self.token_weights[span]
        with torch.set_grad_enabled(bool(leaves)):
            losses = self.loss(tokens, VocabularyHead(weight, self.head.tp_group), inputs)
            _check_shape(losses, weights)
            # A token that does not count may have any loss.
            losses = torch.where(weights != 0, losses.float(), 0.0)
            total = torch.dot(weights, losses)
        if leaves:
            gradients = iter(torch.autograd.grad(total, leaves))
            if of_hidden is not None:
                of_hidden[span] = next(gradients)
            if of_weight is not None:
                of_weight.add_(next(gradients))
        return losses.detach()


def _check_shape(losses: Tensor, weights: Tensor) -> None:
    if losses.shape != weights.shape:
        raise ConfigError(
            f"A token loss returned shape {tuple(losses.shape)} for a chunk of "
            f"{weights.shape[0]} tokens, but it must return one loss for each: "
            f"{tuple(weights.shape)}."
        )


class _ChunkedLoss(torch.autograd.Function):
    """Losses of the tokens, outside the graph, and their weighted sum, inside it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        weights: Tensor,
        work: Callable[[Tensor, Tensor, Tensor, tuple[bool, ...]], _Work],
        takes_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        token_weights = flat(weights).float()
        over_largest, largest = relative(token_weights)
        wanted = tuple(takes_gradients and needed for needed in ctx.needs_input_grad[:2])
        job = work(over_largest, hidden, weight, wanted)
        losses, gradients = job.losses(), job.gradients
        if gradients.hidden is not None:
            gradients.hidden = job.head.reduce(gradients.hidden, hidden)
        ctx.gradients, ctx.largest, ctx.dtype = gradients, largest, weight.dtype
        result = unflat(losses, weights)
        ctx.mark_non_differentiable(result)
        return result, torch.dot(token_weights, losses)

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad_total: Tensor) -> Any:
        scale = grad_total * ctx.largest
        of_hidden, of_weight = ctx.gradients.take(scale)
        if of_weight is not None:
            of_weight = of_weight.mul_(scale).to(ctx.dtype)
        return of_hidden, of_weight, None, None, None


def chunked_loss(
    loss: TokenLosses,
    hidden: Tensor,
    weight: Tensor,
    weights: Tensor,
    inputs: Inputs,
    *,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Losses of the tokens and their weighted sum, for a loss written for a chunk of C tokens.

    Args:
        loss: from hidden states ``[C, h]``, the head and the inputs of the chunk to losses ``[C]``.
            It is called once for each chunk, with gradients enabled. On the tensor-parallel ranks
            the gradients of the hidden states are summed, so what a loss adds that does not go
            through the head's methods must be divided by their number.
        hidden: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism.
        weight: this rank's part of the head, ``[v/tp, h]``.
        weights: of the tokens, ``[b, s]``.
        inputs: by name, ``[b, s, ...]`` cut into ``[C, ...]``, or a scalar that every chunk gets.
        tp_group, sequence_parallel, chunk_size: as in `linear_cross_entropy`.

    Returns:
        losses ``[b, s]`` float32, outside the graph and 0 where the weight is 0, and the sum of
        weights times losses, a float32 scalar inside it.

    Raises:
        ConfigError: losses of a wrong shape.
        DataError: inputs or weights whose shape does not fit the hidden states.
    """
    head = Head(chunk_size, tp_group, sequence_parallel)
    head.check(hidden, weight, weights)
    for name, value in inputs.items():
        if value.dim() > 0 and value.shape[:2] != weights.shape:
            raise DataError(
                f"The loss input `{name}` has shape {tuple(value.shape)}, but it must be a scalar "
                f"or begin with [b, s] = {tuple(weights.shape)}."
            )

    def work(
        token_weights: Tensor, hidden: Tensor, weight: Tensor, wanted: tuple[bool, ...]
    ) -> _Work:
        tokens = head.tokens(hidden)
        flattened = {
            name: x if x.dim() == 0 else x.transpose(0, 1).flatten(0, 1)
            for name, x in inputs.items()
        }
        gradients = Gradients(wanted, tokens, weight)
        return _Work(loss, head, tokens, weight, token_weights, flattened, gradients)

    result: tuple[Tensor, Tensor] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, weights, work, torch.is_grad_enabled()
    )
    return result
