"""The documents of one or several indexed datasets, numbered consecutively, and read in blocks.

Tokens pass through memory block by block, so datasets of any size can be examined. Only a few
numbers are kept for each document.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from megatron_ext.data.indexed import (
    SCAN_ITEMS,
    Array,
    Index,
    bin_path,
    byte_bar,
    read_index,
    readable,
)
from megatron_ext.data.permutation import Ints, key_of, permute
from megatron_ext.data.token_spans import tokens_before

_AT_ONCE = 1 << 16
"""Number of documents whose file positions are computed at once."""


@dataclass(frozen=True)
class Block:
    """Consecutive selected documents of one dataset.

    Attributes:
        tokens: the documents' tokens, one document after another, ``[t]``.
        edges: where each document begins in ``tokens``, and the end of the last one, ``[d + 1]``.
        first: position of the first document among all selected ones.
    """

    tokens: Array
    edges: Ints
    first: int

    def __iter__(self) -> Iterator[tuple[int, Array]]:
        """Yield each document's position among the selected ones, and its tokens."""
        edges = self.edges.tolist()
        for i in range(len(edges) - 1):
            yield self.first + i, self.tokens[edges[i] : edges[i + 1]]


class Documents:
    """The documents of datasets, or a random sample of them.

    A document's position is its index among them, from 0.

    Args:
        prefixes: paths of the datasets without ``.bin``; all have passed `check_indexed_dataset`.
        sample: number of documents to draw, by ``seed``; None for all. With the same seed, a larger
            sample contains each smaller one.
    """

    def __init__(self, prefixes: Sequence[str], *, sample: int | None = None, seed: int = 0):
        self.prefixes = list(prefixes)
        self._indices = [read_index(prefix) for prefix in self.prefixes]
        counts = [len(index.documents) - 1 for index in self._indices]
        self._firsts: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._seed = seed
        self.available = int(self._firsts[-1])
        self._chosen: Ints | None = None
        if sample is not None and sample < self.available:
            self._chosen = self._draw(self.available, sample, "documents")

    @property
    def common_dtype(self) -> np.dtype[Any]:
        """Return a dtype that can hold the tokens of all datasets."""
        return np.result_type(*(index.dtype for index in self._indices))

    def __len__(self) -> int:
        return self.available if self._chosen is None else len(self._chosen)

    def _draw(self, count: int, sample: int, purpose: str) -> Ints:
        """Return ``sample`` different integers below ``count``, in ascending order.

        The seed and ``purpose``, any label, determine the draw; each label has its own sample.
        """
        numbers = np.arange(min(sample, count), dtype=np.int64)
        if sample >= count:
            return numbers
        return np.sort(permute(numbers, count, key_of(self._seed, purpose)))

    def some(self, positions: Ints, count: int, purpose: str) -> Ints:
        """Return ``count`` of the positions (or all if there are fewer), in ascending order.

        The seed and ``purpose``, any label, determine the draw; each label has its own sample.
        """
        return positions[self._draw(len(positions), count, purpose)]

    def place(self, position: int) -> tuple[str, int]:
        """Return the prefix of a document's dataset, and the document's number in it."""
        number = position if self._chosen is None else int(self._chosen[position])
        dataset = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.prefixes[dataset], number - int(self._firsts[dataset])

    def lengths(self) -> Ints:
        """Return the number of tokens of each document, ``[documents]``."""
        lengths = [ends - begins for _, _, begins, ends in self._extents(None)]
        return np.concatenate(lengths) if lengths else np.zeros(0, np.int64)

    def blocks(
        self, what: str, positions: Ints | None = None, max_tokens: int = SCAN_ITEMS
    ) -> Iterator[Block]:
        """Yield documents in blocks of about ``max_tokens`` tokens, and show a progress bar.

        Args:
            what: the label of the progress bar.
            positions: the documents to read, in ascending order; None for all. If given,
                `Block.first` is an index in this array.
        """
        total = sum(
            int((ends - begins).sum()) * self._indices[dataset].dtype.itemsize
            for dataset, _, begins, ends in self._extents(positions)
        )
        with ExitStack() as stack:
            bar = stack.enter_context(byte_bar(what, total))
            opened: dict[int, BinaryIO] = {}
            for dataset, first, begins, ends in self._extents(positions):
                path = bin_path(self.prefixes[dataset])
                dtype = self._indices[dataset].dtype
                with readable(path):
                    if dataset not in opened:
                        opened[dataset] = stack.enter_context(open(path, "rb"))
                    for low, high in _cuts(ends - begins, max_tokens):
                        stream = opened[dataset]
                        tokens = _read(stream, dtype, begins[low:high], ends[low:high])
                        lengths = ends[low:high] - begins[low:high]
                        edges = np.concatenate([[0], np.cumsum(lengths)])
                        yield Block(tokens, edges, first + low)
                        bar.update(tokens.nbytes)

    def read(self, position: int, max_tokens: int) -> Array:
        """Return the first tokens of a document, ``[at most max_tokens]``."""
        ((dataset, _, begins, ends),) = self._extents(np.array([position], dtype=np.int64))
        path = bin_path(self.prefixes[dataset])
        dtype = self._indices[dataset].dtype
        stop = np.minimum(ends, begins + max_tokens)
        with readable(path), open(path, "rb") as stream:
            return _read(stream, dtype, begins, stop)

    def _extents(self, positions: Ints | None) -> Iterator[tuple[int, int, Ints, Ints]]:
        """Yield where the documents at ``positions`` (None: all) lie in the datasets' files.

        Each item is about some successive documents, all of one dataset. It is (the dataset's
        index, the index in ``positions`` of the first of these documents, the index in the file of
        each document's first token, and of the token after its last one).
        """
        count = len(self) if positions is None else len(positions)
        for start in range(0, count, _AT_ONCE):
            stop = min(start + _AT_ONCE, count)
            some = np.arange(start, stop) if positions is None else positions[start:stop]
            numbers = some if self._chosen is None else self._chosen[some]
            cuts = np.searchsorted(numbers, self._firsts)
            for dataset, index in enumerate(self._indices):
                low = int(cuts[dataset])
                high = int(cuts[dataset + 1])
                if low < high:
                    own = numbers[low:high] - self._firsts[dataset]
                    yield dataset, start + low, _begins(index, own), _begins(index, own + 1)


def _begins(index: Index, documents: Ints) -> Ints:
    """Return the position of each document's first token in the dataset's file.

    ``documents`` are numbers of documents, from 0. The number after the last document stands for
    the end of the file.
    """
    sequences = index.documents[documents]
    if not len(index.offsets):
        return np.zeros(len(documents), np.int64)
    last = len(index.offsets) - 1
    begins = index.offsets[np.minimum(sequences, last)] // index.dtype.itemsize
    return np.where(sequences > last, tokens_before(index, last + 1), begins)


def _cuts(lengths: Ints, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, end) of documents that together have at most ``max_tokens`` tokens.

    A longer document is a range of its own.
    """
    ends = np.cumsum(lengths)
    low, done = 0, 0
    while low < len(lengths):
        high = max(low + 1, int(np.searchsorted(ends, done + max_tokens, side="right")))
        yield low, high
        low = high
        done = int(ends[high - 1])


def _read(stream: BinaryIO, dtype: np.dtype[Any], begins: Ints, ends: Ints) -> Array:
    """Read the tokens from each of ``begins`` up to each of ``ends`` in a file, and join them.

    Adjacent ranges are read in one call.
    """
    breaks = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts = begins[np.concatenate([[0], breaks])].tolist()
    lasts = ends[np.concatenate([breaks - 1, [len(ends) - 1]])].tolist()
    pieces = []
    for first, last in zip(firsts, lasts, strict=True):
        stream.seek(first * dtype.itemsize, os.SEEK_SET)
        pieces.append(np.fromfile(stream, dtype, last - first))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
