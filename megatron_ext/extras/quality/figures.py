"""Statistics of documents: lengths, token frequencies, special tokens, characters, languages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_ext.data.indexed import Array
from megatron_ext.data.permutation import Ints
from megatron_ext.extras.quality.documents import Documents
from megatron_ext.text.data.inspect import length_bin, length_counts
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer

MAX_ID = 1 << 22
"""Token ids from this one on, and negative ones, are not counted one by one, only in total."""
_HEAD = 20
_TEXT_TOKENS = 10_000
_LANGUAGE_CHARACTERS = 2_000
_LEAST_LETTERS = 20
_LEAST_CONFIDENCE = 0.7
"""Below this confidence the language of a text counts as unclear."""
MANY = 0.01
"""Fraction of control and replacement characters at which a document counts as odd."""
# Unicode's category Cc without tab, line feed and carriage return, and the replacement character,
# which stands for bytes that are no text.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
UNCLEAR, TOO_SHORT = "unclear", "too short"


def length_bins(lengths: Ints) -> list[tuple[int, int, int]]:
    """Return first length, last length and number of documents for the bins 0, 1, 2-3, 4-7, …"""
    counts = length_counts(lengths)
    used = np.flatnonzero(counts).tolist()
    bins = range(used[0], used[-1] + 1) if used else range(0)
    return [(*length_bin(number), int(counts[number])) for number in bins]


class TokenCounts:
    """Counts how often each id below `MAX_ID` occurs, and how many tokens have other ids."""

    def __init__(self) -> None:
        self.counts: Ints = np.zeros(0, dtype=np.int64)
        self.outside = 0

    def add(self, tokens: Array) -> None:
        inside = tokens
        if tokens.dtype.itemsize > 2 or tokens.dtype.kind != "u":
            inside = tokens[(tokens >= 0) & (tokens < MAX_ID)]
            self.outside += len(tokens) - len(inside)
        counts = np.bincount(inside)
        if len(counts) > len(self.counts):
            counts[: len(self.counts)] += self.counts
            self.counts = counts
        else:
            self.counts[: len(counts)] += counts


@dataclass
class Frequency:
    """The frequency of one token, and its text if there is a tokenizer."""

    token: int
    count: int
    share: float
    text: str | None = None


@dataclass
class Tokens:
    """Statistics of the tokens of documents.

    Attributes:
        distinct: number of different ids.
        vocabulary: number of ids of the tokenizer; None without a tokenizer.
        outside: number of tokens whose ids the tokenizer lacks; without a tokenizer, number of
            tokens whose ids are negative or at least `MAX_ID`.
        head: the most frequent tokens.
        special: the special tokens that occur; None without a tokenizer.
    """

    distinct: int
    vocabulary: int | None
    outside: int
    head: list[Frequency]
    special: list[Frequency] | None


def token_figures(counted: TokenCounts, tokenizer: Tokenizer | None) -> Tokens:
    """Return the statistics of counted tokens; the tokenizer defines the special ones."""
    counts = counted.counts
    total = int(counts.sum()) + counted.outside
    used = np.flatnonzero(counts)
    size = MAX_ID if tokenizer is None else tokenizer.vocab_size

    def frequency(token: int) -> Frequency:
        text = None
        if tokenizer is not None and token < size:
            text = tokenizer.detokenize([token], skip_special_tokens=False)
        return Frequency(token, int(counts[token]), int(counts[token]) / total, text)

    in_order = used[np.argsort(-counts[used], kind="stable")]
    special = None
    if tokenizer is not None:
        valid = in_order[in_order < size].tolist()
        special = [frequency(token) for token in valid if is_special(tokenizer, token)]
    return Tokens(
        distinct=len(used),
        vocabulary=None if tokenizer is None else size,
        outside=counted.outside + int(counts[size:].sum()),
        head=[frequency(token) for token in in_order[:_HEAD].tolist()],
        special=special,
    )


def is_special(tokenizer: Tokenizer, token: int) -> bool:
    """Return whether an id is a special token or the end of a document."""
    named = (tokenizer.eos, tokenizer.eod, tokenizer.bos, tokenizer.pad)
    if token in named and token != NO_TOKEN:
        return True
    hidden = tokenizer.detokenize([token], skip_special_tokens=True)
    return hidden == "" != tokenizer.detokenize([token], skip_special_tokens=False)


@dataclass
class Odd:
    """A document with many control or replacement characters."""

    position: int
    share: float
    text: str


@dataclass
class Texts:
    """Statistics of the texts of a sample of documents.

    Attributes:
        documents: number of documents in the sample.
        characters: number of characters read; at most 10,000 tokens of a document are decoded.
        control: number of those characters that are control or replacement characters.
        odd: number of documents in which at least 1 in 100 characters is one of these.
        worst: the documents with the largest fraction of control or replacement characters.
        languages: number of documents by language; None if py3langid is not installed.
    """

    documents: int
    characters: int = 0
    control: int = 0
    odd: int = 0
    worst: list[Odd] = field(default_factory=list)
    languages: dict[str, int] | None = None


def text_figures(documents: Documents, tokenizer: Tokenizer, count: int) -> Texts:
    """Decode a random sample of ``count`` documents, and count their characters and languages."""
    some = documents.some(np.arange(len(documents)), count, "texts")
    texts = Texts(len(some))
    classify = language_classifier()
    languages = Counter[str]()
    odd = list[Odd]()
    for position in tqdm(
        some.tolist(), desc="Decoding texts", delay=1.0, leave=False, disable=None
    ):
        text = text_of_document(documents, tokenizer, position, _TEXT_TOKENS)
        controls = len(_CONTROL.findall(text))
        texts.characters += len(text)
        texts.control += controls
        if text and controls >= MANY * len(text):
            odd.append(Odd(position, controls / len(text), text[:200]))
        if classify is not None and text:
            languages[classify(text)] += 1
    texts.odd = len(odd)
    texts.worst = sorted(odd, key=lambda each: (-each.share, each.position))[:10]
    texts.languages = None if classify is None else dict(languages.most_common())
    return texts


def text_of_document(
    documents: Documents, tokenizer: Tokenizer, position: int, max_tokens: int
) -> str:
    """Return the text of a document's first tokens, without special tokens."""
    ids = documents.read(position, max_tokens)
    return decoded(tokenizer, ids, is_cut=len(ids) == max_tokens)


def decoded(tokenizer: Tokenizer, ids: Array, *, is_cut: bool = False) -> str:
    """Return the text of ids, without special tokens and ids that the tokenizer lacks.

    If ``is_cut`` is true, the ids may end inside a character, which is then left out.
    """
    valid = ids[(ids >= 0) & (ids < tokenizer.vocab_size)].tolist()
    text = tokenizer.detokenize(valid, skip_special_tokens=True)
    # The text may be cut inside a character.
    return text.rstrip("\ufffd") if is_cut else text


def language_classifier() -> Callable[[str], str] | None:
    """Return a function that detects a text's language; None if py3langid is not installed.

    The function returns an ISO 639-1 code such as "en", or else `UNCLEAR` or `TOO_SHORT`.
    """
    try:
        import py3langid  # noqa: F401
    except ImportError:
        return None
    identifier = _language_model()

    def classify(text: str) -> str:
        start = text[:_LANGUAGE_CHARACTERS]
        if sum(map(str.isalpha, start)) < _LEAST_LETTERS:
            return TOO_SHORT
        language, confidence = identifier.classify(start)
        return str(language) if confidence >= _LEAST_CONFIDENCE else UNCLEAR

    return classify


@cache
def _language_model() -> Any:
    """Load py3langid's model, which takes a second."""
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
