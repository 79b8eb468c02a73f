"""Any per-token loss on hidden states and head weight, block by block, gradients taken at once.

This is `losses.linear_cross_entropy` for a loss that is written as a plain function of a block: the
graph of one block is alive at a time, its gradients are taken in the forward pass, that of the
weight is summed in float32, and the backward pass scales what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.losses.logit_blocks import Gradients, Head, flat, relative, unflat
from megatron_ext.losses.vocabulary import VocabularyHead

Inputs = Mapping[str, Tensor]
Extra = Mapping[str, Tensor]
TokenLosses = Callable[[Tensor, VocabularyHead, Inputs], Tensor | tuple[Tensor, Extra]]


@dataclass(frozen=True)
class _Work:
    """The common data of one micro-batch's blocks; inputs and weights are flattened."""

    loss: TokenLosses
    head: Head
    tokens: Tensor
    weight: Tensor
    bias: Tensor | None
    token_weights: Tensor
    inputs: Inputs
    gradients: Gradients
    extra_names: Sequence[str]

    def losses(self) -> list[Tensor]:
        """Return the losses of all tokens ``[s * b]``, then each extra value; keep the
        gradients.
        """
        count = self.tokens.shape[0]
        rows = self.head.rows(count)
        values = [self.token_weights.new_empty(count) for _ in range(1 + len(self.extra_names))]
        for start in range(0, count, rows):
            span = slice(start, min(start + rows, count))
            for whole, part in zip(values, self._block(span), strict=True):
                whole[span] = part
        return values

    def _block(self, span: slice) -> list[Tensor]:
        of_hidden, of_weight, of_bias = (
            self.gradients.hidden,
            self.gradients.weight,
            self.gradients.bias,
        )
        tokens = self.tokens[span].detach().requires_grad_(of_hidden is not None)
        weight = self.weight.detach().requires_grad_(of_weight is not None)
        bias = self.bias
        if bias is not None:
            bias = bias.detach().requires_grad_(of_bias is not None)
        leaves = [x for x in (tokens, weight, bias) if x is not None and x.requires_grad]
        inputs = {name: x if x.dim() == 0 else x[span] for name, x in self.inputs.items()}
        weights = self.token_weights[span]
        with torch.set_grad_enabled(bool(leaves)):
            found = self.loss(tokens, VocabularyHead(weight, self.head.tp_group, bias), inputs)
            losses, extra = found if isinstance(found, tuple) else (found, {})
            _check_shape(losses, weights)
            _check_extra(extra, self.extra_names, weights)
            # A token that does not count may have any loss.
            losses = torch.where(weights != 0, losses.float(), 0.0)
            total = torch.dot(weights, losses)
        if leaves:
            gradients = iter(torch.autograd.grad(total, leaves))
            if of_hidden is not None:
                of_hidden[span] = next(gradients)
            if of_weight is not None:
                of_weight.add_(next(gradients))
            if of_bias is not None:
                of_bias.add_(next(gradients))
        counts = weights != 0
        more = [torch.where(counts, extra[name].detach(), 0.0) for name in self.extra_names]
        return [losses.detach(), *more]


def _check_shape(losses: Tensor, weights: Tensor) -> None:
    if losses.shape != weights.shape:
        raise ConfigError(
            f"A token loss returned shape {tuple(losses.shape)} for a chunk of "
            f"{weights.shape[0]} tokens, but it must return one loss for each: "
            f"{tuple(weights.shape)}."
        )


def _check_extra(extra: Extra, names: Sequence[str], weights: Tensor) -> None:
    if set(extra) != set(names):
        raise ConfigError(
            f"A token loss returned the extra values {', '.join(sorted(extra)) or 'none'}, but its "
            f"`extra_names` are {', '.join(names) or 'none'}; return each of them for every chunk."
        )
    for name, value in extra.items():
        if value.shape != weights.shape:
            raise ConfigError(
                f"A token loss returned the extra value `{name}` of shape {tuple(value.shape)} for "
                f"a chunk of {weights.shape[0]} tokens, but it must give one number for each."
            )


class _BlockwiseLoss(torch.autograd.Function):
    """Losses of the tokens, outside the graph, and their weighted sum, inside it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: Tensor,
        work: Callable[..., _Work],
        takes_gradients: bool,
    ) -> tuple[Tensor, ...]:
        token_weights = flat(weights).float()
        over_largest, largest = relative(token_weights)
        wanted = tuple(takes_gradients and needed for needed in ctx.needs_input_grad[:3])
        job = work(over_largest, hidden, weight, bias, wanted)
        (losses, *extra), gradients = job.losses(), job.gradients
        if gradients.hidden is not None:
            gradients.hidden = job.head.reduce(gradients.hidden, hidden)
        ctx.gradients, ctx.largest, ctx.dtype = gradients, largest, weight.dtype
        rows = [unflat(values, weights) for values in (losses, *extra)]
        ctx.mark_non_differentiable(*rows)
        return torch.dot(token_weights, losses), *rows

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> Any:
        scale = grad_total * ctx.largest
        of_hidden, of_weight, of_bias = ctx.gradients.take(scale)
        if of_weight is not None:
            of_weight = of_weight.mul_(scale).to(ctx.dtype)
        of_bias = None if of_bias is None else of_bias.to(ctx.dtype)
        return of_hidden, of_weight, of_bias, None, None, None


def blockwise_loss(
    loss: TokenLosses,
    hidden: Tensor,
    weight: Tensor,
    weights: Tensor,
    inputs: Inputs,
    *,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    block_size: int | None = None,
    bias: Tensor | None = None,
    extra_names: Sequence[str] = (),
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return losses of the tokens and their weighted sum, for a loss of a block of C tokens.

    Args:
        loss: maps hidden states ``[C, h]``, the head and the inputs of a block to losses ``[C]``,
            or to a pair of these and a dictionary of further values ``[C]`` by name. It is called
            once for each block, with gradients enabled. On the tensor-parallel ranks the gradients
            of the hidden states are summed, so what a loss adds that does not go through the head's
            methods must be divided by their number.
        hidden: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism.
        weight: this rank's part of the head, ``[v/tp, h]``.
        weights: weights of the tokens, ``[b, s]``.
        inputs: by name, ``[b, s, ...]`` cut into ``[C, ...]``, or a scalar that every block gets.
        tp_group, sequence_parallel, block_size, bias: as in `weighted_linear_cross_entropy`.
        extra_names: names of the further values, all of which each block must give.

    Returns:
        losses ``[b, s]`` float32, outside the graph and 0 where the weight is 0; the sum of weights
        times losses, a float32 scalar inside it; and the further values, like the losses.

    Raises:
        ConfigError: losses or further values of a wrong shape or name.
        DataError: inputs or weights whose shape does not fit the hidden states.
    """
    head = Head(block_size, tp_group, sequence_parallel)
    head.check(hidden, weight, weights, bias)
    for name, value in inputs.items():
        if value.dim() > 0 and value.shape[:2] != weights.shape:
            raise DataError(
                f"The loss input `{name}` has shape {tuple(value.shape)}, but it must be a scalar "
                f"or begin with [b, s] = {tuple(weights.shape)}."
            )

    def work(
        token_weights: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> _Work:
        tokens = head.tokens(hidden)
        flattened = {
            name: x if x.dim() == 0 else x.transpose(0, 1).flatten(0, 1)
            for name, x in inputs.items()
        }
        gradients = Gradients(wanted, tokens, weight)
        return _Work(
            loss, head, tokens, weight, bias, token_weights, flattened, gradients, extra_names
        )

    total, losses, *extra = _BlockwiseLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, weights, work, torch.is_grad_enabled()
    )
    return losses, total, dict(zip(extra_names, extra, strict=True))
