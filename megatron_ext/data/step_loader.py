"""The batches of one training step on one rank, made of the samples of a dataset.

The first tensor-parallel rank of a pipeline stage reads the samples of a step, and all its
tensor-parallel peers receive them by one broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.data.batch import (
    Batch,
    document_attention_mask,
    documents_of_positions,
    documents_of_tokens,
    slice_for_context_parallel,
    with_mtp_targets,
    with_reduced_weights,
)
from megatron_ext.device.streams import to_device

if TYPE_CHECKING:
    from megatron_ext.parallel.context import ParallelContext


@dataclass
class StepLoader:
    """The loader of the micro-batches that this rank's pipeline stage needs, step by step.

    Attributes:
        samples: iterator over collated samples with ``tokens``, ``labels``, ``position_ids``
            (``[b, s]`` int64) and ``loss_mask`` (``[b, s]`` float32); None on tensor-parallel ranks
            other than the first, which receive by broadcast.
        shape: ``(micro_batch_size, seq_length)``.
        device: the device of the batches.
        mask_documents_at: end-of-document id where neither attention nor multi-token prediction
            may cross documents.
        documents_by_position: neither may cross from one document into the next, and a document
            begins wherever a position is 0.
        mtp_depths: number of multi-token-prediction depths.
        with_sample_ids: the samples have ``sample_ids`` too.
        reduction: what weighs alike in the loss; see `data.batch`.
        ignore_index: the label of positions that weigh nothing.
    """

    samples: Iterator[dict[str, Tensor]] | None
    context: ParallelContext
    shape: tuple[int, int]
    device: torch.device
    mask_documents_at: int | None = None
    documents_by_position: bool = False
    mtp_depths: int = 0
    with_sample_ids: bool = False
    reduction: str = "token"
    ignore_index: int = -100

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of the ids in a sample."""
        names = ("tokens", "labels", "position_ids")
        return (*names, "sample_ids") if self.with_sample_ids else names

    def next_step(self, num_microbatches: int) -> list[Batch]:
        """Return the micro-batches of the next step, in order.

        Raises:
            StopIteration: the data is at its end.
        """
        ids, masks = self._receive(num_microbatches)
        batches = []
        for stacked, mask in zip(ids.unbind(0), masks.unbind(0), strict=True):
            named = dict(zip(self.keys, stacked.unbind(0), strict=True))
            batch = Batch(
                tokens=named["tokens"],
                labels=named["labels"],
                loss_weights=mask.masked_fill(named["labels"] == self.ignore_index, 0.0),
                position_ids=named["position_ids"],
                sample_ids=named.get("sample_ids"),
            )
            documents = self._documents(batch)
            if documents is not None:
                batch = replace(batch, attention_mask=document_attention_mask(documents))
            batch = with_mtp_targets(batch, self.mtp_depths, documents)
            batch = with_reduced_weights(batch, documents, self.reduction)
            batches.append(slice_for_context_parallel(batch, self.context.pgs.cp))
        return batches

    def _documents(self, batch: Batch) -> Tensor | None:
        """Return each position's document ``[b, s]``; None where documents do not end."""
        if self.documents_by_position:
            return documents_of_positions(batch.position_ids)
        if self.mask_documents_at is not None:
            return documents_of_tokens(batch.tokens, self.mask_documents_at)
        return None

    def _receive(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Return ids ``[m, keys, b, s]`` and masks ``[m, b, s]`` on the device, after broadcast."""
        if self.samples is not None:
            drawn: list[tuple[Tensor, Tensor]] = []
            for _ in range(num_microbatches):
                sample = next(self.samples)
                # Copies, since what a loader's process has sent keeps a file open for each tensor.
                parts = torch.stack([sample[key] for key in self.keys])
                drawn.append((parts, sample["loss_mask"].clone()))
            ids = to_device(torch.stack([parts for parts, _ in drawn]), self.device)
            masks = to_device(torch.stack([mask for _, mask in drawn]).float(), self.device)
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


class Sample(dict[str, Any]):
    """A micro-batch under the names that its dataset gives, not cut for context parallelism."""

    mtp_loss_weights: tuple[Tensor, ...] = ()

    def __init__(self, values: Mapping[str, Any], context: ParallelContext) -> None:
        super().__init__(values)
        self._share = context.pgs.cp.size(), context.pgs.cp.rank()

    @property
    def loss_weights(self) -> Tensor:
        """Return ``loss_mask`` ``[b, s/c]``, by which a step counts its targets, or 1 for a row."""
        mask = self.get("loss_mask")
        if not isinstance(mask, Tensor):
            first = next(x for x in self.values() if isinstance(x, Tensor))
            return torch.ones(len(first), device=first.device)
        parts, part = self._share
        share: Tensor = mask.chunk(parts, dim=1)[part]
        return share


@dataclass
class MappingLoader:
    """The loader of micro-batches as a dataset's own mappings; see `StepLoader`.

    All tensor-parallel ranks get the same mappings.
    """

    samples: Iterator[dict[str, Any]] | None
    context: ParallelContext
    device: torch.device

    def next_step(self, num_microbatches: int) -> list[Sample]:
        """Return the micro-batches of the next step, in order.

        Raises:
            StopIteration: the data is at its end.
        """
        drawn: list[Any] = [None] * num_microbatches
        if self.samples is not None:
            drawn = [next(self.samples) for _ in range(num_microbatches)]
        if self.context.pgs.tp.size() > 1:
            torch.distributed.broadcast_object_list(drawn, group=self.context.pgs.tp, group_src=0)
        return [
            Sample(
                {
                    name: to_device(value, self.device) if isinstance(value, Tensor) else value
                    for name, value in sample.items()
                },
                self.context,
            )
            for sample in drawn
        ]


def iterators_per_chunk(
    batches: Sequence[Batch] | None, num_chunks: int
) -> list[Iterator[Batch] | None]:
    """Return an iterator over the same batches for each model chunk; None on a stage without."""
    return [None if batches is None else iter(batches) for _ in range(num_chunks)]
