"""Reads the documents of a source, and finds which parts of documents a run's samples hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.data.indexed import Array, Index, is_address, read_index
from megatron_ext.data.order import Pieces
from megatron_ext.data.packing import IndexedDocuments
from megatron_ext.data.permutation import Ints
from megatron_ext.data.token_spans import open_span
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.data.config import DataConfig


class Documents:
    """The documents of one source.

    Args:
        prefix: the dataset's path without suffix.
        first: index, in the dataset's file, of the first token of the training split.
        tokens: number of tokens in the split.
        data: the run's flags for data, which say how to read addresses of object storage.

    Attributes:
        starts: ``[D + 1]``, index in the file of each document's first token, and at last the
            number of tokens in the file.
        packed_starts: function ``(begin, end)`` that returns where documents start in this range of
            tokens, as packing needs it; all positions count from the split's first token.
    """

    def __init__(self, prefix: str, first: int, tokens: int, data: DataConfig) -> None:
        self.prefix = prefix
        self.first = first
        self.tokens = tokens
        self._data = data
        self.packed_starts = IndexedDocuments(self._index, first)
        index = self._index()
        edges = np.zeros(len(index.lengths) + 1, dtype=np.int64)
        np.cumsum(index.lengths, out=edges[1:])
        self.starts: Ints = edges[index.documents]
        if first + tokens > self.starts[-1]:
            raise DataError(
                f"{prefix} holds {self.starts[-1]} tokens, but the run read up to token "
                f"{first + tokens}; the dataset was changed since, so give the old files."
            )

    def _index(self) -> Index:
        if not is_address(self.prefix):
            return read_index(self.prefix)
        # Imported late, since it imports torch, which data on a disk does not need.
        from megatron_ext.text.data.storage import index_of

        return index_of(self._data, self.prefix)

    def length(self, document: int) -> int:
        return int(self.starts[document + 1] - self.starts[document])

    def range_of(self, document: int) -> tuple[int, int]:
        """Return begin and end of the part of a document that lies in the training split.

        Positions count from the split's first token. Begin is not below end if there is no part.

        Raises:
            ConfigError: there is no such document.
        """
        if not 0 <= document < len(self.starts) - 1:
            raise ConfigError(
                f"`--document` ({self.prefix} {document}) must be from 0 to "
                f"{len(self.starts) - 2}, the last document of the dataset."
            )
        begin, end = (int(self.starts[i]) - self.first for i in (document, document + 1))
        return max(0, begin), min(self.tokens, end)

    def read(self, begin: int, length: int) -> Array:
        """Return ``length`` tokens from position ``begin`` of the file on."""
        if is_address(self.prefix):
            from megatron_ext.text.data.storage import open_tokens

            span = open_tokens(self._data, self.prefix, 0, None)
        else:
            span = open_span(self.prefix, 0, None)
        tokens: Array = span.read(np.array([begin], dtype=np.int64), length)[0]
        return tokens


@dataclass(frozen=True)
class Rows:
    """Parts of documents, each within one sample, ordered by sample and by position in the sample.

    Entry i of all attributes, each ``[r]`` int64, describes one part.

    Attributes:
        samples: number of the sample in the run.
        columns: position of the part in the sample.
        sources: index of the source in `SampleOrder.sources`.
        documents: number of the document in its dataset.
        begins: position in the document of the part's first token.
        lengths: number of tokens of the part.
    """

    samples: Ints
    columns: Ints
    sources: Ints
    documents: Ints
    begins: Ints
    lengths: Ints

    def of(self, chosen: Array) -> Rows:
        """Return the parts that ``chosen``, an array of indices or a mask, selects."""
        return Rows(*(getattr(self, each.name)[chosen] for each in dataclasses.fields(self)))


def joined(parts: Sequence[Rows]) -> Rows:
    """Return all rows of ``parts``, ordered by sample and position."""
    names = [each.name for each in dataclasses.fields(Rows)]
    rows = Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    return rows.of(np.lexsort((rows.columns, rows.samples)))


def parts_of(pieces: Pieces, sample: int, source: int, documents: Documents) -> Rows:
    """Return the parts of one source's documents in some consecutive samples.

    Args:
        pieces: where the tokens of the samples come from. Pieces of this source are cut at the
            boundaries of documents; those of other sources are ignored.
        sample: index in the run of the first sample, whose pieces have row 0.
        source: index of the source in `SampleOrder.sources`.
        documents: the documents of the source.
    """
    own = pieces.sources == source
    rows = pieces.rows[own]
    columns = pieces.columns[own]
    begins = pieces.begins[own]
    lengths = pieces.lengths[own]
    # A piece that crosses the end of the circle continues at its beginning.
    inside = np.minimum(lengths, documents.tokens - begins)
    over = np.flatnonzero(inside < lengths)
    rows, columns = (
        np.concatenate([x, y]) for x, y in ((rows, rows[over]), (columns, (columns + inside)[over]))
    )
    begins = np.concatenate([begins, over * 0])
    lengths = np.concatenate([inside, (lengths - inside)[over]])
    begins = begins + documents.first
    ends = begins + lengths
    first = np.searchsorted(documents.starts, begins, side="right") - 1
    counts = np.searchsorted(documents.starts, ends, side="left") - first
    index = np.repeat(np.arange(len(rows)), counts)
    number = first[index] + np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(begins[index], documents.starts[number])
    high = np.minimum(ends[index], documents.starts[number + 1])
    kept = np.flatnonzero(low < high)
    index = index[kept]
    number = number[kept]
    low = low[kept]
    high = high[kept]
    return Rows(
        samples=sample + rows[index],
        columns=columns[index] + low - begins[index],
        sources=np.full(len(index), source, dtype=np.int64),
        documents=number,
        begins=low - documents.starts[number],
        lengths=high - low,
    )
