"""From dataset samples to the typed batches of one training step on one rank.

The first tensor-parallel rank of a pipeline stage reads the samples of a step, all its
tensor-parallel peers receive them by one broadcast, and each context-parallel rank keeps its slice
of the sequence (two chunks of ``2 * cp``, mirrored, as megatron-core cuts it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; s is the full sequence, c the context-parallel size.

    Attributes:
        tokens: input ids, ``[b, s/c]`` int64.
        labels: ids to predict, ``[b, s/c]`` int64.
        loss_mask: weight of each label, ``[b, s/c]`` float32.
        position_ids: ``[b, s/c]`` int64.
        attention_mask: True where attention is forbidden, ``[b, 1, s/c, s]``; None means causal.
        mtp_labels: per multi-token-prediction depth, ``[b, s/c]`` int64.
        mtp_loss_masks: per depth, ``[b, s/c]`` float32.
        sample_ids: number in the dataset of the sample that each position belongs to, -1 in
            padding, ``[b, s/c]`` int64; None where the dataset does not give them.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None = None
    mtp_labels: tuple[Tensor, ...] = ()
    mtp_loss_masks: tuple[Tensor, ...] = ()
    sample_ids: Tensor | None = None


def documents_of_tokens(tokens: Tensor, eod: int) -> Tensor:
    """Number of the document that each position belongs to, within its row.

    A document ends with its end-of-document token, which still belongs to it.

    Args:
        tokens: ``[b, s]``.
        eod: id of the end-of-document token.

    Returns:
        ``[b, s]`` int64, counted from 0.
    """
    is_end = (tokens == eod).long()
    return is_end.cumsum(dim=1) - is_end


def documents_of_positions(position_ids: Tensor) -> Tensor:
    """Number of the document that each position belongs to, where positions start anew with each.

    Padding with positions of 0 is documents of one token each, so that it attends to itself only.

    Args:
        position_ids: ``[b, s]``.

    Returns:
        ``[b, s]`` int64, counted from 0.
    """
    return (position_ids == 0).long().cumsum(dim=1) - 1


def documents_of_lengths(cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
    """Number of the document that each position of a packed row belongs to.

    Args:
        cu_seqlens: cumulative lengths of the documents, from 0, ``[n + 1]`` int.
        cu_seqlens_padded: of the documents with their padding, likewise.

    Returns:
        ``[1, s]`` int64, counted from 0; -1 where a document is padded.
    """
    device = cu_seqlens.device
    position = torch.arange(int(cu_seqlens_padded[-1]), device=device)
    document = torch.repeat_interleave(
        torch.arange(cu_seqlens.numel() - 1, device=device), cu_seqlens_padded.diff()
    )
    inside = position - cu_seqlens_padded[document] < cu_seqlens.diff()[document]
    return torch.where(inside, document, -1).unsqueeze(0)


def document_attention_mask(documents: Tensor) -> Tensor:
    """Causal mask that also stops at document ends.

    Args:
        documents: number of each position's document, ``[b, s]``.

    Returns:
        ``[b, 1, s, s]`` bool, True where attention is forbidden.
    """
    position = torch.arange(documents.size(1), device=documents.device)
    future = position[None, :] > position[:, None]
    return (future | (documents[:, :, None] != documents[:, None, :])).unsqueeze(1)


def shift_left(tensor: Tensor, documents: Tensor | None = None) -> Tensor:
    """Next position's value, with 0 where the sequence, or its document, has no next position.

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
    than the ranks' chunks.

    Args:
        batch: ``[b, s]``, not yet cut.
        depths: number of multi-token-prediction depths.
        documents: see `shift_left`; None rolls through the documents of a sample.
    """
    labels, masks = [], []
    label, mask = batch.labels, batch.loss_mask
    for _ in range(depths):
        label, mask = shift_left(label, documents), shift_left(mask, documents)
        labels.append(label)
        masks.append(mask)
    return replace(batch, mtp_labels=tuple(labels), mtp_loss_masks=tuple(masks))


def slice_for_context_parallel(batch: Batch, cp_group: ProcessGroup) -> Batch:
    """Keep this context-parallel rank's part of the sequence."""
    if cp_group.size() == 1:
        return batch
    named: dict[str, Tensor | None] = {
        "tokens": batch.tokens,
        "labels": batch.labels,
        "loss_mask": batch.loss_mask,
        "position_ids": batch.position_ids,
        "attention_mask": batch.attention_mask,
        "sample_ids": batch.sample_ids,
    }
    named.update({f"mtp_labels_{i}": t for i, t in enumerate(batch.mtp_labels)})
    named.update({f"mtp_masks_{i}": t for i, t in enumerate(batch.mtp_loss_masks)})
    cut = get_batch_on_this_cp_rank(named, cp_group=cp_group)
    depths = range(len(batch.mtp_labels))
    return Batch(
        tokens=cut["tokens"],
        labels=cut["labels"],
        loss_mask=cut["loss_mask"],
        position_ids=cut["position_ids"],
        attention_mask=cut["attention_mask"],
        mtp_labels=tuple(cut[f"mtp_labels_{i}"] for i in depths),
        mtp_loss_masks=tuple(cut[f"mtp_masks_{i}"] for i in depths),
        sample_ids=cut["sample_ids"],
    )


class StepLoader:
    """Gives, step by step, the micro-batches that this rank's pipeline stage needs.

    Args:
        samples: iterator over collated samples with ``tokens``, ``labels``, ``position_ids``
            (``[b, s]`` int64) and ``loss_mask`` (``[b, s]`` float32), and ``sample_ids`` where
            they are wanted; None on tensor-parallel ranks other than the first, which receive by
            broadcast.
        context: the parallel layout of this rank.
        shape: ``(micro_batch_size, seq_length)``.
        device: where the batches go.
        mask_documents_at: end-of-document id where neither attention nor multi-token prediction
            may cross documents.
        documents_by_position: neither may cross from one document into the next, and a document
            begins wherever a position is 0.
        mtp_depths: number of multi-token-prediction depths.
        with_sample_ids: the samples name themselves.
    """

    def __init__(
        self,
        samples: Iterator[dict[str, Tensor]] | None,
        context: ParallelContext,
        shape: tuple[int, int],
        device: torch.device,
        *,
        mask_documents_at: int | None = None,
        documents_by_position: bool = False,
        mtp_depths: int = 0,
        with_sample_ids: bool = False,
    ) -> None:
        self.samples = samples
        self.context = context
        self.shape = shape
        self.device = device
        self.mask_documents_at = mask_documents_at
        self.documents_by_position = documents_by_position
        self.mtp_depths = mtp_depths
        self.keys = ("tokens", "labels", "position_ids", *(("sample_ids",) * with_sample_ids))

    def next_step(self, num_microbatches: int) -> list[Batch]:
        """The micro-batches of the next step, in order.

        Raises:
            StopIteration: the data is at its end.
        """
        ids, masks = self._receive(num_microbatches)
        batches = []
        for stacked, mask in zip(ids.unbind(0), masks.unbind(0), strict=True):
            named = dict(zip(self.keys, stacked.unbind(0), strict=True))
            batch = Batch(loss_mask=mask, **named)
            documents = self._documents(batch)
            if documents is not None:
                batch = replace(batch, attention_mask=document_attention_mask(documents))
            batch = with_mtp_targets(batch, self.mtp_depths, documents)
            batches.append(slice_for_context_parallel(batch, self.context.pgs.cp))
        return batches

    def _documents(self, batch: Batch) -> Tensor | None:
        """Number of each position's document ``[b, s]``; None where documents do not end."""
        if self.documents_by_position:
            return documents_of_positions(batch.position_ids)
        if self.mask_documents_at is not None:
            return documents_of_tokens(batch.tokens, self.mask_documents_at)
        return None

    def _receive(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Ids ``[m, keys, b, s]`` and loss masks ``[m, b, s]`` on the device, after broadcast."""
        if self.samples is not None:
            drawn = [next(self.samples) for _ in range(num_microbatches)]
            ids = torch.stack([torch.stack([sample[k] for k in self.keys]) for sample in drawn])
            masks = torch.stack([sample["loss_mask"] for sample in drawn]).float()
            ids = ids.to(self.device, non_blocking=True)
            masks = masks.to(self.device, non_blocking=True)
        else:
            ids = torch.empty(
                (num_microbatches, len(self.keys), *self.shape),
                dtype=torch.int64,
                device=self.device,
            )
            masks = torch.empty((num_microbatches, *self.shape), device=self.device)
        group = self.context.pgs.tp
        if group.size() > 1:
            for tensor in (ids, masks):
                torch.distributed.broadcast(tensor, group=group, group_src=0)
        return ids, masks


def iterators_per_chunk(
    batches: Sequence[Batch] | None, num_chunks: int
) -> list[Iterator[Batch] | None]:
    """One iterator over the same batches for each model chunk; None where a stage reads none."""
    return [None if batches is None else iter(batches) for _ in range(num_chunks)]
