"""Reads batches of samples for ``--data-order direct``, which needs no prebuilt index of samples.

A sample is a window of the token stream of a split, and its labels are the same window shifted by
one token. Masks and positions are made as in megatron-core's GPTDataset. The difference is which
documents share a sample. GPTDataset shuffles documents before it cuts the stream into samples, and
for this needs an index of all documents in shuffled order. Here the stream is cut in the order of
the file, at different places in each epoch, and the windows are shuffled. The documents of a sample
are therefore neighbours in the file: if the file is sorted, for example by web site, each sample
comes from one site. Shuffle such a corpus before preprocessing, or keep documents apart with
``--reset-attention-mask``.

With ``--document-packing best_fit``, documents are grouped into samples so that few are cut
(`data.packed_order`). If a sample ends within a document, its last label is the document's next
token. If a document ends there, the last position has no label.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_ext.data.indexed import Array
from megatron_ext.data.loader import StepDataset
from megatron_ext.data.object_store import RemoteSpan
from megatron_ext.data.order import Pieces
from megatron_ext.data.packed_order import PackedOrder, PackedPieces
from megatron_ext.data.permutation import Ints
from megatron_ext.data.token_spans import TokenSpan
from megatron_ext.text.data.fim import FillInTheMiddle
from megatron_ext.text.data.inspect import check_ids


class Order(Protocol):
    """An order of samples, such as `SampleOrder`: it tells which tokens make up a sample."""

    def seq_length(self, number: int) -> int:
        """Return the number of tokens of sample ``number``."""
        ...

    def locate(self, start: int, stop: int) -> Pieces:
        """Return the pieces of text that make up the samples from ``start`` to ``stop`` - 1."""
        ...


class EveryWindow:
    """The order of one pass over the data: all windows of all sources, one source after another.

    A window has ``seq_length`` tokens. The last tokens of a source that do not fill a window are
    left out.
    """

    def __init__(self, spans: Sequence[TokenSpan], seq_length: int) -> None:
        self._length = seq_length
        # A window needs one token more than it has positions: its last label.
        counts = [max(0, span.tokens - 1) // seq_length for span in spans]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def seq_length(self, number: int) -> int:
        return self._length

    def locate(self, start: int, stop: int) -> Pieces:
        numbers = np.arange(start, stop, dtype=np.int64)
        sources = np.searchsorted(self._ends, numbers, side="right").astype(np.int64)
        firsts = np.concatenate([[0], self._ends])[sources]
        begins = (numbers - firsts) * self._length
        rows = np.arange(stop - start, dtype=np.int64)
        return Pieces(rows, rows * 0, sources, begins, np.full_like(rows, self._length))


@dataclass(frozen=True)
class Marks:
    """The ids and flags that determine loss masks and positions.

    Attributes:
        eod: the id of the end of a document.
        pad: the id that is treated as padding wherever it occurs; negative if there is none.
        vocab_size: ids must be smaller than this.
        eod_mask_loss: whether positions whose input is ``eod`` have no loss.
        reset_position_ids: whether positions start again after each end of document.
    """

    eod: int
    pad: int
    vocab_size: int
    eod_mask_loss: bool
    reset_position_ids: bool


def _collated(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


class DirectDataset(StepDataset):
    """The samples of one split, indexed by their number in the run.

    A data loader requests the numbers of a whole batch, and gets the collated batch.

    Args:
        order: finds the tokens of a sample.
        spans: the tokens of each source, by the index that the order gives to the source.
        marks: the ids and flags that determine loss masks and positions.
        size: number of samples; the order may have more.
        fim: moves the middle of documents to their end; None leaves them as they are.

    Attributes:
        is_training: whether this is the train split, which a resumed run continues where it
            stopped.
    """

    is_training = False

    def __init__(
        self,
        order: Order,
        spans: Mapping[int, TokenSpan],
        marks: Marks,
        size: int,
        fim: FillInTheMiddle | None = None,
    ) -> None:
        self.order = order
        self.spans = spans
        self.marks = marks
        self.fim = fim
        self._size = size
        self.packs_documents = isinstance(order, PackedOrder)

    def __len__(self) -> int:
        return self._size

    @property
    def seq_length_of(self) -> Callable[[int], int] | None:
        """Return a function from a sample's number to its length.

        Return None for the order `EveryWindow`, all of whose samples have the same length.
        """
        return None if isinstance(self.order, EveryWindow) else self.order.seq_length

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.batch(number, number + 1).items()}

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        start = numbers[0]
        stop = numbers[-1] + 1
        if stop - start == len(numbers):
            return self.batch(start, stop)
        parts = [self.batch(number, number + 1) for number in numbers]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    @property
    def expect(self) -> Callable[[Sequence[int]], None] | None:
        """Return a function that prefetches samples, given their numbers.

        Return None if all data is local, where nothing needs to be prefetched.
        """
        remote = any(isinstance(span, RemoteSpan) for span in self.spans.values())
        return self._expect if remote else None

    def _expect(self, numbers: Sequence[int]) -> None:
        pieces = self.order.locate(numbers[0], numbers[-1] + 1)
        for source, span in self.spans.items():
            own = np.flatnonzero(pieces.sources == source)
            if isinstance(span, RemoteSpan) and len(own):
                span.expect(pieces.begins[own], pieces.lengths[own] + 1)

    @property
    def collate(self) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        """Return the identity: `__getitems__` already returns a collated batch."""
        return _collated

    def batch(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return a batch of the samples from ``start`` to ``stop`` - 1, all of the same length s.

        The mapping holds ``tokens``, ``labels`` and ``position_ids``, each ``[b, s]`` int64, and
        ``loss_mask``, ``[b, s]`` float32. A batch of packed samples also holds ``sample_ids``,
        ``[b, s]`` int64: for each position, the index of its document in the sample; -1 in padding.
        """
        tokens, labels, documents = self._read(start, stop)
        if self.fim is not None:
            # Both may be views of the same memory, and are changed in place.
            tokens = tokens.copy()
            labels = labels.copy()
            self.fim.permute_rows(tokens, labels, documents, start)
        if max(int(tokens.max()), int(labels.max())) >= self.marks.vocab_size:
            self._refuse_ids(start, stop)
        marks = self.marks
        rows = stop - start
        inputs = torch.from_numpy(tokens)
        mask = torch.ones(tokens.shape)
        if marks.eod_mask_loss:
            mask[inputs == marks.eod] = 0.0
        ends = tokens == marks.eod
        if documents is not None:
            ends[:, :-1] |= documents[:, 1:] != documents[:, :-1]
        if marks.reset_position_ids:
            positions = torch.from_numpy(positions_after(ends))
        else:
            positions = torch.arange(tokens.shape[1]).expand(rows, -1)
        targets = torch.from_numpy(labels)
        if marks.pad >= 0 or bool((targets[:, -1] < 0).any()):
            # As in GPTDataset: padding has no loss, and the id 0, which the embedding has.
            pad = marks.pad
            mask[(targets == pad) | (targets < 0)] = 0.0
            inputs = torch.where((inputs == pad) | (inputs < 0), 0, inputs)
            targets = torch.where((targets == pad) | (targets < 0), 0, targets)
        batch = {"tokens": inputs, "labels": targets, "loss_mask": mask, "position_ids": positions}
        if documents is not None:
            numbers = np.cumsum(ends, axis=1) - ends
            batch["sample_ids"] = torch.from_numpy(np.where(documents < 0, -1, numbers))
        return batch

    def _read(self, start: int, stop: int) -> tuple[Array, Array, Array | None]:
        """Return tokens, labels and document indices of samples ``start`` to ``stop`` - 1.

        Each is ``[b, s]``. Tokens and labels are -1 where a sample has none. A document index
        counts the documents of a packed sample from 0; without packing, return None for this array.
        """
        pieces = self.order.locate(start, stop)
        length = self.order.seq_length(start)
        rows = stop - start
        if isinstance(pieces, PackedPieces):
            return self._packed(pieces, length)
        if len(pieces.rows) == rows and bool((pieces.lengths == length).all()):
            text = np.empty((rows, length + 1), dtype=np.int64)
            self._fill(text, text, pieces, np.arange(rows), length)
            return text[:, :-1], text[:, 1:], None
        tokens = np.full((rows, length), -1, dtype=np.int64)
        labels = np.full((rows, length), -1, dtype=np.int64)
        for size in np.unique(pieces.lengths).tolist():
            for column in np.unique(pieces.columns[pieces.lengths == size]).tolist():
                own = np.flatnonzero((pieces.lengths == size) & (pieces.columns == column))
                there = slice(column, column + size)
                self._fill(tokens[:, there], labels[:, there], pieces, own, size)
        return tokens, labels, None

    def _packed(self, pieces: PackedPieces, length: int) -> tuple[Array, Array, Array]:
        """Return tokens, labels and document indices of packed samples, each ``[b, length]``.

        A document index counts the documents of a sample from 0. If a sample ends where a document
        ends, its last label is -1.
        """
        rows = len(pieces.goes_on)
        firsts = np.searchsorted(pieces.rows, np.arange(rows + 1))
        # Read one token more after each sample's last piece: it is a label if its document goes on.
        lengths = pieces.lengths.copy()
        lengths[firsts[1:] - 1] += 1
        sources = pieces.sources[firsts[:-1]]
        text = np.empty((rows, length + 1), dtype=np.int64)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            own = pieces.sources == source
            span = self.spans[source]
            ids = span.gather_ranges(pieces.begins[own], lengths[own])
            # Ids above the vocabulary are found later, but a negative id would look like padding.
            if ids.dtype.kind == "i" and ids.min() < 0:
                check_ids(span.name, ids, self.marks.vocab_size)
            text[sources == source] = ids.reshape(-1, length + 1)
        labels = text[:, 1:].copy()
        labels[~pieces.goes_on, -1] = -1
        number = np.arange(len(pieces.rows)) - firsts[pieces.rows]
        numbers = np.repeat(number, pieces.lengths).reshape(rows, length)
        return text[:, :-1], labels, numbers

    def _fill(self, tokens: Array, labels: Array, pieces: Pieces, own: Ints, length: int) -> None:
        """Copy pieces of text into ``tokens`` and, shifted by one token, into ``labels``.

        A piece is copied into the row of its sample. If ``tokens`` and ``labels`` are one array,
        each piece is copied only once, with the token that follows it (``length + 1`` tokens).
        ``own`` are the indices in ``pieces`` of the pieces to copy, all of ``length`` tokens.
        """
        sources = pieces.sources[own]
        present = sources[:1] if len(own) == 1 else np.flatnonzero(np.bincount(sources))
        # Gather all pieces of a source at once; usually the pieces have one or a few sources.
        for source in present.tolist():
            chosen = own if len(present) == 1 else own[sources == source]
            text = self.spans[source].gather(pieces.begins[chosen], length + 1)
            if text.dtype.kind == "i" and text.min() < 0:
                check_ids(self.spans[source].name, text, self.marks.vocab_size)
            if tokens is labels:
                tokens[pieces.rows[chosen]] = text
            else:
                tokens[pieces.rows[chosen]] = text[:, :-1]
                labels[pieces.rows[chosen]] = text[:, 1:]

    def _refuse_ids(self, start: int, stop: int) -> None:
        """Raise a DataError if samples ``start`` to ``stop`` - 1 have an id outside the vocabulary.

        The error names the dataset of the id.
        """
        pieces = self.order.locate(start, stop)
        for source, begin, length in zip(
            pieces.sources.tolist(), pieces.begins, pieces.lengths.tolist(), strict=True
        ):
            text = self.spans[source].gather(np.array([begin]), length + 1)
            check_ids(self.spans[source].name, text, self.marks.vocab_size)

    def token_ranges(self, start: int, stop: int) -> list[tuple[int, str, int, int]]:
        """Return where the text of samples ``start`` to ``stop`` - 1 lies in the files of datasets.

        For each piece of a sample, return (number of the sample, prefix of the dataset, index of
        the first token in the dataset's file, number of tokens). A piece that reaches the end of
        its split's tokens continues at the first of them.
        """
        pieces = self.order.locate(start, stop)
        return [
            (start + row, self.spans[source].name, self.spans[source].first + begin, length)
            for row, source, begin, length in zip(
                *(x.tolist() for x in (pieces.rows, pieces.sources, pieces.begins, pieces.lengths)),
                strict=True,
            )
        ]


def positions_after(ends: Array) -> Array:
    """Return positions ``[b, s]`` from 0 on, which restart after each True in ``ends [b, s]``."""
    places = np.broadcast_to(np.arange(ends.shape[1], dtype=np.int64), ends.shape)
    starts = np.zeros(ends.shape, dtype=np.int64)
    starts[:, 1:] = np.where(ends[:, :-1], places[:, 1:], 0)
    positions: Any = places - np.maximum.accumulate(starts, axis=1)
    return positions  # type: ignore[no-any-return]
