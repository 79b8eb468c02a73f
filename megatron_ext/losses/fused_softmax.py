"""The pointwise part of a chunk's cross-entropy on a GPU: its logits read twice, written once.

`models.compiled` makes one kernel of each of the two functions. They keep the logits in the type of
the product, 16 bits, and compute in float32 registers what `chunked_logits` computes in a float32
copy; the gradient takes the logits' place. Vocabulary-parallel ranks talk between the two.

Bytes that pass through memory, for N logits of 16 bits (N = tokens x v / tp), the products' own
reads and writes left out:

    statistics     2 N      maximum and sum of exponentials in one reading, where the compiler has
                            its online softmax (torch 2.8); in two before
    to_gradient_   4 N
    eager         48 N      a float32 copy (2 + 4); log-softmax, which reads long rows three times,
                            and its backward pass, which reads both of its inputs twice (16 + 20);
                            zeros for the gradient of the log-probabilities (4); and back (2)

At 32,768 x 151,936 logits that is 30 GB against 240 GB, 7 ms against 55 ms at 4.3 TB/s, beside
155 ms for the three products of 2 x 32,768 x 4096 x 151,936 operations at 790 TFLOP/s. The four
chunks of 8192 tokens add 17 GB of the weight's gradient to the products and 4 GB for its scaling,
at most 5 ms: 167 ms against 210 ms, by this arithmetic 0.80 of eager. Memory at the peak is that
gradient, a chunk's logits and the gradient of the hidden states, 2.5 + 2.5 + 0.3 GB, against three
float32 blocks of all logits, 60 GB: 0.09 of eager.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.models.compiled import compiled


class Statistics(NamedTuple):
    """Of this rank's logits ``[C, v/tp]``, each ``[C, 1]`` float32."""

    highest: Tensor
    at_label: Tensor
    total: Tensor
    """Sum of the logits' exponentials after the highest is taken away."""
    plain: Tensor
    """Sum of the logits; zeros where it is not asked for."""


@compiled
def statistics(logits: Tensor, column: Tensor, sums_plain: bool) -> Statistics:
    """What the loss needs to know of the logits.

    Args:
        logits: ``[C, v/tp]``.
        column: of each token's label, ``[C, 1]`` int64.
        sums_plain: whether label smoothing wants their sum.
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

    Args:
        logits: ``[C, v/tp]``.
        column: ``[C, 1]`` int64.
        lse, scale, at_label, everywhere: ``[C, 1]`` float32.
    """
    here = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0) == column
    gradient = scale * (logits.float() - lse).exp() + everywhere
    logits.copy_(torch.where(here, gradient + at_label, gradient))
