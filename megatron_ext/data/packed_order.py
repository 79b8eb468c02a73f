"""The order of packed samples as a function; a block is packed only when its samples are read.

Each epoch cuts a source into windows, as in `order`. Some hundreds of adjacent windows form a
block. `packing` rearranges its tokens into as many samples as it has windows, so that few documents
are cut. The epoch's key permutes the blocks, and the samples of `BLOCKS` consecutive blocks are
permuted together. To look up a sample, only its own block is packed. So nothing is built before the
first sample, and memory does not grow with the data. A sample number stands for the same tokens on
every rank and in every process, and an epoch reads every token of its windows once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.order import Pieces, SampleOrder, Stage
from megatron_ext.data.packing import DocumentStarts, PackedBlock, pack_block
from megatron_ext.data.permutation import Ints, Words, derived, permute, unpermute

SAMPLES = 1024
FEWEST = 128
TOKENS = 1 << 22
"""About how many tokens a block has; a block is a range of windows that are packed together.

However long a sample is, a block has at least `FEWEST` and at most `SAMPLES` samples.
"""
BLOCKS = 8
"""Number of blocks, adjacent in the epoch's permuted order, whose samples are permuted together."""
_BLOCK_ORDER, _SAMPLE_ORDER = 4, 5
"""The ``purpose`` with which `derived` makes the keys that permute an epoch's blocks, and the one
for the keys that permute the samples of `BLOCKS` blocks.
"""


@dataclass(frozen=True)
class PackedPieces(Pieces):
    """Pieces of packed samples; each piece belongs to one document.

    Attributes:
        goes_on: whether a row's last piece ends before its document does, ``[rows]``.
    """

    goes_on: NDArray[np.bool_]


@dataclass(frozen=True)
class Cuts:
    """Counts of the documents in some blocks, and of those that are cut.

    Attributes:
        documents: documents that begin in the blocks.
        longer: documents longer than a sample, which are always cut.
        packed: documents that packing spreads over several samples.
        concatenated: documents that plain concatenation would spread over several samples.
    """

    documents: int
    longer: int
    packed: int
    concatenated: int

    def __add__(self, other: Cuts) -> Cuts:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Cuts(*(a + b for a, b in pairs))


class PackedOrder(SampleOrder):
    """A `SampleOrder` whose samples are packed; each is as long as a window.

    Args:
        documents: by name of source, the function that tells where its documents start. Only the
            sources of the samples that will be looked up need one.
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        stages: Sequence[Stage],
        window: int,
        seed: int,
        documents: Mapping[str, DocumentStarts],
    ) -> None:
        super().__init__(tokens, stages, window, seed)
        self._documents = documents
        self.block_samples = min(SAMPLES, max(FEWEST, TOKENS // window))
        self._packed: dict[int, OrderedDict[tuple[int, int], PackedBlock]] = {}

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"packing": "best_fit"}

    def with_stages(self, stages: Sequence[Stage]) -> PackedOrder:
        tokens = {source.name: source.tokens for source in self.sources}
        return PackedOrder(tokens, stages, self.window, self.seed, self._documents)

    def locate(self, start: int, stop: int) -> PackedPieces:
        windows = super().locate(start, stop)
        epochs, blocks, samples = self._places(windows.sources, windows.begins)
        pieces: list[list[Ints]] = []
        goes_on = np.empty(stop - start, dtype=np.bool_)
        keys, which = np.unique(
            np.stack([windows.sources, epochs, blocks]), axis=1, return_inverse=True
        )
        for number, (source, epoch, block) in enumerate(keys.T.tolist()):
            packed, first = self.packed_block(source, epoch, block)
            # numpy 2.0 keeps the axis in `which`, other versions flatten it.
            own = np.flatnonzero(which.reshape(-1) == number)
            counts, columns, begins, lengths = packed.pieces_of(samples[own])
            begins = (first + begins) % self.sources[source].tokens
            pieces.append([np.repeat(own, counts), columns, begins, lengths])
            goes_on[own] = packed.goes_on[samples[own]]
        arrays = [np.concatenate(each) for each in zip(*pieces, strict=True)]
        order = np.argsort(arrays[0], kind="stable")
        rows, columns, begins, lengths = (each[order] for each in arrays)
        return PackedPieces(rows, columns, windows.sources[rows], begins, lengths, goes_on)

    def _begins(self, sources: Ints, windows: Ints, offsets: Ints) -> Ints:
        """Return ``windows``, the positions of samples in the reading order, unchanged.

        `SampleOrder` would return first tokens here. The tokens of a packed sample are known only
        after packing, in `locate`, which starts from these positions.
        """
        return windows

    def _places(self, sources: Ints, windows: Ints) -> tuple[Ints, Ints, Ints]:
        """Return where packed samples are: epoch, block in the epoch, and index in the block.

        A block is a range of samples that are packed together.

        Args:
            sources: the source of each sample.
            windows: the position of each sample in the order in which its source is read, counted
                through all epochs.
        """
        counts = self._windows[sources]
        keys = self._keys[sources]
        epochs, places = np.divmod(windows, counts)
        groups, inside = np.divmod(places, self.block_samples * BLOCKS)
        sizes, group_keys = self._groups(counts, keys, epochs, groups)
        nth, samples = np.divmod(permute(inside, sizes, group_keys), self.block_samples)
        nth += groups * BLOCKS
        # The last block may be shorter. It keeps its place at the end.
        whole = counts // self.block_samples
        is_whole = nth < whole
        blocks = nth.copy()
        block_keys: Words = derived(keys, epochs, _BLOCK_ORDER)[is_whole]
        blocks[is_whole] = permute(nth[is_whole], whole[is_whole], block_keys)
        return epochs, blocks, samples

    def windows_at(self, source: int, epochs: Ints, places: Ints) -> Ints:
        """Return when packed samples are read: their positions ``[m]`` in a source's reading order.

        Positions are counted through all epochs, from 0.

        Args:
            source: index of the source.
            epochs: epoch of each sample, ``[m]``.
            places: index of each sample in its epoch before any permutation, ``[m]``: the number of
                its block times `block_samples`, plus its index in the block.
        """
        own = self.sources[source]
        keys = np.full(len(epochs), own.key, dtype=np.uint64)
        nth, samples = np.divmod(places, self.block_samples)
        whole = own.windows // self.block_samples
        is_whole = nth < whole
        block_keys: Words = derived(keys, epochs, _BLOCK_ORDER)[is_whole]
        nth[is_whole] = unpermute(nth[is_whole], whole, block_keys)
        groups, inside = np.divmod(nth, BLOCKS)
        sizes, group_keys = self._groups(own.windows, keys, epochs, groups)
        within = unpermute(inside * self.block_samples + samples, sizes, group_keys)
        windows: Ints = epochs * own.windows + groups * self.block_samples * BLOCKS + within
        return windows

    def _groups(
        self, counts: Ints | int, keys: Words, epochs: Ints, groups: Ints
    ) -> tuple[Ints, Words]:
        """Return how many samples each group of `BLOCKS` blocks has, and the key to permute these.

        Args:
            counts: number of samples in an epoch of each group's source.
            keys: key of each group's source.
            epochs: epoch of each group.
            groups: number of each group in its epoch.
        """
        most = self.block_samples * BLOCKS
        sizes: Ints = np.minimum(counts - groups * most, most)
        return sizes, derived(derived(keys, epochs, _SAMPLE_ORDER), groups)

    def packed_block(self, source: int, epoch: int, block: int) -> tuple[PackedBlock, int]:
        """Return a block of an epoch after packing, and where its first token is in the source."""
        first, end = self._range(source, epoch, block)
        blocks = self._packed.setdefault(source, OrderedDict())
        if (epoch, block) in blocks:
            blocks.move_to_end((epoch, block))
            return blocks[epoch, block], first
        starts, ends_document = self._document_starts(source, first, end)
        packed = pack_block(starts, end, self.window, ends_document=ends_document)
        blocks[epoch, block] = packed
        if len(blocks) > BLOCKS + 1:
            blocks.popitem(last=False)
        return packed, first

    def _range(self, source: int, epoch: int, block: int) -> tuple[int, int]:
        """Return where a block begins in its source, and where it stops, in tokens.

        The stop is the position after the last token. It may lie past the end of the source; the
        block then wraps around.
        """
        tokens = self.sources[source].tokens
        windows = self.sources[source].windows
        shift = int(self.first_tokens(source, np.array([epoch]))[0])
        begin = block * self.block_samples
        first = (shift + begin * self.window) % tokens
        return first, first + min(self.block_samples, windows - begin) * self.window

    def cuts(self, source: int, most: int) -> Cuts:
        """Count the cut documents in up to ``most`` blocks, spread over a source's first epoch."""
        blocks = -(-self.sources[source].windows // self.block_samples)
        total = Cuts(0, 0, 0, 0)
        for block in np.unique(np.linspace(0, blocks - 1, most).astype(int)).tolist():
            first, end = self._range(source, 0, block)
            starts, ends_document = self._document_starts(source, first, end)
            packed, _ = self.packed_block(source, 0, block)
            begins = starts - first
            sizes = np.diff(starts, append=end)
            own = np.searchsorted(begins, packed.begins, side="right") - 1
            is_cut = np.bincount(own, minlength=len(starts)) > 1
            crosses = begins // self.window != (begins + sizes - 1) // self.window
            if not ends_document:
                is_cut[-1] = crosses[-1] = True
            begun = np.ones(len(starts), dtype=np.bool_)
            begun[0] = self._is_start(source, first)
            counted = (begun, sizes > self.window, is_cut, crosses)
            total += Cuts(*(int((begun & each).sum()) for each in counted))
        return total

    def _document_starts(self, source: int, first: int, end: int) -> tuple[Ints, bool]:
        """Return where documents start in tokens ``first`` to ``end`` - 1 of a source.

        Also return whether a document ends with the last of these tokens. The first token always
        counts as a start. The range may wrap around the source's end.
        """
        starts = self._documents[self.sources[source].name]
        tokens = self.sources[source].tokens
        documents = [np.array([first]), starts(first, min(end, tokens))]
        if end > tokens:
            documents.append(starts(0, end - tokens) + tokens)
        return np.unique(np.concatenate(documents)), self._is_start(source, end % tokens)

    def _is_start(self, source: int, token: int) -> bool:
        """Return whether a document starts at a token; the source's first token always counts."""
        starts = self._documents[self.sources[source].name]
        return token == 0 or len(starts(token, token + 1)) > 0
