"""Logits of a chunk of tokens over a vocabulary that is cut over the tensor-parallel ranks.

The pieces that a loss of the user's own is made of, all differentiable. Values per token ``[C]``
are the same on every tensor-parallel rank, values per entry ``[C, v/tp]`` are this rank's part;
`sum` and `at` lead from parts to shared values, `spread` leads back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp


@dataclass(frozen=True)
class VocabularyHead:
    """This rank's part of the output head.

    Attributes:
        weight: ``[v/tp, h]``; part r starts at token ``r * v/tp``.
        tp_group: the ranks that hold the other parts; None means that this rank holds all.
        bias: ``[v/tp]``, in the weight's type; None where the head has none.
    """

    weight: Tensor
    tp_group: ProcessGroup | None
    bias: Tensor | None = None

    @property
    def first(self) -> int:
        """The first token of this rank's part."""
        return 0 if self.tp_group is None else self.tp_group.rank() * self.weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """Of all parts, padding included."""
        parts = 1 if self.tp_group is None else self.tp_group.size()
        return parts * self.weight.shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits ``[C, v/tp]`` float32 of ``[C, h]``."""
        logits = torch.mm(hidden, self.weight.t()).float()
        return logits if self.bias is None else logits + self.bias

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the vocabulary: ``[C, v/tp]`` to ``[C]``."""
        return self._over_parts(values.sum(dim=1))

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Logarithm of the sum of exponentials over the vocabulary: ``[C, v/tp]`` to ``[C]``."""
        highest = logits.detach().amax(dim=1, keepdim=True)
        if self._is_cut:
            torch.distributed.all_reduce(highest, op=ReduceOp.MAX, group=self.tp_group)
        return self.sum((logits - highest).exp()).log() + highest.squeeze(1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """This rank's log-probabilities ``[C, v/tp]``."""
        return logits - self.spread(self.logsumexp(logits)).unsqueeze(1)

    def spread(self, values: Tensor) -> Tensor:
        """Values that all ranks share, for use beside this rank's part of the vocabulary.

        Their gradient is then summed over the parts; what stays shared must not be spread.
        """
        if not self._is_cut:
            return values
        spread: Tensor = copy_to_tensor_model_parallel_region(values, group=self.tp_group)
        return spread

    def at(self, values: Tensor, ids: Tensor) -> Tensor:
        """Values of given tokens: ``[C, v/tp]`` and ids ``[C]`` or ``[C, k]`` to the ids' shape.

        An id outside of the vocabulary, such as an ignored label, gives 0.
        """
        column = ids.reshape(ids.shape[0], -1) - self.first
        owned = (column >= 0) & (column < values.shape[1])
        picked = values.gather(1, column * owned).masked_fill(~owned, 0.0)
        return self._over_parts(picked).view(ids.shape)

    def log_prob(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Log-probabilities of given tokens, shaped like ``ids``: ``[C]`` or ``[C, k]``."""
        total = self.logsumexp(logits)
        return self.at(logits, ids) - (total if ids.dim() == 1 else total.unsqueeze(1))

    @property
    def _is_cut(self) -> bool:
        return self.tp_group is not None and self.tp_group.size() > 1

    def _over_parts(self, partial: Tensor) -> Tensor:
        """Sum over the ranks; the gradient of the sum is that of each part."""
        if not self._is_cut:
            return partial
        summed: Tensor = reduce_from_tensor_model_parallel_region(
            partial.contiguous(), group=self.tp_group
        )
        return summed
