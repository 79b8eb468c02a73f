"""Texts of documents to token arrays, with whichever engine is exact and fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.data.preprocess.records import BadLine
from megatron_ext.data.tokenizers import Tokenizer
from megatron_ext.data.tokenizers.base import Ids
from megatron_ext.data.tokenizers.fast import FastEncoder, InexactEngine

_CHECKED_CHARACTERS = 16_384
"""A document longer than this is not used for the running comparison of engines."""


@dataclass(frozen=True)
class Encoded:
    """Documents as the dataset stores them.

    Attributes:
        tokens: ids of all documents, one after the other.
        lengths: i32 tokens of each sequence.
        documents: i32 sequences of each document.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    documents: npt.NDArray[np.int32]


class Encoder:
    """Encodes batches of documents.

    Args:
        tokenizer: the native tokenizer, whose ids count.
        fast: a faster engine found exact, or None.
        append_eod: whether a non-empty document ends with the tokenizer's eod.
    """

    def __init__(self, tokenizer: Tokenizer, fast: FastEncoder | None, *, append_eod: bool) -> None:
        self._tokenizer, self._fast = tokenizer, fast
        self._encode = tokenizer.encode_batch if fast is None else fast.encode_batch
        self._eod = [np.asarray([tokenizer.eod], np.uint32)] if append_eod else []
        self._batches = 0

    def encode(self, documents: Sequence[list[str]]) -> Encoded:
        """Encodes documents, each a list of texts (its sequences).

        Raises:
            InexactEngine: the fast engine differs from the native one on a document.
        """
        texts = [text for document in documents for text in document]
        ids = self._encode(texts)
        self._compare_one(texts, ids)
        return self._assemble(documents, ids)

    def encodable(self, document: list[str]) -> None:
        """Raises BadLine when the tokenizer refuses a text of the document."""
        try:
            self._tokenizer.encode_batch(document)
        except (ValueError, OverflowError) as error:
            raise BadLine(f"cannot be tokenized: {error}") from None

    def _compare_one(self, texts: Sequence[str], ids: Sequence[Ids]) -> None:
        """Compares one document of each batch, another place each time."""
        if self._fast is None or not texts:
            return
        self._batches += 1
        at = self._batches * 7919 % len(texts)
        if len(texts[at]) > _CHECKED_CHARACTERS:
            at = min(range(len(texts)), key=lambda i: len(texts[i]))
        native = self._tokenizer.tokenize(texts[at])
        if not np.array_equal(np.asarray(native, np.int64), np.asarray(ids[at], np.int64)):
            start = texts[at][:40].encode("unicode_escape").decode()
            raise InexactEngine(f"gigatoken gives other ids for a text that starts {start!r}")

    def _assemble(self, documents: Sequence[list[str]], ids: Sequence[Ids]) -> Encoded:
        pieces: list[Any] = []
        lengths: list[int] = []
        counts: list[int] = []
        at = 0
        for document in documents:
            before = len(lengths)
            for sequence in ids[at : at + len(document)]:
                if len(sequence):
                    pieces.append(np.asarray(sequence))
                    lengths.append(len(sequence))
            if self._eod and len(lengths) > before:
                pieces += self._eod
                lengths[-1] += 1
            counts.append(len(lengths) - before)
            at += len(document)
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)
        return Encoded(tokens, np.asarray(lengths, np.int32), np.asarray(counts, np.int32))


def choose_engine(
    tokenizer: Tokenizer, samples: Sequence[str], engine: str
) -> tuple[FastEncoder | None, str]:
    """Returns the fast engine if it is exact on real documents, and a line that says which runs.

    Args:
        samples: texts of the input at hand.
        engine: `auto` or `native`.
    """
    if engine == "native":
        return None, f"Tokenizing with {tokenizer.kind}'s own library, as asked."
    try:
        fast = FastEncoder(tokenizer)
        fast.compare(samples)
    except InexactEngine as error:
        return None, f"Tokenizing with {tokenizer.kind}'s own library: {error}."
    return fast, (
        f"Tokenizing with gigatoken, equal to {tokenizer.kind} on {len(samples)} texts of the "
        "input; one text of every block is compared on the way."
    )
