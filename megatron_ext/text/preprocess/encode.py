"""One line of the input to the texts of its keys.

Texts of documents to token arrays, with whichever engine is exact and fastest.

Cutting text into sentences by rule, without any model to download.

A sentence ends at `. ! ? …` (with closing quotes or brackets) before white space, unless the
period closes a known abbreviation, an initial, or an ordinal number, or the next word starts in
lower case; and at the full stops of Chinese, Japanese and Hindi, which need no white space.

Lines with texts under keys to token arrays: what a worker does with each block of a part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from megatron_ext.text.tokenizers.base import Ids, Tokenizer
from megatron_ext.text.tokenizers.fast import FastEncoder, InexactEngine


class BadLine(Exception):
    """A line that holds no usable document; the message is the predicate of a sentence."""


def parse_line(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """Returns, for each key, the texts of its sequences: one for a string, several for a list.

    Raises:
        BadLine: no JSON object, a key is missing, or a value is neither text nor a list of texts.
    """
    document = _load(line, keys)
    if not isinstance(document, dict):
        raise BadLine("is not a JSON object")
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


def _load(line: bytes, keys: Sequence[str]) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not line.strip():
            raise BadLine("is blank") from None
        return _load_leniently(line, keys, str(error))


def _load_leniently(line: bytes, keys: Sequence[str], complaint: str) -> object:
    """Python's parser takes NaN, and half surrogate pairs under keys that nobody asks for."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        document: object = json.loads(text)
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


_COMMON = "a.m p.m etc vs no nr vol fig figs cf ca al approx resp dept inc ltd co corp st dr prof"
_ABBREVIATIONS: dict[str, str] = {
    "english": "mr mrs ms messrs jr sr rev hon gen col lt sgt capt gov sen rep pres e.g i.e viz "
    "op u.s u.k u.n jan feb mar apr jun jul aug sep sept oct nov dec mt ft",
    "german": "z.b d.h u.a bzw usw evtl ggf hr fr frl str tel abs bd hrsg inkl s.o s.u u.s.w v.a "
    "geb gest jh jhd mio mrd jan feb mär apr jun jul aug sep okt nov dez",
    "french": "m mm mme mlle av bd c.-à-d p.ex env ex éd hab janv févr avr juil sept oct nov déc",
    "spanish": "sr sra srta d dña ud uds ej p.ej pág págs aprox av avda ee.uu núm ene feb mar abr "
    "jul ago sep oct nov dic",
    "italian": "sig sig.ra sigg dott dott.ssa avv ing es p.es pag ecc art gen feb mar apr giu lug "
    "ago set ott nov dic",
    "portuguese": "sr sra srta exa d dra pág págs ex p.ex av núm jan fev mar abr jun jul ago set "
    "out nov dez",
    "dutch": "dhr mevr mw drs ir ing bijv d.w.z m.a.w o.a blz jan feb mrt apr jun jul aug sep okt "
    "nov dec",
    "russian": "г гг т.е т.д т.п и.о др проф акад стр рис им ул д кв руб коп тыс млн млрд см",
}
LANGUAGES = tuple(_ABBREVIATIONS)
_END = re.compile(
    r"""(?P<mark>[.!?…]+)(?P<close>["'”’»)\]]*)(?P<space>\s+)(?=(?P<next>\S))"""
    r"""|(?P<wide>[。！？｡।]+[”’」』）"']*)(?P<wide_space>\s*)(?=\S)"""
)
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘«„¿¡]*$")

Splitter = Callable[[str], list[str]]


def sentence_splitter(lang: str, *, keep_newlines: bool) -> Splitter:
    """Returns the function from a text to its sentences.

    White space between sentences is dropped; with `keep_newlines` it stays at the end of the
    sentence before it, so that the sentences joined give the text again.

    Args:
        lang: one of `LANGUAGES`.
    """
    known = frozenset((_COMMON + " " + _ABBREVIATIONS[lang]).split())
    ordinals = lang in ("german", "dutch")

    def split(text: str) -> list[str]:
        sentences, start = [], 0
        for match in _END.finditer(text):
            if match["mark"] is not None and not _ends_here(text, match, known, ordinals):
                continue
            space = match["space"] if match["mark"] is not None else match["wide_space"]
            end = match.end() if keep_newlines else match.end() - len(space)
            sentences.append(text[start:end] if keep_newlines else text[start:end].strip())
            start = match.end()
        rest = text[start:] if keep_newlines else text[start:].strip()
        return [*sentences, rest] if rest else sentences

    return split


def _ends_here(text: str, match: re.Match[str], known: frozenset[str], ordinals: bool) -> bool:
    if match["next"].islower() and "\n\n" not in match["space"]:
        return False
    if match["mark"] != ".":
        return True
    if "\n\n" in match["space"] or match["close"]:
        return True
    # A word longer than any abbreviation needs no look further back.
    word = _LAST_WORD.search(text, max(0, match.start() - 24), match.start())
    last = word[0] if word else ""
    if len(last) == 1 and last.isalpha() and last.isupper() and last != "I":
        return False
    if ordinals and last.isdigit() and len(last) <= 2:
        return False
    return last.lower() not in known


Refuse = Callable[[int, str], None]
"""Takes the number of a bad line in its part, from 0, and the reason; may raise."""
Write = Callable[[int, int, Encoded], None]
"""Takes the documents of one key and one stream."""


class BlockEncoder(Protocol):
    """What turns the lines of a block into documents."""

    def encode(self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write) -> int:
        """Encodes whole lines of a part, the first of which is number ``first``.

        Returns:
            the number of lines kept.
        """
        ...


@dataclass(frozen=True)
class TextEncoder:
    """Texts under the same keys of each line.

    Attributes:
        streams: lines go to stream `line number within the part % streams`.
    """

    keys: Sequence[str]
    streams: int
    encoder: Encoder
    splitter: Splitter | None

    def encode(self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write) -> int:
        """See `BlockEncoder.encode`."""
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
        """Encodes first and writes after, so that a refused text leaves nothing behind."""
        encoded = []
        for stream in range(self.streams):
            mine = [t for t, n in zip(texts, numbers, strict=True) if n % self.streams == stream]
            for key in range(len(self.keys)):
                batch = self.encoder.encode([document[key] for document in mine])
                encoded.append((key, stream, batch))
        for key, stream, batch in encoded:
            write(key, stream, batch)
