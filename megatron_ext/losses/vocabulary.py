"""Arithmetic over a vocabulary split over the tensor-parallel ranks, for blocks of C tokens.

`VocabularyHead` has the differentiable operations from which users build a loss. Values ``[C]``,
one per token, are equal on all tensor-parallel ranks. Values ``[C, v/tp]`` are split: each rank
holds its part. `sum` and `at` turn parts into values ``[C]``. Pass values ``[C]`` through `spread`
before combining them with a part, so that their gradient is summed over the ranks.
"""

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
        weight: ``[v/tp, h]``, whose first row belongs to the token id ``rank * v/tp``.
        tp_group: None means that this rank holds the whole head.
        bias: ``[v/tp]`` in the weight's dtype, or None.
        softcap: limit k of the logits z, which become ``k tanh(z / k)``; None sets no limit.
    """

    weight: Tensor
    tp_group: ProcessGroup | None
    bias: Tensor | None = None
    softcap: float | None = None

    @property
    def first(self) -> int:
        """Return the token id to which the first row of this rank's weight belongs."""
        return 0 if self.tp_group is None else self.tp_group.rank() * self.weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """Return the size of the whole vocabulary, padding included."""
        parts = 1 if self.tp_group is None else self.tp_group.size()
        return parts * self.weight.shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's float32 logits ``[C, v/tp]`` of C hidden states ``[C, h]``."""
        logits = torch.mm(hidden, self.weight.t()).float()
        if self.bias is not None:
            logits = logits + self.bias
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def sum(self, values: Tensor) -> Tensor:
        """Sum C tokens' values ``[C, v/tp]`` over the whole vocabulary; return ``[C]``."""
        return self._over_parts(values.sum(dim=1))

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return the log-sum-exp ``[C]`` of C tokens' logits over the whole vocabulary."""
        highest = logits.detach().amax(dim=1, keepdim=True)
        if self._is_cut:
            torch.distributed.all_reduce(highest, op=ReduceOp.MAX, group=self.tp_group)
        return self.sum((logits - highest).exp()).log() + highest.squeeze(1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return log-probabilities ``[C, v/tp]`` of C tokens, for this rank's part of the ids."""
        return logits - self.spread(self.logsumexp(logits)).unsqueeze(1)

    def spread(self, values: Tensor) -> Tensor:
        """Return values unchanged, but sum their gradient over the ranks in the backward pass.

        Use it on values that are equal on all ranks, before an operation that combines them with
        values of this rank's part of the vocabulary. Do not use it on any other values.
        """
        if not self._is_cut:
            return values
        return copy_to_tensor_model_parallel_region(values, group=self.tp_group)  # type: ignore[no-any-return]

    def at(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return C tokens' values at token ids ``[C]``, or ``[C, k]`` for k ids per token.

        ``values`` is ``[C, v/tp]``; the result is shaped like ``ids``. An id outside the vocabulary
        (such as an ignored label) gives 0.
        """
        column = ids.reshape(ids.shape[0], -1) - self.first
        owned = (column >= 0) & (column < values.shape[1])
        picked = values.gather(1, column * owned).masked_fill(~owned, 0.0)
        return self._over_parts(picked).view(ids.shape)

    def log_prob(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return C tokens' log-probabilities at ids ``[C]``, or ``[C, k]`` for k ids per token."""
        total = self.logsumexp(logits)
        return self.at(logits, ids) - (total if ids.dim() == 1 else total.unsqueeze(1))

    @property
    def _is_cut(self) -> bool:
        return self.tp_group is not None and self.tp_group.size() > 1

    def _over_parts(self, partial: Tensor) -> Tensor:
        """Sum over the tensor-parallel ranks; each rank's part gets the gradient of the sum."""
        if not self._is_cut:
            return partial
        partial = partial.contiguous()
        return reduce_from_tensor_model_parallel_region(partial, group=self.tp_group)  # type: ignore[no-any-return]
