"""Any per-token loss of hidden states and head weight, computed in blocks of tokens.

The loss may be any differentiable function of a block. Only one block's autograd graph exists at a
time. The forward pass computes the gradients of each block and sums the weight's gradients in
float32; the backward pass only scales the gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.losses.logit_blocks import Gradients, Head, weighted_sum
from megatron_ext.losses.vocabulary import VocabularyHead

Inputs = Mapping[str, Tensor]
Extra = Mapping[str, Tensor]
TokenLosses = Callable[[Tensor, VocabularyHead, Inputs], Tensor | tuple[Tensor, Extra]]


def _values(
    loss: TokenLosses,
    head: Head,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Inputs,
    extra_names: Sequence[str],
    tokens: Tensor,
    token_weights: Tensor,
    gradients: Gradients,
) -> list[Tensor]:
    """Return losses and extra values, each ``[s * b]``, 0 for tokens of weight 0.

    The gradients of the losses' weighted sum are stored in ``gradients``.
    """
    count = len(tokens)
    rows = head.rows(count)
    values = [token_weights.new_empty(count) for _ in range(1 + len(extra_names))]
    for start in range(0, count, rows):
        span = slice(start, min(start + rows, count))
        block = tokens[span].detach()
        weights = token_weights[span]
        block.requires_grad_(gradients.hidden is not None)
        own = weight.detach().requires_grad_(gradients.weight is not None)
        own_bias = bias
        if own_bias is not None:
            own_bias = own_bias.detach().requires_grad_(gradients.bias is not None)
        leaves = [x for x in (block, own, own_bias) if x is not None and x.requires_grad]
        with torch.set_grad_enabled(bool(leaves)):
            parts = {name: x if x.dim() == 0 else x[span] for name, x in inputs.items()}
            result = loss(block, VocabularyHead(own, head.tp_group, own_bias, head.softcap), parts)
            losses, extra = result if isinstance(result, tuple) else (result, {})
            _check_block(losses, extra, extra_names, weights)
            losses = torch.where(weights != 0, losses.float(), 0.0)
            total = torch.dot(weights, losses)
        if leaves:
            leaf_gradients = iter(torch.autograd.grad(total, leaves))
            if gradients.hidden is not None:
                gradients.hidden[span] = next(leaf_gradients)
            if gradients.weight is not None:
                gradients.add_to_weight(next(leaf_gradients))
            if gradients.bias is not None:
                gradients.bias.add_(next(leaf_gradients))
        more = (torch.where(weights != 0, extra[name].detach(), 0.0) for name in extra_names)
        for whole, part in zip(values, (losses.detach(), *more), strict=True):
            whole[span] = part
    return values


def _check_block(losses: Tensor, extra: Extra, names: Sequence[str], weights: Tensor) -> None:
    if losses.shape != weights.shape:
        raise ConfigError(
            f"A token loss returned shape {tuple(losses.shape)} for a block of "
            f"{weights.shape[0]} tokens, but it must return one loss for each: "
            f"{tuple(weights.shape)}."
        )
    if set(extra) != set(names):
        raise ConfigError(
            f"A token loss returned the extra values {', '.join(sorted(extra)) or 'none'}, but "
            f"its `extra_names` are {', '.join(names) or 'none'}; return each of them for "
            "every block."
        )
    for name, value in extra.items():
        if value.shape != weights.shape:
            raise ConfigError(
                f"A token loss returned the extra value `{name}` of shape {tuple(value.shape)} "
                f"for a block of {weights.shape[0]} tokens, but it must give one number for each."
            )


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
    softcap: float | None = None,
    extra_names: Sequence[str] = (),
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the token losses, their weighted sum and extra values, computed in blocks of C tokens.

    Args:
        loss: maps hidden states ``[C, h]``, the head and the inputs of a block to losses ``[C]``,
            or to losses and a dictionary of extra values ``[C]`` by name. It is called once for
            each block, with autograd enabled if a gradient is needed. The gradients of the hidden
            states are summed over the tensor-parallel ranks. A term of the loss that all ranks
            compute alike from the hidden states, without a method of `VocabularyHead`, would count
            once per rank: divide it by the number of these ranks.
        hidden: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism.
        weight: this rank's part of the head, ``[v/tp, h]``.
        weights: weights of the tokens, ``[b, s]``.
        inputs: further tensors for ``loss``, by name: scalars, which it gets unchanged, and
            ``[b, s, ...]``, which are cut into blocks ``[C, ...]``.
        tp_group: ranks over which the head is split; None means that this rank holds all of it.
        block_size: C; None chooses an eighth of the tokens, at most 1024.
        bias: this rank's part of the head's bias, ``[v/tp]``.
        softcap: limit of the head's logits; see `VocabularyHead`.
        extra_names: names of the extra values; the loss must return all of them for every block.

    Returns:
        losses: ``[b, s]`` float32 without gradient, 0 where the weight is 0.
        total: the sum of weights times losses, a float32 scalar with gradient.
        extra: the extra values by name, each ``[b, s]`` like the losses.

    Raises:
        ConfigError: the loss returns wrong shapes or names, an option is out of range, or the
            dtypes of hidden states, weight and bias differ.
        DataError: the shape of the weights or of an input does not fit the hidden states.
    """
    head = Head(block_size, tp_group, sequence_parallel, softcap=softcap)
    head.check(hidden, weight, weights, bias)
    for name, value in inputs.items():
        if value.dim() > 0 and value.shape[:2] != weights.shape:
            raise DataError(
                f"The loss input `{name}` has shape {tuple(value.shape)}, but it must be a scalar "
                f"or begin with [b, s] = {tuple(weights.shape)}."
            )

    flattened = {
        name: x if x.dim() == 0 else x.transpose(0, 1).flatten(0, 1) for name, x in inputs.items()
    }
    values_of = partial(_values, loss, head, weight, bias, flattened, extra_names)
    total, losses, *extra = weighted_sum(hidden, weight, bias, weights, head, values_of)
    return losses, total, dict(zip(extra_names, extra, strict=True))
