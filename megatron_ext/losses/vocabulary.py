"""Arithmetic over a vocabulary that is cut over the tensor-parallel ranks, for a block of C tokens.

`VocabularyHead` holds the pieces that a user's own loss is made of, all differentiable. Values per
token ``[C]`` are the same on every tensor-parallel rank, values per entry ``[C, v/tp]`` are this
rank's part; `sum` and `at` lead from parts to shared values, `spread` leads back.

`statistics` and `to_gradient_` are the pointwise part of a block's cross-entropy on a GPU, one
compiled kernel each. They keep the logits in the 16 bits of the product and compute in float32
registers what `logit_blocks` computes in a float32 copy; the gradient takes the logits' place.
Bytes that pass through memory, for N logits of 16 bits (N = tokens x v / tp), the products' own
reads and writes left out:

    statistics     2 N      maximum and sum of exponentials in one reading, where the compiler has
                            its online softmax (torch 2.8); in two before
    to_gradient_   4 N
    eager         48 N      a float32 copy (2 + 4); log-softmax, which reads long rows three times,
                            and its backward pass, which reads both of its inputs twice (16 + 20);
                            zeros for the gradient of the log-probabilities (4); and back (2)

At 32,768 x 151,936 logits that is 30 GB against 240 GB, 7 ms against 55 ms at 4.3 TB/s, added to
155 ms for the three products of 2 x 32,768 x 4096 x 151,936 operations at 790 TFLOP/s.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_ext.layers.compiled import compiled


@dataclass(frozen=True)
class VocabularyHead:
    """This rank's part ``[v/tp, h]`` of the output head, from token ``rank * v/tp`` on.

    Without a group the rank holds all. The bias is ``[v/tp]``, in the weight's type, or None.
    """

    weight: Tensor
    tp_group: ProcessGroup | None
    bias: Tensor | None = None

    @property
    def first(self) -> int:
        """Return the first token of this rank's part."""
        return 0 if self.tp_group is None else self.tp_group.rank() * self.weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """Return the number of entries of all parts, padding included."""
        parts = 1 if self.tp_group is None else self.tp_group.size()
        return parts * self.weight.shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits ``[C, v/tp]`` float32 of ``[C, h]``."""
        logits = torch.mm(hidden, self.weight.t()).float()
        return logits if self.bias is None else logits + self.bias

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the vocabulary: ``[C, v/tp]`` to ``[C]``."""
        return self._over_parts(values.sum(dim=1))

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return the logarithm of the sum of exponentials: ``[C, v/tp]`` to ``[C]``."""
        highest = logits.detach().amax(dim=1, keepdim=True)
        if self._is_cut:
            torch.distributed.all_reduce(highest, op=ReduceOp.MAX, group=self.tp_group)
        return self.sum((logits - highest).exp()).log() + highest.squeeze(1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return this rank's log-probabilities ``[C, v/tp]``."""
        return logits - self.spread(self.logsumexp(logits)).unsqueeze(1)

    def spread(self, values: Tensor) -> Tensor:
        """Return values that all ranks share, to combine with this rank's part of the vocabulary.

        Their gradient is then summed over the parts; what stays shared must not be spread.
        """
        if not self._is_cut:
            return values
        return copy_to_tensor_model_parallel_region(values, group=self.tp_group)  # type: ignore[no-any-return]

    def at(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return the values of given tokens, in the shape of the ids ``[C]`` or ``[C, k]``.

        The values are ``[C, v/tp]``. An id outside of the vocabulary, as an ignored label, gives 0.
        """
        column = ids.reshape(ids.shape[0], -1) - self.first
        owned = (column >= 0) & (column < values.shape[1])
        picked = values.gather(1, column * owned).masked_fill(~owned, 0.0)
        return self._over_parts(picked).view(ids.shape)

    def log_prob(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return log-probabilities of given tokens, shaped like ``ids``: ``[C]`` or ``[C, k]``."""
        total = self.logsumexp(logits)
        return self.at(logits, ids) - (total if ids.dim() == 1 else total.unsqueeze(1))

    @property
    def _is_cut(self) -> bool:
        return self.tp_group is not None and self.tp_group.size() > 1

    def _over_parts(self, partial: Tensor) -> Tensor:
        """Sum over the ranks; the gradient of the sum is the gradient of each part."""
        if not self._is_cut:
            return partial
        partial = partial.contiguous()
        return reduce_from_tensor_model_parallel_region(partial, group=self.tp_group)  # type: ignore[no-any-return]


class Statistics(NamedTuple):
    """Sums over this rank's logits ``[C, v/tp]``, each ``[C, 1]`` float32."""

    highest: Tensor
    at_label: Tensor
    total: Tensor
    """Sum of the exponentials after the highest logit is subtracted."""
    plain: Tensor
    """Sum of the logits; zeros where it is not asked for."""


@compiled
def statistics(logits: Tensor, column: Tensor, sums_plain: bool) -> Statistics:
    """Return the sums over the logits ``[C, v/tp]`` from which the loss is computed.

    ``column`` is the column of each token's label, ``[C, 1]`` int64; smoothing needs the plain sum.
    """
    exact = logits.float()
    highest = exact.amax(dim=1, keepdim=True)
    # The compiler knows the two as an online softmax by this form, the kept dimension included.
    total = (exact - highest).exp().sum(dim=1, keepdim=True)
    at_label = logits.gather(1, column).float()
    plain = exact.sum(dim=1, keepdim=True) if sums_plain else torch.zeros_like(total)
    return Statistics(highest, at_label, total, plain)


@compiled
def to_gradient_(
    logits: Tensor, column: Tensor, lse: Tensor, scale: Tensor, at_label: Tensor, everywhere: Tensor
) -> None:
    """Put ``scale * exp(logits - lse) + at_label * onehot + everywhere`` in the logits' place.

    The logits are ``[C, v/tp]``, the others ``[C, 1]``, ``column`` int64 and the rest float32.
    """
    here = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0) == column
    gradient = scale * (logits.float() - lse).exp() + everywhere
    logits.copy_(torch.where(here, gradient + at_label, gradient))


MAX_ROWS = 1024
MIN_FUSED_ROWS = 4096


def default_rows(num_tokens: int) -> int:
    """Return an eighth of the tokens: far below eager's memory, enough for fast products."""
    return min(-(-num_tokens // 8), MAX_ROWS)


def fused_rows(num_tokens: int, hidden_size: int) -> int:
    """Return the tokens of a block on a GPU, where its logits stay in 16 bits.

    The weight's gradient of a block, 2 C h v operations, reads and writes 8 h v bytes: C / 4
    operations for a byte, of which an H200 does 200 in the time of one. At C = 2 h the logits of a
    block take no more memory than that float32 gradient.
    """
    return min(-(-num_tokens // 4), max(2 * hidden_size, MIN_FUSED_ROWS))
