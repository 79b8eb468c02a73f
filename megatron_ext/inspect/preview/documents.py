"""The documents of a row, with each token's weight as the one that is predicted.

Position t reads token t and predicts token t + 1, so the weight at t belongs to token t + 1. A
document of n positions that stands by itself therefore has n + 1 tokens: its first is only read,
its last only predicted. In a row cut from a stream of documents, the first token of a document is
predicted from the end of the document before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.data.batch import documents_of_tokens
from megatron_ext.data.samplers import Ints
from megatron_ext.inspect.preview.collect import Floats, Row
from megatron_ext.inspect.preview.origins import Origin


@dataclass(frozen=True)
class Document:
    """A document of a row; n tokens.

    Attributes:
        row: it lies in.
        number: in the row, from 1.
        start, end: columns that it takes; ``end`` is past the last. Equal where the row ends just
            before the document, so that only its first token is predicted.
        is_given: the first token is read only, not predicted.
        is_last: the row predicts one more token of it than it reads.
        origin: where it comes from.
    """

    row: Row
    number: int
    start: int
    end: int
    is_given: bool
    is_last: bool
    origin: Origin | None

    @cached_property
    def columns(self) -> Ints:
        """``[n]``; the column of a token that is only predicted follows the last."""
        return np.arange(self.start, self.end + self.is_last)

    @cached_property
    def ids(self) -> Ints:
        """``[n]``."""
        ids = self.row.labels[self.columns - 1]
        if self.is_given:
            ids[0] = self.row.tokens[self.start]
        return ids

    @cached_property
    def weights(self) -> Floats:
        """Weight with which each token is predicted, ``[n]``; NaN where it is only read."""
        weights = self.row.weights[self.columns - 1]
        if self.is_given:
            weights[0] = np.nan
        return weights

    @cached_property
    def positions(self) -> Ints:
        """Position id of each token as it is read, ``[n]``; -1 where it is only predicted."""
        inside = self.columns < self.end
        return np.where(inside, self.row.positions[np.minimum(self.columns, self.row.size - 1)], -1)

    @property
    def targets(self) -> Floats:
        """Weights of the tokens that are predicted."""
        return self.weights[1:] if self.is_given else self.weights

    @property
    def trained(self) -> int:
        """Number of tokens with a weight."""
        return int(np.count_nonzero(self.targets))

    def mtp_targets(self, depth: int) -> tuple[Ints, Floats]:
        """Ids that the positions of the document learn at a depth, and their weights, ``[n]``.

        Args:
            depth: from 1; a position learns the token ``depth + 1`` further on.

        Returns:
            Ids, -1 where there is none to learn, and weights.
        """
        inside = self.columns < self.end
        columns = np.minimum(self.columns, self.row.size - 1)
        exists = inside & target_exists(self.row, depth)[columns]
        ids = np.where(exists, self.row.mtp_labels[depth - 1][columns], -1)
        return ids, np.where(inside, self.row.mtp_weights[depth - 1][columns], 0)


def target_exists(row: Row, depth: int) -> NDArray[np.bool_]:
    """Whether a position and the one ``depth`` further on lie in one document, ``[s]``.

    One document means that attention runs through it, and that it is one sample.
    """
    attention = np.cumsum(~row.reaches)
    found = np.zeros(row.size, dtype=np.bool_)
    if depth < row.size:
        found[:-depth] = attention[:-depth] == attention[depth:]
        if row.samples is not None:
            samples = row.samples
            found[:-depth] &= (samples[:-depth] == samples[depth:]) & (samples[:-depth] >= 0)
    return found


def documents_of(row: Row, eod: int) -> list[Document]:
    """The documents of a row, in order, without padding.

    Args:
        row: whole.
        eod: id that ends a document in a stream; rows of conversations tell theirs by the samples.
    """
    if row.samples is None:
        return _of_stream(row, eod)
    edges = np.flatnonzero(np.diff(row.samples)) + 1
    bounds = [0, *edges.tolist(), row.size]
    found: list[Document] = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        sample = int(row.samples[start])
        if sample >= 0:
            origin = row.origins.get(sample)
            found.append(Document(row, len(found) + 1, start, end, True, True, origin))
    return found


def _of_stream(row: Row, eod: int) -> list[Document]:
    """Documents of one token after the other; the last label may begin a document of its own."""
    stream = torch.from_numpy(np.append(row.tokens, row.labels[-1])).unsqueeze(0)
    numbers = documents_of_tokens(stream, eod)[0].numpy()
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    ends = [*starts[1:], row.size]
    return [
        Document(row, i + 1, start, end, start == 0, i == len(starts) - 1, row.origin)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
