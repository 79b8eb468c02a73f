"""The longest spans of tokens that occur more than once, found by a suffix array.

Such spans remain even if all documents are unique: licences, menus, quoted articles (Lee et al.
2022, "Deduplicating Training Data Makes Language Models Better", section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_ext.data.indexed import Array
from megatron_ext.data.permutation import Ints
from megatron_ext.extras.quality.documents import Documents

LONG = 50
"""Spans of this many tokens or more count in `RepeatedSpans.repeated`; Lee et al. use the same."""
_SHOWN = 20
_PLACES = 1000
"""Occurrences of a span after which no further ones are searched."""


@dataclass
class Span:
    """A span of tokens that occurs more than once.

    ``places`` has, for each occurrence, the position of the document and the index in the document
    of the span's first token.
    """

    tokens: Array
    places: list[tuple[int, int]]


@dataclass
class RepeatedSpans:
    """The repeated spans in a sample of documents.

    Attributes:
        documents: number of documents in the sample.
        tokens: number of tokens in the sample.
        repeated: number of tokens in spans of at least `LONG` tokens that also occur elsewhere.
        longest: the longest spans, none of which begins inside a longer one.
    """

    documents: int
    tokens: int
    repeated: int = 0
    longest: list[Span] = field(default_factory=list)


def suffix_library() -> Any | None:
    """Return the suffix array library, pydivsufsort; None if it is not installed."""
    try:
        import pydivsufsort
    except ImportError:
        return None
    return pydivsufsort


def repeated_spans(
    documents: Documents, candidates: Ints, lengths: Ints, max_tokens: int
) -> RepeatedSpans:
    """Search a random sample of documents for repeated spans; needs pydivsufsort.

    Args:
        candidates: positions of the documents, without exact duplicates.
        lengths: tokens of all documents.
        max_tokens: the most tokens in the sample; the seed of ``documents`` decides which
            documents are drawn.
    """
    some = candidates[lengths[candidates] > 0]
    mean = lengths[some].mean() if len(some) else 1.0
    # Draw a few more than the mean length suggests, and read those that fit.
    some = documents.some(some, int(max_tokens / mean) + 1, "spans")
    some = some[np.cumsum(lengths[some]) <= max_tokens] if len(some) else some
    if not len(some):
        return RepeatedSpans(0, 0)
    text, starts = _joined(documents, some, lengths)
    return _search(text, starts, some)


def _joined(documents: Documents, some: Ints, lengths: Ints) -> tuple[Array, Ints]:
    """Join the documents at the positions ``some`` to one array; return it and their starts in it.

    A number that occurs nowhere else follows each document, so that no repeated span crosses its
    end.
    """
    starts = np.concatenate([[0], np.cumsum(lengths[some] + 1)])
    text = np.empty(int(starts[-1]), dtype=np.int64)
    for block in documents.blocks("Reading the sample", some):
        for place, tokens in block:
            text[starts[place] : starts[place] + len(tokens)] = tokens
    ends = starts[1:] - 1
    text[ends] = text[0]
    text[ends] = text.max() + 1 + np.arange(len(ends))
    return text, starts


def _search(text: Array, starts: Ints, some: Ints) -> RepeatedSpans:
    library = suffix_library()
    assert library is not None
    order: Array = library.divsufsort(text)
    # Length of the common prefix of each suffix and the next one in suffix order.
    common: Array = library.kasai(text, order)
    if len(common) == len(order):
        common = common[:-1]
    result = RepeatedSpans(len(some), len(text) - len(some))
    result.repeated = _covered(order, common, len(text))
    for length, positions in _longest(text, order, common):
        documents = np.searchsorted(starts, positions, side="right") - 1
        places = [
            (int(some[d]), int(p - starts[d]))
            for d, p in zip(documents, positions.tolist(), strict=True)
        ]
        result.longest.append(Span(text[positions[0] : positions[0] + length], places))
    return result


def _covered(order: Array, common: Array, size: int) -> int:
    """Return how many tokens lie in a span of at least `LONG` tokens that also occurs elsewhere.

    ``order`` is the suffix array of the ``size`` tokens. ``common`` has the length of the longest
    common prefix of each two neighbouring suffixes.
    """
    reach = np.zeros(size, dtype=np.int64)
    reach[order[:-1]] = common
    reach[order[1:]] = np.maximum(reach[order[1:]], common)
    starts = np.flatnonzero(reach >= LONG)
    changes = np.zeros(size + 1, dtype=np.int64)
    np.add.at(changes, starts, 1)
    np.add.at(changes, starts + reach[starts], -1)
    return int((np.cumsum(changes)[:-1] > 0).sum())


def _longest(text: Array, order: Array, common: Array) -> list[tuple[int, Ints]]:
    """Return (length, starts in ``text``) for each of the longest repeated spans.

    None of them begins inside a longer one. ``order`` is the suffix array of ``text``. ``common``
    has the length of the longest common prefix of each two neighbouring suffixes.
    """
    one = order[:-1].astype(np.int64)
    other = order[1:].astype(np.int64)
    # If the same token precedes both spans, the pair is part of a longer pair.
    is_first = (one == 0) | (other == 0) | (text[one - 1] != text[other - 1])
    pairs = np.flatnonzero(is_first & (common > 1))
    pairs = pairs[np.argsort(-common[pairs].astype(np.int64), kind="stable")]
    taken = np.zeros(len(text), dtype=np.bool_)
    spans: list[tuple[int, Ints]] = []
    for pair in pairs[: 1000 * _SHOWN].tolist():
        if taken[order[pair]] or taken[order[pair + 1]]:
            continue
        length = int(common[pair])
        low = pair
        high = pair + 1
        while low > 0 and common[low - 1] >= length and high - low < _PLACES:
            low -= 1
        while high < len(common) and common[high] >= length and high - low < _PLACES:
            high += 1
        positions = np.sort(order[low : high + 1].astype(np.int64))
        if taken[positions].any():
            continue
        for place in positions.tolist():
            taken[place : place + length] = True
        spans.append((length, positions))
        if len(spans) == _SHOWN:
            break
    return spans
