"""Best-fit packing, which turns a block of the token stream into samples that cut few documents.

Concatenation cuts the stream every ``length`` tokens, which cuts most documents. Packing puts whole
documents where they fit best ("best-fit decreasing", Ding et al. 2024, arXiv:2404.10830). As in
that paper, a document longer than a sample is cut into whole samples and a remainder, and the
remainder is packed.

In the paper the number of samples depends on the packing, and gaps are padded. Here a block is
packed into exactly the samples that its tokens fill. Documents that fit nowhere as a whole are cut
and fill the gaps, the largest gap first, so that there are few cuts. Hence samples have no padding,
an epoch has as many samples as with concatenation, and it reads every token once. Only the last
document of a sample can be cut at its end; all others keep their end-of-document token.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.indexed import Index
from megatron_ext.data.permutation import Ints

DocumentStarts = Callable[[int, int], Ints]
"""A function ``(begin, end)`` that returns the positions, from ``begin`` to ``end`` - 1 and in
ascending order, of the tokens with which documents start.
"""


class IndexedDocuments:
    """Finds where documents start in a range of tokens of an indexed dataset: a `DocumentStarts`.

    Every sequence of the dataset counts as a document.

    Args:
        read: opens the index, which is memory-mapped; called once in each process.
        first: index in the dataset of the token that is token 0 here.
    """

    def __init__(self, read: Callable[[], Index], first: int) -> None:
        self._read = read
        self._first = first
        self._index: Index | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}

    def __call__(self, begin: int, end: int) -> Ints:
        if self._index is None:
            self._index = self._read()
        offsets = self._index.offsets
        size = self._index.dtype.itemsize
        # numpy's search would copy the whole array, because the file does not align it.
        a, b = (bisect.bisect_left(offsets, (self._first + token) * size) for token in (begin, end))
        starts: Ints = np.unique(offsets[a:b].astype(np.int64)) // size - self._first
        return starts


@dataclass(frozen=True)
class PackedBlock:
    """The samples of a block; sample i consists of pieces ``firsts[i]`` to ``firsts[i + 1]`` - 1.

    Attributes:
        firsts: index of each sample's first piece, then the number of pieces, ``[samples + 1]``.
        begins: first token of each piece, counted from the block's first token, ``[pieces]``.
        lengths: tokens of each piece, ``[pieces]``.
        goes_on: whether a sample's last piece ends before its document does, ``[samples]``.
    """

    firsts: NDArray[np.int32]
    begins: NDArray[np.int32]
    lengths: NDArray[np.int32]
    goes_on: NDArray[np.bool_]

    def pieces_of(self, samples: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the pieces of some samples, one sample after another.

        Returns:
            The number of pieces of each sample; then, for each piece, its first position in the
            sample, its first token (counted from the block's) and its number of tokens.
        """
        counts = (self.firsts[samples + 1] - self.firsts[samples]).astype(np.int64)
        before = np.cumsum(counts) - counts
        pieces = np.arange(counts.sum()) + np.repeat(self.firsts[samples] - before, counts)
        lengths = self.lengths[pieces].astype(np.int64)
        passed = np.cumsum(lengths) - lengths
        columns = passed - np.repeat(passed[before], counts)
        return counts, columns, self.begins[pieces].astype(np.int64), lengths


def best_fit(sizes: Ints, capacity: int, count: int) -> Ints:
    """Put each item, largest first, into the fullest of ``count`` bins that has room for it.

    Each bin has room for a total size of ``capacity``. Ties, between bins as between items, go to
    the lower index. Return the index of each item's bin, ``[items]``; -1 if no bin has room.
    """
    bin_of = np.full(len(sizes), -1, dtype=np.int64)
    # Room and index of each bin, packed into one integer and sorted in ascending order.
    bins = [capacity * count + number for number in range(count)]
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        index = bisect.bisect_left(bins, size * count)
        if index == len(bins):
            continue
        room, number = divmod(bins.pop(index), count)
        bin_of[item] = number
        if room > size:
            bisect.insort(bins, (room - size) * count + number)
    return bin_of


def pack_block(starts: Ints, end: int, length: int, *, ends_document: bool) -> PackedBlock:
    """Pack consecutive tokens into samples of ``length`` tokens, without gaps.

    Args:
        starts: position of each document's first token, ``[documents]``. The first entry is where
            the block begins, even if its document began before the block.
        end: position after the block's last token; ``end - starts[0]`` is a multiple of ``length``.
        ends_document: whether the last document ends with the last token; otherwise it continues.
    """
    sizes = np.diff(starts, append=end)
    whole, rests = np.divmod(sizes, length)
    chunks = int(whole.sum())
    samples = int(sizes.sum()) // length
    nth = np.arange(chunks) - np.repeat(np.cumsum(whole) - whole, whole)
    chunk_begins = np.repeat(starts, whole) + nth * length
    is_end = (nth + 1 == np.repeat(whole, whole)) & (np.repeat(rests, whole) == 0)
    items = np.flatnonzero(rests)
    open_item = -1 if ends_document or not rests[-1] else len(items) - 1
    if chunks and not ends_document and not rests[-1]:
        is_end[-1] = False
    begins, bins, lengths, last = _placed(
        (starts + whole * length)[items], rests[items], length, samples - chunks, open_item
    )
    begins = np.concatenate([chunk_begins, begins]) - starts[0]
    bins = np.concatenate([np.arange(chunks), bins + chunks])
    lengths = np.concatenate([np.full(chunks, length), lengths])
    last = np.concatenate([~is_end, last])
    order = np.lexsort((begins, last, bins))
    firsts = np.searchsorted(bins[order], np.arange(samples + 1))
    return PackedBlock(
        firsts.astype(np.int32),
        begins[order].astype(np.int32),
        lengths[order].astype(np.int32),
        last[order][firsts[1:] - 1],
    )


def _placed(
    begins: Ints, sizes: Ints, length: int, samples: int, open_item: int
) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Place items, which are shorter than a sample, into samples; cut those that fit nowhere whole.

    An item is a document, or what remains of one.

    Args:
        begins, sizes: first token and number of tokens of each item, ``[items]``.
        length: tokens of a sample.
        samples: number of samples; together the items fill them exactly.
        open_item: the item whose document continues after the block; -1 if there is none.

    Returns:
        For each piece of an item its first token, the sample that holds it, its number of tokens,
        and whether it ends before its document does. A sample has at most one such piece.
    """
    bins = best_fit(sizes, length, samples)
    whole = np.flatnonzero(bins >= 0)
    others = np.flatnonzero(bins < 0)
    goes_on = whole == open_item
    gaps = length - np.bincount(bins[whole], sizes[whole], samples).astype(np.int64)
    if not gaps.any():
        return begins[whole], bins[whole], sizes[whole], goes_on
    # The last gap ends with the end of a document, so it may come before a piece that is cut.
    after = np.zeros(samples, dtype=np.bool_)
    after[bins[whole[goes_on]]] = True
    gap_bins = np.lexsort((-gaps, after))
    gap_bins = gap_bins[gaps[gap_bins] > 0]
    others = others[np.lexsort((-sizes[others], others == open_item))]
    ends = np.cumsum(sizes[others])
    gap_ends = np.cumsum(gaps[gap_bins])
    cuts = np.union1d(ends, gap_ends)
    cut_begins = np.concatenate([[0], cuts[:-1]])
    item = np.searchsorted(ends, cut_begins, side="right")
    gap = np.searchsorted(gap_ends, cut_begins, side="right")
    item_begins = begins[others] - (ends - sizes[others])
    is_open = ~np.isin(cuts, ends) | (others[item] == open_item)
    return (
        np.concatenate([begins[whole], item_begins[item] + cut_begins]),
        np.concatenate([bins[whole], gap_bins[gap]]),
        np.concatenate([sizes[whole], cuts - cut_begins]),
        np.concatenate([goes_on, is_open]),
    )
