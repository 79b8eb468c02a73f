"""Lines of JSON to token arrays: what a worker does with each block of a part."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from megatron_ext.text.preprocess.sentences import Splitter
from megatron_ext.text.tokenizers.base import Ids, Tokenizer
from megatron_ext.text.tokenizers.fast import FastEncoder, InexactEngine


class BadLine(Exception):
    """A line that holds no usable document; the message is the predicate of a sentence."""


def parse_line(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """Return, for each key, the texts of its sequences: one for a string, several for a list.

    Raises:
        BadLine: no JSON object, a key is missing, or a value is neither text nor a list of texts.
    """
    document = read_object(line, keys)
    texts: list[list[str]] = []
    for key in keys:
        value = document.get(key)
        if isinstance(value, str):
            texts.append([value])
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            texts.append(value)
        elif key not in document:
            raise BadLine(f"has no key {key!r}")
        else:
            kind = "null" if value is None else type(value).__name__
            raise BadLine(f"has {kind} under key {key!r}, not a text or a list of texts")
    return texts


def read_object(line: bytes, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON object of a line.

    Args:
        keys: keys whose texts must not hold half a surrogate pair.

    Raises:
        BadLine: a blank line, no UTF-8, no JSON, or no object.
    """
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not line.strip():
            raise BadLine("is blank") from None
        document = _read_leniently(line, keys, str(error))
    if not isinstance(document, dict):
        raise BadLine("is not a JSON object")
    return document


def _read_leniently(line: bytes, keys: Sequence[str], complaint: str) -> Any:
    """Read a line by Python's parser, which takes NaN, and half surrogate pairs."""
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError):
        raise BadLine(f"is not valid JSON ({complaint})") from None
    if isinstance(document, dict):
        for key in keys:
            _refuse_half_surrogates(key, document.get(key))
    return document


def _refuse_half_surrogates(key: str, value: object) -> None:
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise BadLine(f"has half a surrogate pair under key {key!r}") from None


_CHECKED_CHARACTERS = 16_384
"""A document longer than this is not used for the running comparison of engines."""


@dataclass(frozen=True)
class Encoded:
    """Documents as the dataset stores them.

    Attributes:
        tokens: ids of all documents, one after the other.
        lengths: i32 number of tokens of each sequence.
        documents: i32 number of sequences of each document.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    documents: npt.NDArray[np.int32]


class Encoder:
    """An encoder of batches of documents.

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
        """Encode documents, each a list of texts (its sequences).

        Raises:
            InexactEngine: the fast engine differs from the native one on a document.
        """
        texts = [text for document in documents for text in document]
        ids = self._encode(texts)
        self._compare_one(texts, ids)
        return self._assemble(documents, ids)

    def encodable(self, document: list[str]) -> None:
        """Check that the tokenizer takes all texts of a document.

        Raises:
            BadLine: it refuses one.
        """
        try:
            self._tokenizer.encode_batch(document)
        except (ValueError, OverflowError) as error:
            raise BadLine(f"cannot be tokenized: {error}") from None

    def _compare_one(self, texts: Sequence[str], ids: Sequence[Ids]) -> None:
        """Compare one document of each batch, at another place each time."""
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
        arrays: list[Any] = []
        lengths: list[int] = []
        counts: list[int] = []
        at = 0
        for document in documents:
            before = len(lengths)
            for sequence in ids[at : at + len(document)]:
                if len(sequence):
                    arrays.append(np.asarray(sequence))
                    lengths.append(len(sequence))
            if self._eod and len(lengths) > before:
                arrays += self._eod
                lengths[-1] += 1
            counts.append(len(lengths) - before)
            at += len(document)
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)
        return Encoded(tokens, np.asarray(lengths, np.int32), np.asarray(counts, np.int32))


def choose_engine(
    tokenizer: Tokenizer, samples: Sequence[str], engine: str
) -> tuple[FastEncoder | None, str]:
    """Return the fast engine if it is exact on real documents, and a line that says which runs.

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


Refuse = Callable[[int, str], None]
"""A function that takes the number of a bad line in its part, from 0, and the reason."""
Write = Callable[[int, int, Encoded], None]
"""A function that takes a key, a stream, and their documents."""


class BlockEncoder(Protocol):
    """An encoder that turns the lines of a block into documents."""

    def encode(self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write) -> int:
        """Encode whole lines of a part, from number ``first`` on; return how many were kept."""
        ...


@dataclass(frozen=True)
class TextEncoder:
    """A `BlockEncoder` of the texts under the same keys of each line.

    Attributes:
        streams: lines go to stream `line number within the part % streams`.
    """

    keys: Sequence[str]
    streams: int
    encoder: Encoder
    splitter: Splitter | None

    def encode(self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write) -> int:
        """Encode the lines of a block; see `BlockEncoder`."""
        kept: list[int] = []
        texts: list[list[list[str]]] = []
        for number, raw in enumerate(lines, first):
            try:
                texts.append(self._texts(raw))
                kept.append(number)
            except BadLine as bad:
                refuse(number, str(bad))
        try:
            self._encode_streams(texts, kept, write)
        except (ValueError, OverflowError):
            # The tokenizer refuses some text; only now is it worth asking which.
            good = [i for i, number in enumerate(kept) if self._accepts(texts[i], number, refuse)]
            kept, texts = [kept[i] for i in good], [texts[i] for i in good]
            self._encode_streams(texts, kept, write)
        return len(kept)

    def _texts(self, raw: bytes) -> list[list[str]]:
        texts = parse_line(raw, self.keys)
        if self.splitter is None:
            return texts
        split = self.splitter
        return [[sentence for text in document for sentence in split(text)] for document in texts]

    def _accepts(self, texts: list[list[str]], number: int, refuse: Refuse) -> bool:
        try:
            for document in texts:
                self.encoder.encodable(document)
        except BadLine as bad:
            refuse(number, str(bad))
            return False
        return True

    def _encode_streams(
        self, texts: list[list[list[str]]], numbers: list[int], write: Write
    ) -> None:
        """Encode first and write after, so that a refused text leaves nothing behind."""
        encoded = []
        for stream in range(self.streams):
            mine = [t for t, n in zip(texts, numbers, strict=True) if n % self.streams == stream]
            for key in range(len(self.keys)):
                batch = self.encoder.encode([document[key] for document in mine])
                encoded.append((key, stream, batch))
        for key, stream, batch in encoded:
            write(key, stream, batch)
