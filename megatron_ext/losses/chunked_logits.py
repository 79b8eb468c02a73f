"""Logits of a vocabulary-parallel linear head, chunk by chunk; see `linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    _reduce_scatter_along_first_dim,
)
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.layers.compiled import compiles
from megatron_ext.losses.vocabulary import default_rows, fused_rows, statistics, to_gradient_


@dataclass(frozen=True)
class Head:
    """A head but for its weight, and how its tensors lie on the tensor-parallel ranks."""

    chunk_size: int | None
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    main_grad: bool = False

    def __post_init__(self) -> None:
        size = 1 if self.chunk_size is None else self.chunk_size
        for name, value, rule, fits in (
            ("chunk_size", size, "at least 1 token", size >= 1),
            ("label_smoothing", self.label_smoothing, "in [0, 1)", 0 <= self.label_smoothing < 1),
            ("z_loss_coefficient", self.z_loss, "0 or more", self.z_loss >= 0),
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

    def rows(self, num_tokens: int) -> int:
        """Tokens of a chunk."""
        return max(1, min(self.chunk_size or default_rows(num_tokens), num_tokens))

    def fused_rows(self, num_tokens: int, hidden_size: int) -> int:
        """Tokens of a chunk that `fused_softmax` computes."""
        return max(1, min(self.chunk_size or fused_rows(num_tokens, hidden_size), num_tokens))

    def check(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
    ) -> None:
        """Refuse tensors that do not fit each other; looks at shapes and types only."""
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
        wanted = (b, s * self.tp_size if self.sequence_parallel else s)
        if tuple(labels.shape) != wanted:
            raise DataError(
                f"The labels have shape {tuple(labels.shape)}, but hidden states of shape "
                f"{tuple(hidden.shape)} at tensor-parallel size {self.tp_size} with "
                f"sequence_parallel={self.sequence_parallel} need [b, s] = {wanted}; pass the "
                "labels of the whole sequence."
            )

    def tokens(self, hidden: Tensor) -> Tensor:
        """All tokens of the hidden states, ``[s * b, h]``; gathered under sequence parallelism."""
        if self.sequence_parallel and self.tp_size > 1:
            hidden = _gather_along_first_dim(hidden, self.tp_group)
        return hidden.reshape(-1, hidden.shape[-1])

    def reduce(self, gradient: Tensor, like: Tensor) -> Tensor:
        """Sum a gradient ``[s * b, h]`` over the parts of the vocabulary, in ``like``'s shape."""
        gradient = gradient.view(-1, *like.shape[1:])
        if self.sequence_parallel and self.tp_size > 1:
            gradient = _reduce_scatter_along_first_dim(gradient, self.tp_group)
        else:
            self.all_reduce(gradient, ReduceOp.SUM)
        return gradient

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        if self.tp_size > 1:
            torch.distributed.all_reduce(tensor, op=op, group=self.tp_group)


@dataclass(frozen=True)
class Chunk:
    """The logits of some tokens, and where their labels are.

    Attributes:
        span: the tokens' place among all, flattened.
        hidden: ``[C, h]``.
        logits: ``[C, v/tp]`` float32, or as the product gives them where ``fused``; overwritten by
            what is computed from them and by the next chunk.
        column: ``[C, 1]`` column of each token's label, 0 where this rank does not own it.
        owned: ``[C, 1]`` float32, 1 where this rank owns the label of a token that counts.
        valid: ``[C]`` float32, 0 at ``ignore_index``.
        fused: `fused_softmax` reads the logits and makes their gradient.
    """

    span: slice
    hidden: Tensor
    logits: Tensor
    column: Tensor
    owned: Tensor
    valid: Tensor
    fused: bool = False


def chunks(
    head: Head, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
) -> Iterator[Chunk]:
    """Compute the logits of ``[s * b, h]`` with labels ``[b, s]`` chunk by chunk, in one buffer."""
    labels, num_tokens, vocabulary = flat(labels), hidden.shape[0], weight.shape[0]
    fused = compiles(hidden)
    rows = head.fused_rows(*hidden.shape) if fused else head.rows(num_tokens)
    kind = hidden.dtype if fused else torch.float32
    buffer = hidden.new_empty((rows, vocabulary), dtype=kind)
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
        elif bias is None:
            torch.mm(part, weight.t(), out=logits)
        else:
            torch.addmm(bias, part, weight.t(), out=logits)
        mine = owned[span].unsqueeze(1).float()
        yield Chunk(span, part, logits, column[span], mine, valid[span].float(), fused)


def exponentiate(head: Head, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of a chunk, whose logits become exp(z - max z) unless fused; two collectives.

    Returns:
        losses, log-sum-exp and sum of exponentials, each ``[C]`` float32.
    """
    smoothing = head.label_smoothing
    highest, sums = (_fused_sums if chunk.fused else _sums)(head, chunk)
    head.all_reduce(sums, ReduceOp.SUM)
    logarithm = sums[-1].log()
    lse = logarithm + highest
    losses = logarithm - (1 - smoothing) * sums[0]
    if smoothing:
        losses -= smoothing / (chunk.logits.shape[1] * head.tp_size) * sums[1]
    if head.z_loss:
        losses += head.z_loss * lse.square()
    return losses * chunk.valid, lse, sums[-1]


def _sums(head: Head, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """The highest logit ``[C]`` of all parts; this part's sums of what is left without it.

    Those are ``[2 or 3, C]``: of the label, with smoothing of all logits, of the exponentials.
    """
    logits = chunk.logits
    highest = logits.amax(dim=1, keepdim=True)
    head.all_reduce(highest, ReduceOp.MAX)
    target = (logits.gather(1, chunk.column) - highest) * chunk.owned
    logits.sub_(highest)
    parts = [target.squeeze(1)]
    if head.label_smoothing:
        parts.append(logits.sum(dim=1))
    parts.append(logits.exp_().sum(dim=1))
    return highest.squeeze(1), torch.stack(parts)


def _fused_sums(head: Head, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """As `_sums`; the logits stay what they are."""
    smooths = head.label_smoothing > 0
    found = statistics(chunk.logits, chunk.column, smooths)
    highest = found.highest.clone()
    head.all_reduce(highest, ReduceOp.MAX)
    parts = [(found.at_label - highest) * chunk.owned]
    if smooths:
        parts.append(found.plain - chunk.logits.shape[1] * highest)
    parts.append(found.total * (found.highest - highest).exp())
    return highest.squeeze(1), torch.stack([part.squeeze(1) for part in parts])


def recall(chunk: Chunk, lse: Tensor) -> None:
    """Turn logits that were computed again into exp(z - lse), unless fused; ``[C]`` float32."""
    if not chunk.fused:
        chunk.logits.sub_(lse.unsqueeze(1)).exp_()


def differentiate(
    head: Head, chunk: Chunk, incoming: Tensor, lse: Tensor, total: Tensor | None = None
) -> None:
    """Turn exponentials, or fused logits, into the gradient of the logits, in place.

    Args:
        incoming: gradient of each token's loss, ``[C]`` float32.
        lse: ``[C]``.
        total: sum of the exponentials ``[C]``; None where they are those of z - lse.
    """
    logits, smoothing = chunk.logits, head.label_smoothing
    incoming = incoming * chunk.valid
    scale = incoming * (1 + 2 * head.z_loss * lse)
    if chunk.fused:
        at_label = (smoothing - 1) * incoming * chunk.owned.squeeze(1)
        everywhere = -smoothing / (logits.shape[1] * head.tp_size) * incoming
        rows = (x.unsqueeze(1) for x in (lse, scale, at_label, everywhere))
        to_gradient_(logits, chunk.column, *rows)
        return
    logits.mul_((scale if total is None else scale / total).unsqueeze(1))
    at_label = (smoothing - 1) * incoming.unsqueeze(1) * chunk.owned
    logits.scatter_add_(1, chunk.column, at_label)
    if smoothing:
        vocabulary = logits.shape[1] * head.tp_size
        logits.sub_((smoothing / vocabulary * incoming).unsqueeze(1))


@cache
def adds_in_float32(device: torch.device, kind: torch.dtype) -> bool:
    """Whether products of 16-bit matrices can be added to a float32 one: on GPUs, from torch 2.8.

    Tried once, since releases differ in the types that they take. Rounding each chunk's product to
    16 bits instead would cost a quarter more error than whole logits have.
    """
    missing = not hasattr(torch.ops.aten.addmm, "dtype_out")
    if missing or device.type != "cuda" or kind == torch.float32:
        return False
    total = torch.zeros(16, 16, device=device)
    factor = torch.ones(16, 16, device=device, dtype=kind)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


class Gradients:
    """Gradients of the tokens ``[s * b, h]``, in their type, and of weight and bias, in float32.

    Each is None where it is not wanted. The weight's goes straight into ``main`` where it can.
    """

    def __init__(
        self, wanted: tuple[bool, ...], tokens: Tensor, weight: Tensor, main: Tensor | None = None
    ) -> None:
        self.hidden = torch.empty_like(tokens) if wanted[0] else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if wanted[2]:
            self.bias = weight.new_zeros(weight.shape[0], dtype=torch.float32)
        self._taken = False
        self._adds = adds_in_float32(tokens.device, tokens.dtype)
        direct = main is not None and main.dtype == torch.float32
        # What the first chunk gives need not be added to zeros, which then are not read.
        self._is_zero = not direct
        if wanted[1]:
            self.weight = main if direct else torch.zeros_like(weight, dtype=torch.float32)

    def take(self, scale: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Give the gradients, once only; those of tokens and bias scaled in place.

        Raises:
            RuntimeError: a second backward pass.
        """
        if self._taken:
            raise RuntimeError(
                "The gradients of this loss were scaled in place by a first backward pass; compute "
                "the loss again for a second one."
            )
        self._taken = True
        hidden, weight, bias = self.hidden, self.weight, self.bias
        self.hidden = self.weight = self.bias = None
        if bias is not None:
            bias.mul_(scale)
        return None if hidden is None else hidden.mul_(scale), weight, bias

    def add(self, chunk: Chunk, weight: Tensor) -> None:
        """Add what a chunk, whose logits now are their gradient, gives."""
        tokens, total = chunk.hidden, self.weight
        gradient = chunk.logits.to(tokens.dtype)
        if self.hidden is not None:
            torch.mm(gradient, weight, out=self.hidden[chunk.span])
        if self.bias is not None:
            self.bias.add_(chunk.logits.sum(dim=0, dtype=torch.float32))
        if total is None:
            return
        if self._adds:
            beta, self._is_zero = 0 if self._is_zero else 1, False
            torch.addmm(total, gradient.t(), tokens, out_dtype=total.dtype, beta=beta, out=total)
        else:
            total.addmm_(chunk.logits.t().to(total.dtype), tokens.to(total.dtype))


def scaled_to(kind: torch.dtype, tensor: Tensor, scale: Tensor) -> Tensor:
    """A tensor times a scalar in another type; its own memory may be used."""
    if tensor.is_cuda and tensor.dtype != kind:
        # In one kernel, which casts what it writes.
        return torch.mul(tensor, scale, out=tensor.new_empty(tensor.shape, dtype=kind))
    return tensor.mul_(scale).to(kind)


def relative(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights over the largest of them, and that, float32.

    Weights such as 1 / (tokens of the global batch) would make float16 gradients vanish.
    """
    largest = weights.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    return weights / largest, largest


def flat(tensor: Tensor) -> Tensor:
    """``[b, s]`` in the order of the hidden states' tokens, ``[s * b]``."""
    return tensor.t().reshape(-1)


def unflat(tensor: Tensor, labels: Tensor) -> Tensor:
    """``[s * b]`` in the order of the labels, ``[b, s]``."""
    return tensor.view(labels.shape[1], labels.shape[0]).t().contiguous()
