"""Classes for a previewed step, its rows, and the documents of a row with each token's weight.

Position t of a row reads token t and predicts token t + 1, so the loss weight at position t belongs
to token t + 1. A document that was tokenized on its own has n + 1 tokens in n positions: its first
token is only read, its last token only predicted. In a row cut from a stream of documents, a
document's first token is predicted too, from the last token of the document before. This is also so
in rows of ``--document-packing best_fit``, where a document may lack its end-of-document token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.data.batch import documents_of_tokens
from megatron_ext.data.samplers import Ints

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Provenance:
    """The origin of a sample.

    Attributes:
        sample: the sample's number in the split, from 0.
        source: the file that the sample comes from, or the prefix of its dataset.
        number: for a conversation, its number among the samples that the file gave, from 1; else
            None. Rows that were dropped give none, and `--sft-split-turns` makes several of one.
        cut: number of tokens that truncation has removed from the sample.
    """

    sample: int
    source: str
    number: int | None = None
    cut: int = 0

    def __str__(self) -> str:
        place = self.source if self.number is None else f"number {self.number} of {self.source}"
        return f"sample {self.sample}, {place}"


@dataclass(frozen=True)
class Row:
    """One row of a micro-batch, with s positions and K multi-token-prediction depths.

    Attributes:
        microbatch: index of the micro-batch in the step.
        number: index of the row in the micro-batch.
        tokens, labels, positions: ``[s]``.
        weights: weights of the labels in the loss, after ``--loss-reduction``, ``[s]``; 0 trains
            nothing.
        samples: for a row of separate samples such as conversations, the number of the sample at
            each position, -1 in padding, ``[s]``; else None.
        reaches: whether a position attends to the previous position, ``[s]``; False at position 0.
        mtp_labels, mtp_weights: ``[K, s]``.
        documents: for a row of ``--document-packing best_fit``, the number of the document at each
            position, -1 in padding, ``[s]``; else None.
        provenance: origin of a row without ``samples``; None if unknown or if there are samples.
        sample_provenance: origin of each sample, by its number.
    """

    dp_rank: int
    microbatch: int
    number: int
    tokens: Ints
    labels: Ints
    positions: Ints
    weights: Floats
    samples: Ints | None
    reaches: NDArray[np.bool_]
    mtp_labels: Ints
    mtp_weights: Floats
    provenance: Provenance | None
    sample_provenance: dict[int, Provenance]
    documents: Ints | None = None

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def is_padding(self) -> NDArray[np.bool_]:
        """Return which positions are padding, ``[s]``."""
        numbers = self.documents if self.samples is None else self.samples
        return np.zeros(self.size, np.bool_) if numbers is None else numbers < 0


@dataclass(frozen=True)
class Step:
    """One training step on all data-parallel ranks.

    Attributes:
        iteration: number of the step, from 1, as in the log.
        consumed: samples consumed before the step.
        num_microbatches: micro-batches of each rank.
        rows: sorted by rank, micro-batch and index in the micro-batch.
        targets: the number of labels whose weight is not 0; shown as N.
        weight: the sum of the labels' weights; shown as D.
        mtp_weights: the same sum for each multi-token-prediction depth.
        cp_columns: for each context-parallel rank, the indices of the columns that it keeps of
            every row.
    """

    iteration: int
    consumed: int
    num_microbatches: int
    rows: list[Row]
    targets: int
    weight: float
    mtp_weights: list[float]
    cp_columns: list[Ints]


@dataclass(frozen=True)
class Document:
    """A document in a row, with n tokens.

    Attributes:
        number: number of the document in the row, from 1.
        start, end: the row reads the document's tokens at positions ``start`` to ``end`` - 1. The
            two are equal if the row only predicts the document's first token.
        is_given: whether the document's first token is only read, not predicted.
        is_last: whether the row ends with a prediction of one more token of the document.
    """

    row: Row
    number: int
    start: int
    end: int
    is_given: bool
    is_last: bool
    provenance: Provenance | None

    @cached_property
    def columns(self) -> Ints:
        """Return the position in the row at which each token is read, ``[n]``.

        A last token that is only predicted has position ``end``.
        """
        return np.arange(self.start, self.end + self.is_last)

    @cached_property
    def ids(self) -> Ints:
        ids = self.row.labels[self.columns - 1]
        if self.is_given:
            ids[0] = self.row.tokens[self.start]
        return ids

    @cached_property
    def weights(self) -> Floats:
        """Return the weight of each token as a target, ``[n]``; NaN if it is only read."""
        weights = self.row.weights[self.columns - 1]
        if self.is_given:
            weights[0] = np.nan
        return weights

    @cached_property
    def positions(self) -> Ints:
        """Return the position id of each token, ``[n]``; -1 for a token that is only predicted."""
        inside = self.columns < self.end
        return np.where(inside, self.row.positions[np.minimum(self.columns, self.row.size - 1)], -1)

    @property
    def targets(self) -> Floats:
        return self.weights[1:] if self.is_given else self.weights

    @property
    def trained(self) -> int:
        return int(np.count_nonzero(self.targets))

    def mtp_targets(self, depth: int) -> tuple[Ints, Floats]:
        """Return what MTP depth ``depth`` (from 1) has to predict at each of the n tokens.

        Returns:
            The id of the target, which is the token ``depth + 1`` positions later, or -1 if there
            is none; and the weight of the target in the loss. Both are ``[n]``.
        """
        inside = self.columns < self.end
        columns = np.minimum(self.columns, self.row.size - 1)
        exists = inside & target_exists(self.row, depth)[columns]
        ids = np.where(exists, self.row.mtp_labels[depth - 1][columns], -1)
        return ids, np.where(inside, self.row.mtp_weights[depth - 1][columns], 0)


def target_exists(row: Row, depth: int) -> NDArray[np.bool_]:
    """Return whether each position has a target at an MTP depth (from 1), ``[s]``.

    It has one if the position ``depth`` later is in the same document.
    """
    attention = np.cumsum(~row.reaches)
    exists = np.zeros(row.size, dtype=np.bool_)
    if depth < row.size:
        exists[:-depth] = attention[:-depth] == attention[depth:]
        if row.samples is not None:
            samples = row.samples
            exists[:-depth] &= (samples[:-depth] == samples[depth:]) & (samples[:-depth] >= 0)
    return exists


def documents_of(row: Row, eod: int) -> list[Document]:
    """Return the documents of a row in order, without padding.

    In a row cut from a stream of documents, each token with the id ``eod`` ends a document. The
    row's last label may be the first token of one more document.
    """
    if row.documents is not None:
        count = int((row.documents >= 0).sum())
        edges = (np.flatnonzero(np.diff(row.documents[:count])) + 1).tolist()
        bounds = [0, *edges, count]
        is_cut = count == row.size and bool(row.weights[-1])
        return [
            Document(row, i, start, end, start == 0, is_cut and end == count, row.provenance)
            for i, (start, end) in enumerate(pairwise(bounds), 1)
        ]
    if row.samples is None:
        tokens = torch.from_numpy(np.append(row.tokens, row.labels[-1])).unsqueeze(0)
        numbers = documents_of_tokens(tokens, eod)[0].numpy()
        starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
        ends = [*starts[1:], row.size]
        return [
            Document(row, i + 1, start, end, start == 0, i == len(starts) - 1, row.provenance)
            for i, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
    edges = np.flatnonzero(np.diff(row.samples)) + 1
    bounds = [0, *edges.tolist(), row.size]
    documents: list[Document] = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        sample = int(row.samples[start])
        if sample >= 0:
            provenance = row.sample_provenance.get(sample)
            documents.append(Document(row, len(documents) + 1, start, end, True, True, provenance))
    return documents
