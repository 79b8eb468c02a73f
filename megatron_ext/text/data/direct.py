"""Samples in the direct order: any range of sample numbers as one batch, without an index.

A sample is a window of the token stream of a split, and its labels are the tokens one further, as
in megatron-core's GPTDataset; masks and positions are made in the same way. What differs is what
shares a sample. GPTDataset shuffles documents before it cuts the stream, which needs the lengths of
all documents in the shuffled order: an index of all of them. Here the stream is cut in the order of
the file, in each epoch at other places, and the windows are shuffled. So the documents of a sample
are neighbours in the file, and a file that is sorted, for example by web site, gives samples of one
site each. Shuffle such a corpus before it is preprocessed, or keep documents apart with
``--reset-attention-mask``.

With ``--document-packing best_fit`` a sample holds documents that fit together (`packed_order`). A
document that is cut at a sample's end has its next token as the label there; one that ends there
has no label.
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
    """An order of samples; `SampleOrder` is one."""

    def seq_length(self, number: int) -> int:
        """Return the tokens of a sample."""
        ...

    def locate(self, start: int, stop: int) -> Pieces:
        """Return the pieces of the samples from ``start`` to ``stop`` - 1."""
        ...


class EveryWindow:
    """The order of a whole pass: all windows of all sources, one after another, as in the files.

    The tokens of a source after its last whole window, less than a sample, are left out.
    """

    def __init__(self, spans: Sequence[TokenSpan], seq_length: int) -> None:
        self._length = seq_length
        # The last label of a window is the token after it.
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
    """The ids and flags that decide masks and positions.

    Attributes:
        eod: the end-of-document id.
        pad: the id that is padding, below 0 if no id of a document is.
        vocab_size: ids at or above it are refused.
        eod_mask_loss: an end-of-document input has no target.
        reset_position_ids: positions start again after each end of document.
    """

    eod: int
    pad: int
    vocab_size: int
    eod_mask_loss: bool
    reset_position_ids: bool


def _collated(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


class DirectDataset(StepDataset):
    """The samples of one split by their number in the run.

    A data loader asks for a batch at once and gets it collated.

    Args:
        order: where the tokens of a sample are.
        spans: the tokens of each source that the order names by its index.
        size: number of samples; the order itself may go on.
        fim: moves the middle of documents to their end; None leaves them as they are.

    Attributes:
        is_training: the split is read on from where a resumed run stood.
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
        """Return the function from a sample's number to its tokens; None for a whole pass."""
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
        """Return the function that begins to fetch samples; None if all are on this machine."""
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
        """Return a function that leaves what `__getitems__` returned, which is collated."""
        return _collated

    def batch(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the samples from ``start`` to ``stop`` - 1, which have one length s.

        ``tokens``, ``labels``, ``position_ids`` are ``[b, s]`` int64, ``loss_mask`` is float32. So
        are ``sample_ids`` of packed samples, which number the documents of each.
        """
        tokens, labels, documents = self._read(start, stop)
        if self.fim is not None:
            # they may share memory
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
            # As GPTDataset does: padding has no loss, and an id that the embedding knows.
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
        """Return tokens and labels ``[b, s]``, -1 where a sample has none.

        The third is the number of the piece at each position of packed samples, ``[b, s]``.
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
        """Return tokens, labels and numbers of pieces of packed samples, ``[b, s]``."""
        rows = len(pieces.goes_on)
        firsts = np.searchsorted(pieces.rows, np.arange(rows + 1))
        # The token after the last piece is a label, where its document goes on.
        lengths = pieces.lengths.copy()
        lengths[firsts[1:] - 1] += 1
        sources = pieces.sources[firsts[:-1]]
        text = np.empty((rows, length + 1), dtype=np.int64)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            own = pieces.sources == source
            span = self.spans[source]
            ids = span.gather_ranges(pieces.begins[own], lengths[own])
            if ids.dtype.kind == "i" and ids.min() < 0:
                check_ids(span.name, ids, self.marks.vocab_size)
            text[sources == source] = ids.reshape(-1, length + 1)
        labels = text[:, 1:].copy()
        labels[~pieces.goes_on, -1] = -1
        number = np.arange(len(pieces.rows)) - firsts[pieces.rows]
        numbers = np.repeat(number, pieces.lengths).reshape(rows, length)
        return text[:, :-1], labels, numbers

    def _fill(self, tokens: Array, labels: Array, pieces: Pieces, own: Ints, length: int) -> None:
        """Put pieces of one length into their rows of ``tokens`` and ``labels``.

        If both are the same array it takes a piece and the token after it.
        """
        sources = pieces.sources[own]
        present = sources[:1] if len(own) == 1 else np.flatnonzero(np.bincount(sources))
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
        """Raise a DataError that names the dataset with an id outside the vocabulary."""
        pieces = self.order.locate(start, stop)
        for source, begin, length in zip(
            pieces.sources.tolist(), pieces.begins, pieces.lengths.tolist(), strict=True
        ):
            text = self.spans[source].gather(np.array([begin]), length + 1)
            check_ids(self.spans[source].name, text, self.marks.vocab_size)

    def token_ranges(self, start: int, stop: int) -> list[tuple[int, str, int, int]]:
        """Return (sample, dataset, first token in its file, tokens) of each piece of samples.

        A range that passes the end of its split goes on at the split's first token.
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
    """Return positions ``[b, s]`` that start at 0 and again after each end of document."""
    places = np.broadcast_to(np.arange(ends.shape[1], dtype=np.int64), ends.shape)
    starts = np.zeros(ends.shape, dtype=np.int64)
    starts[:, 1:] = np.where(ends[:, :-1], places[:, 1:], 0)
    positions: Any = places - np.maximum.accumulate(starts, axis=1)
    return positions  # type: ignore[no-any-return]
