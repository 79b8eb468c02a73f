"""A micro-batch as a rank sees it: documents, targets, loss weights, and a slice of the sequence.

Each context-parallel rank keeps two slices of ``2 * cp``, mirrored, as megatron-core cuts it.

The reduction of a loss decides what weighs alike. With w_t the weight that the data gives a token
(1 at a target, 0 elsewhere) and n_i the sum of w_t over the sample i that it belongs to, a token
weighs

    token   w_t            every target alike
    sample  w_t / n_i      every sample alike
    square  w_t / sqrt n_i  every sample by the square root of its targets

and the loss of a step is the weighted mean over all micro-batches, data- and context-parallel
ranks. A sample is a document of a packed row, else the row. A sample without targets weighs
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor, where
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; s is the full sequence, c the context-parallel size.

    Attributes:
        tokens: input ids, ``[b, s/c]`` int64.
        labels: ids to predict, ``[b, s/c]`` int64.
        loss_weights: weight of each label, ``[b, s/c]`` float32.
        position_ids: ``[b, s/c]`` int64.
        attention_mask: True where attention is forbidden, ``[b, 1, s/c, s]``; None means causal.
        mtp_labels: per multi-token-prediction depth, ``[b, s/c]`` int64.
        mtp_loss_weights: per depth, ``[b, s/c]`` float32.
        sample_ids: number in the dataset of the sample that each position belongs to, -1 in
            padding, ``[b, s/c]`` int64; None where the dataset does not give them.
        loss_inputs: what a loss of the user's own has prepared for this micro-batch.
    """

    tokens: Tensor
    labels: Tensor
    loss_weights: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None = None
    mtp_labels: tuple[Tensor, ...] = ()
    mtp_loss_weights: tuple[Tensor, ...] = ()
    sample_ids: Tensor | None = None
    loss_inputs: Any = None


def documents_of_tokens(tokens: Tensor, eod: int) -> Tensor:
    """Return the document, from 0, of each position of the rows ``[b, s]``.

    A document ends with its end-of-document token, which still belongs to it.
    """
    is_end = (tokens == eod).long()
    return is_end.cumsum(dim=1) - is_end


def documents_of_positions(position_ids: Tensor) -> Tensor:
    """Return the document, from 0, of each position ``[b, s]``; position 0 begins a document.

    Padding with positions of 0 is documents of one token each, so that it attends to itself only.
    """
    return (position_ids == 0).long().cumsum(dim=1) - 1


def document_attention_mask(documents: Tensor) -> Tensor:
    """Return the causal mask that also stops at document ends.

    It is ``[b, 1, s, s]`` bool, True where attention is forbidden, for documents ``[b, s]``.
    """
    position = torch.arange(documents.size(1), device=documents.device)
    future = position[None, :] > position[:, None]
    return (future | (documents[:, :, None] != documents[:, None, :])).unsqueeze(1)


def shift_left(tensor: Tensor, documents: Tensor | None = None) -> Tensor:
    """Shift values by a position; 0 where the sequence, or its document, has no next position.

    Args:
        tensor: ``[b, s]``.
        documents: number of each position's document, negative in padding, ``[b, s]`` or
            ``[1, s]``; None means that documents do not end.

    Returns:
        ``[b, s]``.
    """
    shifted = torch.roll(tensor, -1, dims=1)
    shifted[:, -1] = 0
    if documents is None:
        return shifted
    goes_on = (documents == torch.roll(documents, -1, dims=1)) & (documents >= 0)
    return torch.where(goes_on, shifted, 0)


def with_mtp_targets(batch: Batch, depths: int, documents: Tensor | None = None) -> Batch:
    """Add the labels and masks of each multi-token-prediction depth to a full-sequence batch.

    At depth k a position is to learn what the main model learns k positions on; at the end of the
    sequence, or of its document, it learns nothing. The targets are made before the
    context-parallel cut, so that no rank needs its neighbour's tokens and documents may be shorter
    than the ranks' slices.

    Args:
        batch: ``[b, s]``, not yet cut.
        documents: see `shift_left`; None rolls through the documents of a sample.
    """
    labels, masks = [], []
    label, mask = batch.labels, batch.loss_weights
    for _ in range(depths):
        label, mask = shift_left(label, documents), shift_left(mask, documents)
        labels.append(label)
        masks.append(mask)
    return replace(batch, mtp_labels=tuple(labels), mtp_loss_weights=tuple(masks))


def slice_for_context_parallel(batch: Batch, cp_group: ProcessGroup) -> Batch:
    """Keep this context-parallel rank's part of the sequence."""
    if cp_group.size() == 1:
        return batch
    named: dict[str, Tensor | None] = {
        "tokens": batch.tokens,
        "labels": batch.labels,
        "loss_mask": batch.loss_weights,
        "position_ids": batch.position_ids,
        "attention_mask": batch.attention_mask,
        "sample_ids": batch.sample_ids,
    }
    named.update({f"mtp_labels_{i}": t for i, t in enumerate(batch.mtp_labels)})
    named.update({f"mtp_masks_{i}": t for i, t in enumerate(batch.mtp_loss_weights)})
    cut = get_batch_on_this_cp_rank(named, cp_group=cp_group)
    depths = range(len(batch.mtp_labels))
    return Batch(
        tokens=cut["tokens"],
        labels=cut["labels"],
        loss_weights=cut["loss_mask"],
        position_ids=cut["position_ids"],
        attention_mask=cut["attention_mask"],
        mtp_labels=tuple(cut[f"mtp_labels_{i}"] for i in depths),
        mtp_loss_weights=tuple(cut[f"mtp_masks_{i}"] for i in depths),
        sample_ids=cut["sample_ids"],
    )


EXPONENTS = {"token": 0.0, "sample": 1.0, "square": 0.5}


def reduced_weights(weights: Tensor, documents: Tensor | None, reduction: str) -> Tensor:
    """Return the weights of the tokens under a reduction.

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
        loss_weights=reduced_weights(batch.loss_weights, documents, reduction),
        mtp_loss_weights=tuple(
            reduced_weights(mask, documents, reduction) for mask in batch.mtp_loss_weights
        ),
    )
