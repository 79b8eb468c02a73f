"""Measures the quality of datasets before they are used for training.

All datasets are examined together, so that a document in two of them is found. The tokens are read
at most twice: once for digests and counts, and once for near duplicates. Measurements that need
texts or a suffix array use samples, whose sizes are reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_ext.data.permutation import Ints
from megatron_ext.errors import ConfigError
from megatron_ext.extras.quality.documents import Documents
from megatron_ext.extras.quality.duplicates import SHINGLE, Digests, near_leaders, require_rensa
from megatron_ext.extras.quality.figures import (
    Texts,
    TokenCounts,
    Tokens,
    decoded,
    length_bins,
    text_figures,
    token_figures,
)
from megatron_ext.extras.quality.spans import RepeatedSpans, Span, repeated_spans, suffix_library
from megatron_ext.text.tokenizers.base import Tokenizer

_SHOWN = 10
_SPAN_TOKENS = 4_000_000
_SHOWN_TOKENS = 64
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class QualityOptions:
    """The selection of measurements; the fields are flags of tools/inspect_dataset.py."""

    near_duplicates: float | None = None
    sample_documents: int | None = None
    text_documents: int = 10_000
    span_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = []
        near = self.near_duplicates
        if near is not None and not 0.3 <= near <= 1:
            wrong.append(
                f"`--near-duplicates` ({near:g}) must be a Jaccard similarity from 0.3 to 1; use "
                "0.8."
            )
        for name in ("sample_documents", "text_documents", "span_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = f"--{name.replace('_', '-')}"
                wrong.append(
                    f"`{flag}` ({value}) must be at least 1; leave it out for the default."
                )
        if wrong:
            raise ConfigError(wrong)
        if near is not None:
            require_rensa()
        if self.span_tokens is not None and suffix_library() is None:
            raise ConfigError(
                f"`--span-tokens` ({self.span_tokens}) needs the package pydivsufsort, which is "
                "not installed; run `pip install pydivsufsort`, or leave the flag out."
            )


@dataclass
class Place:
    """A token of a document, such as the first one of a repeated span.

    Attributes:
        dataset: prefix of the document's dataset.
        document: number of the document in the dataset.
        token: index of the token in the document; 0 if the whole document is meant.
    """

    dataset: str
    document: int
    token: int = 0


@dataclass
class Excerpt:
    """A group of documents, a repeated span or an odd document, with the beginning of its text.

    Attributes:
        tokens: length of the span or odd document; for a group, the number of tokens that are saved
            if only one of its documents is kept.
        count: number of documents in the group, or of places where the span occurs.
        places: the first few of the documents, or of the places where the span occurs.
        text: the beginning of the first one; without a tokenizer, its token ids.
        share: for an odd document, its fraction of control and replacement characters.
    """

    tokens: int
    count: int
    places: list[Place]
    text: str
    share: float | None = None


@dataclass
class Duplicates:
    """Groups of documents that duplicate each other; one document of each group is enough.

    Attributes:
        groups: number of groups of at least two documents.
        documents: number of documents that could be removed: all but one of each group.
        tokens: number of tokens in the documents that could be removed.
        largest: the largest groups.
        leaders: for each document the position of the first document in its group, ``[documents]``.
    """

    groups: int
    documents: int
    tokens: int
    largest: list[Excerpt]
    leaders: Ints = field(repr=False)


@dataclass
class Quality:
    """All statistics of datasets.

    Attributes:
        available: number of documents in the datasets.
        documents: number of documents that were examined.
    """

    datasets: list[str]
    available: int
    documents: int
    tokens: int
    empty: int
    lengths: dict[str, float]
    length_bins: list[tuple[int, int, int]]
    token_figures: Tokens
    exact: Duplicates
    near: Duplicates | None
    near_threshold: float | None
    span_sample: RepeatedSpans | None
    spans: list[Excerpt]
    texts: Texts | None
    odd: list[Excerpt]
    notes: list[str]

    def places_of(self, excerpt: Excerpt, shown: int = 4) -> str:
        """Return a text with the first ``shown`` places of an excerpt and the number of the others.

        A place is written as dataset, document and token, such as "web:12+345".
        """
        folder = os.path.commonpath([os.path.dirname(os.path.abspath(d)) for d in self.datasets])
        words = [
            f"{os.path.relpath(place.dataset, folder)}:{place.document}"
            + (f"+{place.token}" if place.token else "")
            for place in excerpt.places[:shown]
        ]
        more = excerpt.count - len(words)
        return " ".join(words) + (f" and {more:,} more" if more > 0 else "")

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as a JSON object.

        It leaves out the group of each document, and lists that ``spans`` and ``odd`` repeat.
        """
        figures = asdict(self)
        for name in ("exact", "near"):
            if figures[name] is not None:
                del figures[name]["leaders"]
        if self.span_sample is not None:
            del figures["span_sample"]["longest"]
        if self.texts is not None:
            del figures["texts"]["worst"]
        return figures


def measure(
    prefixes: Sequence[str], tokenizer: Tokenizer | None, options: QualityOptions
) -> tuple[Quality, Documents]:
    """Measure datasets that have passed `check_indexed_dataset`; also return their documents.

    Without a ``tokenizer``, the texts of the documents are not examined.
    """
    documents = Documents(prefixes, sample=options.sample_documents, seed=options.seed)
    lengths = documents.lengths()
    counts = TokenCounts()
    digests = Digests(len(documents), documents.common_dtype)
    for block in documents.blocks("Reading tokens"):
        digests.add(block)
        counts.add(block.tokens)
    view = _View(documents, tokenizer, lengths)
    leaders = digests.leaders(lengths)
    del digests
    alone = np.flatnonzero((leaders == np.arange(len(leaders))) & (lengths > 0))
    near = None
    if options.near_duplicates is not None:
        near = view.duplicates(_near(documents, leaders, alone, lengths, options))
    sample = None
    if suffix_library() is not None:
        sample = repeated_spans(documents, alone, lengths, options.span_tokens or _SPAN_TOKENS)
    texts = None
    odd = list[Excerpt]()
    if tokenizer is not None:
        texts = text_figures(documents, tokenizer, options.text_documents)
        odd = [
            Excerpt(int(lengths[o.position]), 1, [view.place(o.position)], o.text, o.share)
            for o in texts.worst
        ]
    quality = Quality(
        datasets=list(prefixes),
        available=documents.available,
        documents=len(documents),
        tokens=int(lengths.sum()),
        empty=int((lengths == 0).sum()),
        lengths=_summary(lengths),
        length_bins=length_bins(lengths),
        token_figures=token_figures(counts, tokenizer),
        exact=view.duplicates(leaders),
        near=near,
        near_threshold=options.near_duplicates,
        span_sample=sample,
        spans=[] if sample is None else [view.span(span) for span in sample.longest],
        texts=texts,
        odd=odd,
        notes=[],
    )
    quality.notes = _notes(quality)
    return quality, documents


def _near(
    documents: Documents, leaders: Ints, alone: Ints, lengths: Ints, options: QualityOptions
) -> Ints:
    """Merge groups of exact duplicates whose documents are near duplicates of each other.

    Args:
        leaders: for each document, the position of the first one with the same tokens.
        alone: positions of the documents that are not empty and equal no earlier document.
        lengths: number of tokens of each document.

    Returns:
        For each document, the position of the first one in its merged group, ``[documents]``.
    """
    assert options.near_duplicates is not None
    candidates = alone[lengths[alone] >= SHINGLE]
    places = near_leaders(documents, candidates, options.near_duplicates, options.seed)
    joined = leaders.copy()
    joined[candidates] = candidates[places]
    merged: Ints = joined[leaders]
    return merged


@dataclass
class _View:
    """Makes the entries of a report on ``documents`` from the positions of documents among these.

    An entry says in which dataset a document is, and shows the beginning of its text. ``lengths``
    has the number of tokens of each document.
    """

    documents: Documents
    tokenizer: Tokenizer | None
    lengths: Ints

    def place(self, position: int, token: int = 0) -> Place:
        return Place(*self.documents.place(position), token)

    def shown(self, ids: Any) -> str:
        """Return ids as text, or as numbers without a tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, ids[:16].tolist()))
        return decoded(self.tokenizer, ids)[:_SHOWN_CHARACTERS]

    def span(self, span: Span) -> Excerpt:
        """Return the report's entry for a repeated span.

        It has the span's length, the number of places where it occurs, the first few of these
        places, and the beginning of the span as text.
        """
        places = [self.place(position, token) for position, token in span.places[:_SHOWN]]
        text = self.shown(span.tokens[:_SHOWN_TOKENS])
        return Excerpt(len(span.tokens), len(span.places), places, text)

    def duplicates(self, leaders: Ints) -> Duplicates:
        """Return the statistics of groups of duplicates.

        ``leaders`` has for each document the first document of its group.
        """
        later = np.flatnonzero(leaders != np.arange(len(leaders)))
        firsts, counts = np.unique(leaders[later], return_counts=True)
        largest = []
        for i in np.argsort(-counts, kind="stable")[:_SHOWN].tolist():
            first = int(firsts[i])
            members = later[leaders[later] == first]
            places = [self.place(int(p)) for p in (first, *members[: _SHOWN - 1].tolist())]
            text = self.shown(self.documents.read(first, _SHOWN_TOKENS))
            tokens = int(self.lengths[members].sum())
            largest.append(Excerpt(tokens, len(members) + 1, places, text))
        tokens = int(self.lengths[later].sum())
        return Duplicates(len(firsts), len(later), tokens, largest, leaders)


def _summary(lengths: Ints) -> dict[str, float]:
    """Return minimum, median, mean, 99th percentile and maximum of the lengths."""
    if not len(lengths):
        return {}
    middle, high = np.percentile(lengths, [50, 99])
    return {
        "least": int(lengths.min()),
        "median": float(middle),
        "mean": float(lengths.mean()),
        "99%": float(high),
        "largest": int(lengths.max()),
    }


def _notes(quality: Quality) -> list[str]:
    """Return sentences that say what was not measured, or measured on a sample only."""
    notes = []
    if quality.documents < quality.available:
        notes.append(
            f"All figures are of {quality.documents} of {quality.available} documents, chosen by "
            "the seed; copies outside of them are not seen."
        )
    if quality.texts is None:
        notes.append(
            "Special tokens, characters and languages need a tokenizer; give `--tokenizer-type`."
        )
    elif quality.texts.languages is None:
        notes.append(
            "Languages need the package py3langid, which is not installed; run "
            "`pip install py3langid`."
        )
    if quality.texts is not None and quality.texts.documents < quality.documents:
        notes.append(
            f"Characters and languages are of {quality.texts.documents} documents "
            "(`--text-documents`)."
        )
    if quality.span_sample is None:
        notes.append(
            "Repeated spans need the package pydivsufsort, which is not installed; run "
            "`pip install pydivsufsort`."
        )
    elif quality.span_sample.tokens < quality.tokens - quality.exact.tokens:
        notes.append(
            f"Repeated spans were searched in {quality.span_sample.documents} documents with "
            f"{quality.span_sample.tokens} tokens (`--span-tokens`), copies left out."
        )
    return notes
