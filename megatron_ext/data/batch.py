"""The batches of one training step on one rank, with documents, targets and loss weights.

The first tensor-parallel rank of a pipeline stage reads the samples of a step and broadcasts them
to its tensor-parallel peers.

The reduction of a loss sets the weight of each token. Let w_t be the weight that the data gives a
token t (1 at a target, 0 elsewhere), and n_i the sum of w_t over the sample i that contains t:

    reduction  weight of t    effect
    token      w_t            every target has the same weight
    sample     w_t / n_i      every sample has the same weight
    square     w_t / sqrt n_i every sample weighs the square root of its number of targets

The loss of a step is the weighted mean over all micro-batches, data- and context-parallel ranks. In
packed rows each document is a sample; otherwise the whole row is one sample. A sample without
targets has no weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import core
from megatron_ext.device.streams import to_device
from megatron_ext.errors import DataError
from megatron_ext.parallel.context import ParallelContext


@dataclass(frozen=True)
class Batch:
    """One micro-batch on one rank; s is the full sequence length, c the context-parallel size.

    Attributes:
        tokens, labels, position_ids: ``[b, s/c]`` int64.
        loss_weights: weight of each label, ``[b, s/c]`` float32.
        attention_mask: the document index of each position of the whole sequences, ``[b, s]``
            int32; attention does not cross documents. None means plain causal attention.
        mtp_labels, mtp_loss_weights: labels and their weights, one tensor ``[b, s/c]`` for each
            multi-token-prediction module (MTP depth).
        sample_ids: ``[b, s/c]`` int64; None if the dataset does not provide them. A position has
            the index of its sample in the dataset, or, in packed rows, the number of its document
            in the row; padding has -1.
        loss_inputs: values that a custom loss has prepared for this micro-batch.
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
    """Return the document index of each position ``[b, s]``; ``eod`` is a document's last token."""
    is_end = (tokens == eod).long()
    return is_end.cumsum(dim=1) - is_end


def documents_of_positions(position_ids: Tensor) -> Tensor:
    """Return the document index of each position ``[b, s]``; a document begins at position id 0."""
    return (position_ids == 0).long().cumsum(dim=1) - 1


def shift_left(tensor: Tensor, documents: Tensor | None = None) -> Tensor:
    """Shift ``[b, s]`` left by one position, with 0 at the end of the sequence or document.

    ``documents`` is the document index of each position, negative in padding, ``[b, s]`` or ``[1,
    s]``; None means that the sequence is one document.
    """
    shifted = torch.roll(tensor, -1, dims=1)
    shifted[:, -1] = 0
    if documents is None:
        return shifted
    goes_on = (documents == torch.roll(documents, -1, dims=1)) & (documents >= 0)
    return torch.where(goes_on, shifted, 0)


def with_mtp_targets(batch: Batch, depths: int, documents: Tensor | None = None) -> Batch:
    """Return a full-sequence batch with labels and loss weights for ``depths`` MTP modules added.

    The target of a position at depth k is the main model's target k positions later. A target
    beyond the end of the sequence or document has weight 0. ``documents`` has the document index of
    each position (see `shift_left`); None means that a sequence is one document. Call this function
    before sequences are sliced for context parallelism, so that no rank needs tokens of another.
    """
    labels = [batch.labels]
    weights = [batch.loss_weights]
    for _ in range(depths):
        labels.append(shift_left(labels[-1], documents))
        weights.append(shift_left(weights[-1], documents))
    return replace(batch, mtp_labels=tuple(labels[1:]), mtp_loss_weights=tuple(weights[1:]))


def slice_for_context_parallel(batch: Batch, cp_group: ProcessGroup) -> Batch:
    """Return the batch with this context-parallel rank's slice of each sequence.

    ``attention_mask`` stays whole.
    """
    if cp_group.size() == 1:
        return batch
    plain = ("tokens", "labels", "loss_weights", "position_ids", "sample_ids")
    named: dict[str, Tensor | None] = {name: getattr(batch, name) for name in plain}
    for name in ("mtp_labels", "mtp_loss_weights"):
        named |= {f"{name} {i}": t for i, t in enumerate(getattr(batch, name))}
    cut = core.slice_batch(named, cp_group)
    fields: dict[str, Any] = {name: cut[name] for name in plain}
    for name in ("mtp_labels", "mtp_loss_weights"):
        fields[name] = tuple(cut[f"{name} {i}"] for i in range(len(batch.mtp_labels)))
    # The queries here attend to keys of other ranks, so the mask needs the documents of all
    # positions.
    return Batch(**fields, attention_mask=batch.attention_mask)


EXPONENTS = {"token": 0.0, "sample": 1.0, "square": 0.5}


def reduced_weights(weights: Tensor, documents: Tensor | None, reduction: str) -> Tensor:
    """Return the loss weight of each token, ``[b, s]`` float32, under a loss's ``reduction``.

    The module docstring defines the reductions token, sample and square.

    Args:
        weights: the data's own weights of the tokens of whole rows, ``[b, s]`` float32, >= 0.
        documents: for each position, the index of its sample within the row, -1 in padding, ``[b,
            s]`` or ``[1, s]``; None means that a row is one sample.
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
    return torch.where(totals > 0, weights / totals.clamp(min=1e-30) ** exponent, 0.0)


def with_reduced_weights(batch: Batch, documents: Tensor | None, reduction: str) -> Batch:
    """Return a full-sequence batch with ``reduction`` applied to its loss and MTP loss weights.

    ``documents`` and ``reduction`` are the arguments of `reduced_weights`.
    """
    weights, *mtp_weights = (
        reduced_weights(mask, documents, reduction)
        for mask in (batch.loss_weights, *batch.mtp_loss_weights)
    )
    return replace(batch, loss_weights=weights, mtp_loss_weights=tuple(mtp_weights))


@dataclass
class StepLoader:
    """A loader of the micro-batches of this rank's pipeline stage, one step at a time.

    Attributes:
        samples: iterator over collated samples with ``tokens``, ``labels``, ``position_ids`` (``[b,
            s]`` int64) and ``loss_mask`` (``[b, s]`` float32); None on tensor-parallel ranks other
            than the first, which receive by broadcast.
        shape: ``(micro_batch_size, seq_length)``; `next_step` may be given another length.
        mask_documents_at: end-of-document id; neither attention nor multi-token prediction crosses
            it. With None no token ends a document.
        documents_by_position: whether a document begins wherever a position id is 0;
            ``mask_documents_at`` is then not used.
        with_sample_ids: whether the samples also have ``sample_ids`` (see `Batch`).
        reduction: how tokens are weighted (see the module docstring).
        ignore_index: the label of positions that get the loss weight 0.
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

    def __post_init__(self) -> None:
        self._keys = ("tokens", "labels", "position_ids", "sample_ids")[: 3 + self.with_sample_ids]

    def next_step(self, num_microbatches: int, seq_length: int | None = None) -> list[Batch]:
        """Return the micro-batches of the next step.

        ``seq_length`` is the number of tokens of each sample; None means the length in ``shape``.

        Raises:
            StopIteration: the data has ended.
        """
        ids, masks = self._receive(num_microbatches, seq_length or self.shape[1])
        batches = []
        for stacked, mask in zip(ids.unbind(0), masks.unbind(0), strict=True):
            named = dict(zip(self._keys, stacked.unbind(0), strict=True))
            batch = Batch(
                tokens=named["tokens"],
                labels=named["labels"],
                loss_weights=mask.masked_fill(named["labels"] == self.ignore_index, 0.0),
                position_ids=named["position_ids"],
                sample_ids=named.get("sample_ids"),
            )
            documents = None
            if self.documents_by_position:
                documents = documents_of_positions(batch.position_ids)
            elif self.mask_documents_at is not None:
                documents = batch.sample_ids
                if documents is None:
                    documents = documents_of_tokens(batch.tokens, self.mask_documents_at)
            if documents is not None:
                batch = replace(batch, attention_mask=documents.int())
            batch = with_mtp_targets(batch, self.mtp_depths, documents)
            batch = with_reduced_weights(batch, documents, self.reduction)
            batches.append(slice_for_context_parallel(batch, self.context.pgs.cp))
        return batches

    def _check(self, sample: Any) -> None:
        """Raise a DataError unless ``sample`` is a mapping with all tensors of a micro-batch."""
        names = (*self._keys, "loss_mask")
        has = sample if isinstance(sample, Mapping) else ()
        lacking = [f"`{name}`" for name in names if name not in has]
        if lacking:
            raise DataError(
                f"A micro-batch of the data set ({type(sample).__name__}) lacks "
                f"{', '.join(lacking)}; return a mapping with {', '.join(names)} for each sample."
            )

    def _receive(self, num_microbatches: int, seq_length: int) -> tuple[Tensor, Tensor]:
        """Receive m micro-batches, which the first tensor-parallel rank reads and broadcasts.

        Return the integer tensors, such as tokens and labels, stacked over their k keys as ``[m, k,
        b, s]``, and the loss masks ``[m, b, s]``.
        """
        if self.samples is not None:
            parts = list[Tensor]()
            own = list[Tensor]()
            for _ in range(num_microbatches):
                sample = next(self.samples)
                self._check(sample)
                # Copied, because each tensor from a worker process keeps a file open.
                parts.append(torch.stack([sample[key] for key in self._keys]))
                own.append(sample["loss_mask"].clone())
            ids = to_device(torch.stack(parts), self.device)
            masks = to_device(torch.stack(own).float(), self.device)
        else:
            shape = (self.shape[0], seq_length)
            ids = torch.empty(
                (num_microbatches, len(self._keys), *shape), dtype=torch.int64, device=self.device
            )
            masks = torch.empty((num_microbatches, *shape), device=self.device)
        group = self.context.pgs.tp
        if group.size() > 1:
            for tensor in (ids, masks):
                torch.distributed.broadcast(tensor, group=group, group_src=0)
        return ids, masks


class Sample(dict[str, Any]):
    """A micro-batch as a dict with the dataset's own keys.

    Its tensors are not sliced for context parallelism.
    """

    mtp_loss_weights: tuple[Tensor, ...] = ()

    def __init__(self, values: Mapping[str, Any], context: ParallelContext) -> None:
        super().__init__(values)
        self._share = context.pgs.cp.size(), context.pgs.cp.rank()

    @property
    def loss_weights(self) -> Tensor:
        """Return this context-parallel rank's contiguous part of ``loss_mask``, ``[b, s/c]``.

        Without a mask, return ones ``[b]``: every sample has weight 1.
        """
        mask = self.get("loss_mask")
        if not isinstance(mask, Tensor):
            first = next(x for x in self.values() if isinstance(x, Tensor))
            return torch.ones(len(first), device=first.device)
        parts, part = self._share
        share: Tensor = mask.chunk(parts, dim=1)[part]
        return share


@dataclass
class MappingLoader:
    """A loader like `StepLoader`, but each micro-batch is a dict with the dataset's own keys."""

    samples: Iterator[dict[str, Any]] | None
    context: ParallelContext
    device: torch.device

    def next_step(self, num_microbatches: int, _seq_length: int | None = None) -> list[Sample]:
        """Return the next step's micro-batches; raise StopIteration at the end of the data."""
        drawn: list[Any] = [None] * num_microbatches
        if self.samples is not None:
            drawn = [next(self.samples) for _ in range(num_microbatches)]
        if self.context.pgs.tp.size() > 1:
            torch.distributed.broadcast_object_list(drawn, group=self.context.pgs.tp, group_src=0)

        def moved(value: Any) -> Any:
            return to_device(value, self.device) if isinstance(value, Tensor) else value

        return [
            Sample({name: moved(value) for name, value in sample.items()}, self.context)
            for sample in drawn
        ]
