"""Weights of tokens for the reductions of a loss over a global batch.

With w_t the weight that the data gives a token (1 at a target, 0 elsewhere) and n_i the sum of w_t
over the sample i that it belongs to, a token weighs

    token   w_t            every target alike
    sample  w_t / n_i      every sample alike
    square  w_t / sqrt n_i  every sample by the square root of its targets

and the loss of a step is the weighted mean over all micro-batches, data- and context-parallel
ranks. A sample is a document of a packed row, else the row. A sample without targets weighs
nothing.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, where

from megatron_ext.data.batch import Batch

EXPONENTS = {"token": 0.0, "sample": 1.0, "square": 0.5}


def reduced_weights(weights: Tensor, documents: Tensor | None, reduction: str) -> Tensor:
    """Weights of the tokens under a reduction.

    Args:
        weights: w_t of whole rows, ``[b, s]`` float32, not negative.
        documents: number of each position's sample in its row, -1 in padding, ``[b, s]`` or
            ``[1, s]``; None means that a row is one sample.
        reduction: a key of `EXPONENTS`.

    Returns:
        ``[b, s]`` float32.
    """
    exponent = EXPONENTS[reduction]
    if not exponent:
        return weights
    if documents is None:
        totals = weights.sum(dim=1, keepdim=True).expand_as(weights)
    else:
        index = (documents + 1).expand_as(weights)
        sums = weights.new_zeros(weights.size(0), weights.size(1) + 1)
        totals = sums.scatter_add_(1, index, weights).gather(1, index)
    return where(totals > 0, weights / totals.clamp(min=1e-30) ** exponent, 0.0)


def with_reduced_weights(batch: Batch, documents: Tensor | None, reduction: str) -> Batch:
    """Weigh the labels of a batch of whole rows, those of each prediction depth by themselves."""
    return replace(
        batch,
        loss_mask=reduced_weights(batch.loss_mask, documents, reduction),
        mtp_loss_masks=tuple(
            reduced_weights(mask, documents, reduction) for mask in batch.mtp_loss_masks
        ),
    )
