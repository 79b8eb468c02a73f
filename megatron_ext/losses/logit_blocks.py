"""The logits of a vocabulary-parallel linear head, one block of tokens at a time.

`logit_blocks` computes the logits, `exponentiate` computes losses from them, `differentiate`
overwrites them with their gradient, and `Gradients` collects the gradients of all blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_ext.config.training import default_rows, fused_rows
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.layers import compiled, onednn
from megatron_ext.layers.compiled import compiles
from megatron_ext.layers.weight_gradients import (
    adds_in_float32,
    expect_additions,
    takes_overwrite,
    writable,
)

PIECE = 2**18
"""The elements of the head's gradient that oneDNN computes at a time: few enough for the cache."""


@dataclass(frozen=True)
class Head:
    """Options of an output head's loss, and how the head is split over the ranks.

    All fields are arguments of `weighted_linear_cross_entropy` and explained there. Two have other
    names: ``z_loss`` is ``z_loss_coefficient``, and ``main_grad`` is
    ``gradient_accumulation_fusion``.
    """

    block_size: int | None
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    main_grad: bool = False
    softcap: float | None = None

    def __post_init__(self) -> None:
        size = 1 if self.block_size is None else self.block_size
        for name, value, rule, fits in (
            ("block_size", size, "at least 1 token", size >= 1),
            ("label_smoothing", self.label_smoothing, "in [0, 1)", 0 <= self.label_smoothing < 1),
            ("z_loss_coefficient", self.z_loss, "0 or more", self.z_loss >= 0),
            ("softcap", self.softcap, "above 0", self.softcap is None or self.softcap > 0),
        ):
            if not fits:
                raise ConfigError(
                    f"`{name}` ({value}) must be {rule}; leave it out to get the default."
                )

    @property
    def tp_size(self) -> int:
        return 1 if self.tp_group is None else self.tp_group.size()

    @property
    def tp_rank(self) -> int:
        return 0 if self.tp_group is None else self.tp_group.rank()

    def rows(self, num_tokens: int, hidden_size: int | None = None) -> int:
        """Return the number of tokens in a block: `block_size`, or a default if that is None.

        It is at most ``num_tokens``, the number of all tokens. Without ``hidden_size`` the default
        is the one for float32 logits (`default_rows`); with it, the one for 16-bit logits
        (`fused_rows`).
        """
        usual = fused_rows(num_tokens, hidden_size) if hidden_size else default_rows(num_tokens)
        return max(1, min(self.block_size or usual, num_tokens))

    def check(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
    ) -> None:
        """Raise an error if dtypes (ConfigError) or shapes (DataError) do not fit together.

        A bias that does not fit the weight is a ConfigError in any case.
        """
        if hidden.dtype != weight.dtype:
            raise ConfigError(
                f"The hidden states are {hidden.dtype} and the head weight is {weight.dtype}, but "
                "both must have one type; cast one of them."
            )
        if bias is not None and (bias.dtype, bias.shape) != (weight.dtype, weight.shape[:1]):
            raise ConfigError(
                f"The head bias is {bias.dtype} of shape {tuple(bias.shape)}, but it must be "
                f"{weight.dtype} of shape {tuple(weight.shape[:1])}, this rank's part of the "
                "vocabulary."
            )
        s, b, _ = hidden.shape
        expected = (b, s * self.tp_size if self.sequence_parallel else s)
        if tuple(labels.shape) != expected:
            raise DataError(
                f"The labels have shape {tuple(labels.shape)}, but hidden states of shape "
                f"{tuple(hidden.shape)} at tensor-parallel size {self.tp_size} with "
                f"sequence_parallel={self.sequence_parallel} need [b, s] = {expected}; pass the "
                "labels of the whole sequence."
            )

    def tokens(self, hidden: Tensor) -> Tensor:
        """Return hidden states as ``[s * b, h]``, gathered along the sequence if it is split."""
        if self.sequence_parallel and self.tp_size > 1:
            hidden = mappings._gather_along_first_dim(hidden, self.tp_group)
        return hidden.reshape(-1, hidden.shape[-1])

    def reduce(self, gradient: Tensor, like: Tensor) -> Tensor:
        """Sum a gradient ``[s * b, h]`` over ``tp_group``; return it in the shape of ``like``.

        Under sequence parallelism that is this rank's part of the sequence.
        """
        gradient = gradient.view(-1, *like.shape[1:])
        if self.sequence_parallel and self.tp_size > 1:
            gradient = mappings._reduce_scatter_along_first_dim(gradient, self.tp_group)
        else:
            self.all_reduce(gradient, ReduceOp.SUM)
        return gradient

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        if self.tp_size > 1:
            torch.distributed.all_reduce(tensor, op=op, group=self.tp_group)


@dataclass(frozen=True)
class Block:
    """The logits of C tokens, and the positions of their labels.

    Attributes:
        span: range of the tokens in the flattened ``[s * b]``.
        hidden: hidden states ``[C, h]``.
        logits: ``[C, v/tp]``, float32, or in the dtype of the hidden states if ``fused``. The
            functions of this module overwrite them, and so does the next block.
        column: ``[C, 1]`` column of each token's label, 0 if another rank owns it.
        owned: ``[C, 1]`` float32, 1 if this rank owns the label and the token counts.
        valid: ``[C]`` float32, 0 if the label is ``ignore_index``, else 1.
        fused: whether the compiled functions of `softmax_kernels` compute statistics and gradient.
        slope: derivative ``[C, v/tp]`` float32 of the capped logits with respect to the uncapped
            ones. None if there is no cap, or if ``fused``: the compiled gradient computes the
            derivative itself, since the capped logits are still there.
    """

    span: slice
    hidden: Tensor
    logits: Tensor
    column: Tensor
    owned: Tensor
    valid: Tensor
    fused: bool = False
    slope: Tensor | None = None


def logit_blocks(
    head: Head, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
) -> Iterator[Block]:
    """Yield the logits of hidden states ``[s * b, h]`` block by block.

    A block's logits are valid only until the next block, which overwrites them.
    """
    labels = flat(labels)
    num_tokens = hidden.shape[0]
    vocabulary = weight.shape[0]
    fused = (hidden.is_cuda or compiled.compiler.on_cpu) and compiles(hidden)
    rows = head.rows(num_tokens, hidden.shape[1] if fused else None)
    kind = hidden.dtype if fused else torch.float32
    by_onednn = onednn.takes(weight.numel(), weight.dtype, weight.device.type)
    buffer = hidden.new_empty((0 if by_onednn else rows, vocabulary), dtype=kind)
    column = labels - head.tp_rank * vocabulary
    valid = labels != head.ignore_index
    owned = (column >= 0) & (column < vocabulary) & valid
    column = (column * owned).unsqueeze(1)
    for start in range(0, num_tokens, rows):
        span = slice(start, min(start + rows, num_tokens))
        part = hidden[span]
        logits = buffer[: part.shape[0]]
        if part.dtype != kind:
            logits.copy_(torch.mm(part, weight.t()))
            if bias is not None:
                logits.add_(bias)
        elif by_onednn:
            logits = onednn.multiply(part, weight, B=bias)
        elif bias is None:
            torch.mm(part, weight.t(), out=logits)
        else:
            torch.addmm(bias, part, weight.t(), out=logits)
        mine = owned[span].unsqueeze(1).float()
        slope = None
        if head.softcap is not None and fused:
            from megatron_ext.losses.softmax_kernels import limit_

            limit_(logits, head.softcap)
        elif head.softcap is not None:
            shares = logits.div_(head.softcap).tanh_()
            slope = 1 - shares.square()
            logits.mul_(head.softcap)
        yield Block(span, part, logits, column[span], mine, valid[span].float(), fused, slope)
        if by_onednn:
            # The next block's logits are another tensor.
            logits.untyped_storage().resize_(0)


def exponentiate(head: Head, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, log-sum-exp and sum of exp(z - max z) of C tokens with logits z.

    Each is ``[C]`` float32, over the whole vocabulary, which takes two collectives. Unless the
    block is fused, exp(z - max z) overwrites the logits.
    """
    smoothing = head.label_smoothing
    highest, sums = (_fused_sums if block.fused else _sums)(head, block)
    head.all_reduce(sums, ReduceOp.SUM)
    logarithm = sums[-1].log()
    lse = logarithm + highest
    losses = logarithm - (1 - smoothing) * sums[0]
    if smoothing:
        losses -= smoothing / (block.logits.shape[1] * head.tp_size) * sums[1]
    if head.z_loss:
        losses += head.z_loss * lse.square()
    return losses * block.valid, lse, sums[-1]


def _sums(head: Head, block: Block) -> tuple[Tensor, Tensor]:
    """Return each token's highest logit over all ranks, ``[C]``, and sums over this rank's logits.

    The highest logit is subtracted from all logits first. The sums are the rows of ``[2, C]``: the
    label's logit (0 if another rank owns the label), and the sum of the exponentials. With label
    smoothing, ``[3, C]``, the second of three rows is the sum of all logits. The exponentials
    overwrite the logits.
    """
    logits = block.logits
    highest = logits.amax(dim=1, keepdim=True)
    head.all_reduce(highest, ReduceOp.MAX)
    target = (logits.gather(1, block.column) - highest) * block.owned
    logits.sub_(highest)
    parts = [target.squeeze(1)]
    if head.label_smoothing:
        parts.append(logits.sum(dim=1))
    parts.append(logits.exp_().sum(dim=1))
    return highest.squeeze(1), torch.stack(parts)


def _fused_sums(head: Head, block: Block) -> tuple[Tensor, Tensor]:
    """Return the same as `_sums`, computed by compiled code that does not overwrite the logits."""
    from megatron_ext.losses.softmax_kernels import statistics

    smooths = head.label_smoothing > 0
    block_statistics = statistics(block.logits, block.column, smooths)
    highest = block_statistics.highest.clone()
    head.all_reduce(highest, ReduceOp.MAX)
    parts = [(block_statistics.at_label - highest) * block.owned]
    if smooths:
        parts.append(block_statistics.plain - block.logits.shape[1] * highest)
    parts.append(block_statistics.total * (block_statistics.highest - highest).exp())
    return highest.squeeze(1), torch.stack([part.squeeze(1) for part in parts])


def differentiate(head: Head, block: Block, incoming: Tensor, lse: Tensor, total: Tensor) -> None:
    """Overwrite a block's logits with their gradient; call `exponentiate` on the block before.

    ``incoming`` is the factor of each token's loss in the sum to differentiate. ``lse`` and
    ``total`` are the log-sum-exp and the sum that `exponentiate` returned. All are ``[C]`` float32.
    """
    logits = block.logits
    smoothing = head.label_smoothing
    incoming = (incoming * block.valid).unsqueeze(1)
    lse = lse.unsqueeze(1)
    scale = incoming * (1 + 2 * head.z_loss * lse)
    at_label = (smoothing - 1) * incoming * block.owned
    everywhere = -smoothing / (logits.shape[1] * head.tp_size) * incoming
    if block.fused:
        from megatron_ext.losses.softmax_kernels import to_gradient_

        to_gradient_(logits, block.column, lse, scale, at_label, everywhere, head.softcap)
        return
    logits.mul_(scale / total.unsqueeze(1))
    logits.scatter_add_(1, block.column, at_label)
    if smoothing:
        logits.add_(everywhere)
    if block.slope is not None:
        logits.mul_(block.slope)


class Gradients:
    """Collects gradients block by block: of hidden states ``[s * b, h]``, and of weight and bias.

    Those of weight and bias are float32 sums over the blocks; those of the hidden states have the
    dtype of the hidden states. ``needs_gradient`` says for hidden states, weight and bias, in this
    order, whether there is a gradient; the others are None.
    """

    def __init__(self, needs_gradient: tuple[bool, ...], tokens: Tensor, weight: Tensor) -> None:
        self.wanted = any(needs_gradient)
        self.hidden = torch.empty_like(tokens) if needs_gradient[0] else None
        self._adds = adds_in_float32(tokens.device, tokens.dtype)
        self._by_onednn = onednn.takes(weight.numel(), weight.dtype, weight.device.type)
        # The first block overwrites this memory, so it need not be zeroed.
        self._is_empty = True
        self.weight = torch.empty_like(weight, dtype=torch.float32) if needs_gradient[1] else None
        self.bias: Tensor | None = None
        if needs_gradient[2]:
            self.bias = weight.new_zeros(weight.shape[0], dtype=torch.float32)
        self._taken = False

    def take(self, scale: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias, and forget them.

        ``scale`` multiplies the gradients of hidden states and bias, but not the weight's: the
        caller must multiply this large tensor, which it can do while adding or casting it.

        Raises:
            RuntimeError: on a second call.
        """
        if self._taken:
            raise RuntimeError(
                "The gradients of this loss were scaled in place by a first backward pass; compute "
                "the loss again for a second one."
            )
        assert self.weight is None or not self._is_empty, "no block has written the gradient"
        self._taken = True
        hidden = self.hidden
        weight = self.weight
        bias = self.bias
        self.hidden = self.weight = self.bias = None
        if bias is not None:
            bias.mul_(scale)
        return None if hidden is None else hidden.mul_(scale), weight, bias

    def add_to_weight(self, gradient: Tensor) -> None:
        """Add the gradient ``[v/tp, h]`` of one block to the weight's gradient."""
        assert self.weight is not None
        is_empty = self._is_empty
        self._is_empty = False
        self.weight.copy_(gradient) if is_empty else self.weight.add_(gradient)

    def add(self, block: Block, weight: Tensor) -> None:
        """Add the gradients of a block whose logits `differentiate` has overwritten."""
        tokens = block.hidden
        total = self.weight
        gradient = _cast(block.logits, tokens.dtype)
        if self.hidden is not None and self._by_onednn:
            self.hidden[block.span] = onednn.multiply(gradient, weight.t())
        elif self.hidden is not None:
            torch.mm(gradient, weight, out=self.hidden[block.span])
        if self.bias is not None:
            self.bias.add_(block.logits.sum(dim=0, dtype=torch.float32))
        if total is None:
            return
        is_empty, self._is_empty = self._is_empty, False
        beta = 0 if is_empty else 1
        if self._by_onednn:
            size = max(1, PIECE // tokens.shape[1])
            for start in range(0, len(total), size):
                piece = total[start : start + size]
                product = onednn.multiply(gradient[:, start : start + size].t(), tokens.t())
                piece.copy_(product) if is_empty else piece.add_(product)
        elif self._adds:
            torch.addmm(total, gradient.t(), tokens, out_dtype=total.dtype, beta=beta, out=total)
        else:
            logits = _cast(block.logits.t(), total.dtype)
            total.addmm_(logits, _cast(tokens, total.dtype), beta=beta)


def _cast(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Return a tensor in another dtype; return the tensor itself if it has that dtype."""
    return tensor if tensor.dtype == kind else tensor.to(kind)


def _scaled_to(kind: torch.dtype, tensor: Tensor, scale: Tensor) -> Tensor:
    """Return ``tensor * scale`` in the dtype ``kind``; ``tensor`` itself may be overwritten."""
    if tensor.is_cuda and tensor.dtype != kind:
        # One kernel multiplies and casts.
        return torch.mul(tensor, scale, out=tensor.new_empty(tensor.shape, dtype=kind))
    return tensor.mul_(scale).to(kind)


def flat(tensor: Tensor) -> Tensor:
    """Flatten ``[b, s]`` to ``[s * b]``, the order of tokens in flattened hidden states."""
    return tensor.t().reshape(-1)


ValuesOf = Callable[[Tensor, Tensor, Gradients], Sequence[Tensor]]
"""Computes losses ``[s * b]`` from all hidden states ``[s * b, h]`` and token weights ``[s * b]``.

It fills the given `Gradients`. Extra values ``[s * b]`` may follow the losses in the result.
"""


class _WeightedSum(torch.autograd.Function):
    """Weighted sum of the token losses; its forward pass already computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: Tensor,
        head: Head,
        values_of: ValuesOf,
        takes_gradients: bool,
    ) -> tuple[Tensor, ...]:
        token_weights = flat(weights).float()
        tokens = head.tokens(hidden)
        # Weights such as 1 / (tokens of the global batch) would make float16 gradients underflow.
        largest = token_weights.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        needs_gradient = tuple(takes_gradients and needed for needed in ctx.needs_input_grad[:3])
        gradients = Gradients(needs_gradient, tokens, weight)
        losses, *extra = values_of(tokens, token_weights / largest, gradients)
        if gradients.hidden is not None:
            gradients.hidden = head.reduce(gradients.hidden, hidden)
        ctx.gradients = gradients
        ctx.largest = largest
        ctx.weight_dtype = weight.dtype
        # Saved tensors lose their Python attributes.
        adds = head.main_grad and hasattr(weight, "main_grad")
        ctx.main_grad = getattr(weight, "main_grad", None) if adds else None
        ctx.parameter = weight if adds else None
        if adds and needs_gradient[1]:
            expect_additions(weight)
        b, s = weights.shape
        rows = [values.view(s, b).t().contiguous() for values in (losses, *extra)]
        ctx.mark_non_differentiable(*rows)
        return torch.dot(token_weights, losses), *rows

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> Any:
        scale = grad_total * ctx.largest
        hidden_gradient, weight_gradient, bias_gradient = ctx.gradients.take(scale)
        bias_gradient = None if bias_gradient is None else _cast(bias_gradient, ctx.weight_dtype)
        if weight_gradient is not None and ctx.parameter is not None:
            total = writable(ctx.main_grad)
            if takes_overwrite(ctx.parameter):
                torch.mul(weight_gradient, scale, out=total)
            else:
                total.addcmul_(weight_gradient, scale)
            weight_gradient = None
        elif weight_gradient is not None:
            weight_gradient = _scaled_to(ctx.weight_dtype, weight_gradient, scale)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None, None


def weighted_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    head: Head,
    values_of: ValuesOf,
) -> tuple[Tensor, ...]:
    """Return the sum of losses times ``weights``, then losses and extra values, each ``[b, s]``.

    ``values_of`` computes losses, extra values and gradients in the forward pass (see `ValuesOf`).
    Only the sum is differentiable.
    """
    result: tuple[Tensor, ...] = _WeightedSum.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, weights, head, values_of, torch.is_grad_enabled()
    )
    return result
