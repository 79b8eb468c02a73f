"""The pointwise part of a chunk's cross-entropy on a GPU: its logits read twice, written once.

`torch.compile` makes one kernel of each of the two functions. They keep the logits in the type of
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
155 ms for the three products of 2 x 32,768 x 4096 x 151,936 operations at 790 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton


class Statistics(NamedTuple):
    """Of this rank's logits ``[C, v/tp]``, each ``[C]`` float32."""

    highest: Tensor
    at_label: Tensor
    total: Tensor
    """Sum of the logits' exponentials after the highest is taken away."""
    plain: Tensor
    """Sum of the logits; zeros where it is not asked for."""


def statistics(logits: Tensor, column: Tensor, sums_plain: bool) -> Statistics:
    """What the loss needs to know of the logits.

    Args:
        logits: ``[C, v/tp]``.
        column: of each token's label, ``[C, 1]`` int64.
        sums_plain: whether label smoothing wants their sum.
    """
    exact = logits.float()
    highest = exact.amax(dim=1, keepdim=True)
    total = (exact - highest).exp().sum(dim=1)
    at_label = logits.gather(1, column).squeeze(1).float()
    plain = exact.sum(dim=1) if sums_plain else torch.zeros_like(total)
    return Statistics(highest.squeeze(1), at_label, total, plain)


def to_gradient_(
    logits: Tensor, column: Tensor, lse: Tensor, scale: Tensor, at_label: Tensor, everywhere: Tensor
) -> None:
    """Put ``scale * exp(logits - lse) + at_label * onehot + everywhere`` in the logits' place.

    Args:
        logits: ``[C, v/tp]``.
        column: ``[C, 1]`` int64.
        lse, scale, at_label, everywhere: ``[C]`` float32.
    """
    rows = (x.unsqueeze(1) for x in (lse, scale, at_label, everywhere))
    lse, scale, at_label, everywhere = rows
    here = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0) == column
    gradient = scale * (logits.float() - lse).exp() + everywhere
    logits.copy_(torch.where(here, gradient + at_label, gradient))


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through `torch.compile`, made once in a process."""
    return torch.compile(function)


def fuses(tensor: Tensor) -> bool:
    """Whether a tensor's chunks are computed here: on GPUs that Triton can make kernels for."""
    return tensor.is_cuda and has_triton()
