"""The documents of a source, and the parts of them that samples hold."""

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
        prefix: the dataset.
        first: first token of the split in the file.
        tokens: tokens of the split.
        data: the flags of the run, which say how addresses of object storage are read.

    Attributes:
        starts: ``[D + 1]``, first token in the file of each document, then the end of the file.
        packed_starts: tells where the documents that packing keeps whole start in the split.
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
        # torch comes with it, for which nobody should wait whose data is on a disk.
        from megatron_ext.text.data.storage import index_of

        return index_of(self._data, self.prefix)

    def length(self, document: int) -> int:
        return int(self.starts[document + 1] - self.starts[document])

    def range_of(self, document: int) -> tuple[int, int]:
        """Return first token and end of a document in the circle of the split, as far as inside.

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
        """Return tokens from a place in the file on."""
        if is_address(self.prefix):
            from megatron_ext.text.data.storage import open_tokens

            span = open_tokens(self._data, self.prefix, 0, None)
        else:
            span = open_span(self.prefix, 0, None)
        tokens: Array = span.read(np.array([begin], dtype=np.int64), length)[0]
        return tokens


@dataclass(frozen=True)
class Rows:
    """Parts of documents in samples, ordered by sample and place; all are ``[r]`` int64.

    Attributes:
        samples: number of the sample in the run.
        columns: place of the part in the sample.
        sources: index of the source in the order.
        documents: number of the document in its dataset.
        begins: first token of the part in the document.
        lengths: tokens of the part.
    """

    samples: Ints
    columns: Ints
    sources: Ints
    documents: Ints
    begins: Ints
    lengths: Ints

    def of(self, chosen: Array) -> Rows:
        """Return the rows that an index or a mask chooses."""
        return Rows(*(getattr(self, each.name)[chosen] for each in dataclasses.fields(self)))


def joined(parts: Sequence[Rows]) -> Rows:
    """Return all rows of ``parts``, ordered by sample and place."""
    names = [each.name for each in dataclasses.fields(Rows)]
    rows = Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    return rows.of(np.lexsort((rows.columns, rows.samples)))


def parts_of(pieces: Pieces, sample: int, source: int, documents: Documents) -> Rows:
    """Cut the pieces of one source at its documents; ``sample`` is that of the first row."""
    own = pieces.sources == source
    rows = pieces.rows[own]
    columns = pieces.columns[own]
    begins = pieces.begins[own]
    lengths = pieces.lengths[own]
    # A piece that passes the end of the circle goes on at its beginning.
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
    at = np.repeat(np.arange(len(rows)), counts)
    number = first[at] + np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(begins[at], documents.starts[number])
    high = np.minimum(ends[at], documents.starts[number + 1])
    kept = np.flatnonzero(low < high)
    at = at[kept]
    number = number[kept]
    low = low[kept]
    high = high[kept]
    return Rows(
        samples=sample + rows[at],
        columns=columns[at] + low - begins[at],
        sources=np.full(len(at), source, dtype=np.int64),
        documents=number,
        begins=low - documents.starts[number],
        lengths=high - low,
    )
