"""Encodes lines of JSON as arrays of token ids, block by block; splits texts into sentences.

Sentences are split by rules, without a model. A sentence ends at `. ! ? …` (with closing quotes or
brackets) before white space. It does not end after an abbreviation of the language, an initial or
an ordinal number, nor if the next word starts in lower case. It also ends at the full stops of
Chinese, Japanese and Hindi, which need no white space.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from megatron_ext.text.preprocess.long_lines import LongLine, Unusual, outline, text_pieces
from megatron_ext.text.preprocess.starts import is_blank
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.text.tokenizers.boundaries import (
    PART_CHARACTERS,
    Boundary,
    parts,
    parts_of_pieces,
)
from megatron_ext.text.tokenizers.fast import FastEncoder, InexactEngine

_HALF_PAIR = re.compile("[\ud800-\udfff]")
_SHOWN_KEYS = 12
"""The largest number of a line's keys that an error lists."""


class BadLine(Exception):
    """Raised for a line without a usable document; the message completes "The line ..."."""


def parse_line(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """Return a list of texts for each key: one for a string, several for a list of strings.

    Raise a BadLine if the line is not a JSON object, or if the value of a key is neither a string
    nor a list of strings.
    """
    return _texts_of(read_object(line, keys), keys)


def _texts_of(document: dict[str, Any], keys: Sequence[str]) -> list[list[str]]:
    """Return a list of texts for each key of ``document``, the object of a line.

    Raise a BadLine if the value of a key is neither a string nor a list of strings.
    """
    texts: list[list[str]] = []
    for key in keys:
        value = document.get(key)
        if isinstance(value, str):
            texts.append([value])
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            texts.append(value)
        elif key not in document:
            raise BadLine(f"has no key {key!r} ({_keys_of(document)})")
        else:
            kind = "null" if value is None else type(value).__name__
            raise BadLine(f"has {kind} under key {key!r}, not a text or a list of texts")
    return texts


def _keys_of(document: Mapping[str, Any]) -> str:
    """List the keys of ``document`` for an error message, and name the flag that chooses others."""
    names = [f"{key:.40}" for key in document]
    if len(names) > _SHOWN_KEYS:
        names[_SHOWN_KEYS:] = [f"{len(names) - _SHOWN_KEYS} more"]
    return f"it has {', '.join(names) or 'none'}; `--json-keys` names other keys"


def read_object(line: bytes, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raise a BadLine if the line is not a JSON object, or if a text under ``keys`` has half a
    surrogate pair.
    """
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if is_blank(line):
            raise BadLine("is blank") from None
        document = _read_leniently(line, keys, str(error))
    if not isinstance(document, dict):
        raise BadLine("is not a JSON object")
    return document


def read_long(
    line: LongLine, keys: Sequence[str]
) -> tuple[bytes, dict[str, Any], list[list[Iterable[str]]]]:
    """Return the JSON object of a long line, and the texts under ``keys``, each as its pieces.

    In the object, and in its line, which comes first, a name stands for each long text. Raise an
    `Unusual` if the line must be read whole, and a BadLine if it may be bad.
    """
    raw, places = outline(line)
    document = read_object(raw, keys)
    if document.keys() & places.keys():
        raise Unusual
    named = _texts_of(document, keys)
    for name in places.keys() - {text for of_key in named for text in of_key}:
        for _ in text_pieces(line, places[name]):
            pass  # A string that is not used may still be bad.
    texts: list[list[Iterable[str]]] = [
        [text_pieces(line, places[text]) if text in places else [text] for text in of_key]
        for of_key in named
    ]
    return raw, document, texts


def _has_twice(line: bytes, key: str) -> bool:
    """Tell whether a line's object has ``key`` twice; parsers keep only the last value.

    The keys of inner objects are not looked at.
    """
    # A quick test that rules out most lines. Within texts the quotes are escaped, so do not match.
    if line.count(f'"{key}"'.encode()) < 2:
        return False
    pairs: list[tuple[str, Any]] = []

    def remember(entries: list[tuple[str, Any]]) -> None:
        pairs[:] = entries  # The outermost object ends last, so its pairs are the ones that stay.

    json.loads(line.decode("utf-8-sig"), object_pairs_hook=remember)
    return sum(name == key for name, _ in pairs) > 1


def read_exactly(line: bytes) -> tuple[dict[str, Any], str | None]:
    """Parse a line; return its JSON object, and a key that some object in it has twice, or None.

    Integers of more than 64 bits keep all their digits here, whereas `read_object` reads them as
    floats. Call this only for a line that `read_object` accepts.
    """
    repeated: list[str] = []

    def remember(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            repeated.append(Counter(key for key, _ in pairs).most_common(1)[0][0])
        return content

    row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=remember)
    return row, repeated[0] if repeated else None


def _read_leniently(line: bytes, keys: Sequence[str], complaint: str) -> Any:
    """Parse a line that orjson has refused, with Python's own parser, which accepts NaN.

    Ignore a byte-order mark, which can begin any line of a concatenated file. Raise a BadLine for
    half a surrogate pair or invalid JSON; ``complaint`` is orjson's message.
    """
    try:
        document = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError):
        raise BadLine(f"is not valid JSON ({complaint})") from None
    if isinstance(document, dict):
        for key in keys:
            value = document.get(key)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and _HALF_PAIR.search(text):
                    raise BadLine(f"has half a surrogate pair under key {key!r}")
    return document


UNREAD = "unread key "
"""A kind of counts (see `Tally`): for each JSON key that nothing reads, the lines that have it."""
TWICE = "twice the key "
"""A kind of counts (see `Tally`): for each JSON key with texts, the lines that have it twice."""
EMPTY = "empty text under "
"""A kind of counts (see `Tally`): for each JSON key with texts, the lines whose text is empty."""
ENDS_WITHIN = "end of document within a text"
"""A kind of counts (see `Tally`): for each JSON key, the end-of-document tokens within texts."""
_CHECKED_CHARACTERS = 16_384
"""If the text chosen to check gigatoken's ids has more characters, a shorter one is checked.

That one is the shortest of the batch, or its beginning; checks of long texts would take too long,
and too much memory.
"""

_SPOOLED_IDS = 1 << 20
"""Number of ids of a long line that are read at a time from the file that holds them meanwhile."""


@dataclass(frozen=True)
class Encoded:
    """Encoded documents, as arrays like those of an indexed dataset.

    Attributes:
        tokens: the ids of all documents, one after another.
        lengths: number of tokens of each sequence.
        documents: number of sequences of each document.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    documents: npt.NDArray[np.int32]


def choose_engine(
    tokenizer: Tokenizer, samples: Sequence[str], engine: str
) -> tuple[FastEncoder | None, str]:
    """Return the encoder of gigatoken, the fast engine, and a sentence on the choice.

    The encoder is None, and the tokenizer's own library is used, if ``engine`` is "native", if
    gigatoken cannot load the tokenizer, or if it gives other ids than the tokenizer on ``samples``.
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
"""A callback ``(line, reason)`` for a bad line; ``line`` is the line's number in the part, from 0.
"""
Write = Callable[[int, int, Encoded], None]
"""A callback ``(key, stream, encoded)`` that writes documents; key and stream are indices, from 0.
"""
Tally = Callable[[Mapping[str, Mapping[str, int]]], None]
"""A callback that adds ``{kind: {name: count}}`` to the counts that the run's report shows.

A kind is a constant such as `UNREAD`; what a name is, such as a JSON key, depends on the kind."""


Splitter = Callable[[str], list[str]]
"""A function from a text to its sentences."""


class BlockEncoder(Protocol):
    def encode(
        self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write, tally: Tally
    ) -> int:
        """Encode lines of an input part; return the number of lines that were not refused.

        ``first`` is the index of the first line in the part. Documents are passed to ``write``, bad
        lines to ``refuse``, and counts for the report to ``tally``.
        """
        ...

    def encode_long(
        self, line: LongLine, number: int, folder: Path, write: Write, tally: Tally
    ) -> bool:
        """Encode a long line in little memory, or return False if `encode` must encode it.

        ``number`` is the index of the line in the part; in ``folder`` there may be a temporary
        file. The documents are passed to ``write`` in pieces, none if the result is False.
        """
        ...


@dataclass
class TextEncoder:
    """Encodes the texts under ``keys`` of each line in a block of lines.

    Line i of an input part goes to output stream ``i % streams``. The id ``eod``, unless it is
    None, is appended to each document that is not empty. If ``fast`` is given, gigatoken encodes
    instead of the tokenizer, which then checks one text of each batch. ``splitter`` splits texts
    into sentences; None leaves them whole.
    """

    tokenizer: Tokenizer
    fast: FastEncoder | None
    keys: Sequence[str]
    streams: int
    splitter: Splitter | None
    eod: int | None
    batches: int = 0

    def encode(
        self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write, tally: Tally
    ) -> int:
        kept: list[int] = []
        texts: list[list[list[str]]] = []
        unread: Counter[str] = Counter()
        twice: Counter[str] = Counter()
        for number, raw in enumerate(lines, first):
            try:
                document = read_object(raw, self.keys)
                texts.append(self._texts(document))
            except BadLine as bad:
                refuse(number, str(bad))
                continue
            kept.append(number)
            if len(document) > len(self.keys):
                unread.update(document.keys() - self.keys)
            for key in self.keys:
                if _has_twice(raw, key):
                    twice[key] += 1
        try:
            within = self._encode_streams(texts, kept, write)
        except (ValueError, OverflowError):
            # The tokenizer refuses at least one text. This is rare, so only now look for it.
            good = [i for i, number in enumerate(kept) if self._accepts(texts[i], number, refuse)]
            kept = [kept[i] for i in good]
            texts = [texts[i] for i in good]
            within = self._encode_streams(texts, kept, write)
        empty = {
            key: sum(not any(document[i]) for document in texts) for i, key in enumerate(self.keys)
        }
        tally({UNREAD: unread, TWICE: twice, EMPTY: empty, ENDS_WITHIN: within})
        return len(kept)

    def encode_long(
        self, line: LongLine, number: int, folder: Path, write: Write, tally: Tally
    ) -> bool:
        boundary = self.tokenizer.boundary
        if boundary is None or self.splitter is not None:
            return False
        lengths = list[npt.NDArray[np.int32]]()
        within = dict[str, int]()
        with tempfile.TemporaryFile(dir=folder) as spool:
            try:
                raw, document, texts = read_long(line, self.keys)
                for key, pieces_of_texts in zip(self.keys, texts, strict=True):
                    counts = [self._spool(x, boundary, spool) for x in pieces_of_texts]
                    lengths.append(np.asarray([count for count, _ in counts if count], np.int32))
                    within[key] = sum(ends for _, ends in counts)
            except (Unusual, BadLine, ValueError, OverflowError):
                return False
            spool.seek(0)
            for index, each in enumerate(lengths):
                self._write_spooled(index, number % self.streams, each, spool, write)
        empty = {key: int(not any(document[key])) for key in self.keys}
        twice = {key: 1 for key in self.keys if _has_twice(raw, key)}
        unread = dict.fromkeys(document.keys() - self.keys, 1)
        ends = within if self.eod is not None else {}
        tally({UNREAD: unread, TWICE: twice, EMPTY: empty, ENDS_WITHIN: ends})
        return True

    def _spool(
        self, pieces: Iterable[str], boundary: Boundary, spool: IO[bytes]
    ) -> tuple[int, int]:
        """Encode the text of ``pieces``, and append its ids to the file ``spool``.

        Return the numbers of ids and of end-of-document tokens among them. With gigatoken, the
        beginning is also encoded by the tokenizer, as in `_encode`.
        """
        encoder = self.tokenizer if self.fast is None else self.fast
        count = ends = 0
        for part in parts_of_pieces(pieces, boundary):
            if self.fast is not None and not count:
                self.fast.compare([part[:_CHECKED_CHARACTERS]])
            ids = np.asarray(encoder.encode_batch([part])[0], np.uint32)
            spool.write(ids.tobytes())
            count += len(ids)
            ends += int((ids == self.eod).sum())
        return count, ends

    def _write_spooled(
        self,
        key: int,
        stream: int,
        lengths: npt.NDArray[np.int32],
        spool: IO[bytes],
        write: Write,
    ) -> None:
        """Write a document; ``lengths`` are those of its sequences, whose ids ``spool`` has."""
        none = np.zeros(0, np.int32)
        left = int(lengths.sum(dtype=np.int64))
        while left:
            ids = np.frombuffer(spool.read(4 * min(left, _SPOOLED_IDS)), np.uint32)
            write(key, stream, Encoded(ids, none, none))
            left -= len(ids)
        if self.eod is not None and len(lengths):
            write(key, stream, Encoded(np.asarray([self.eod], np.uint32), none, none))
            lengths[-1] += 1
        write(key, stream, Encoded(none, lengths, np.asarray([len(lengths)], np.int32)))

    def _texts(self, document: dict[str, Any]) -> list[list[str]]:
        texts = _texts_of(document, self.keys)
        split = self.splitter
        if split is None:
            return texts
        return [[sentence for text in document for sentence in split(text)] for document in texts]

    def _accepts(self, texts: list[list[str]], number: int, refuse: Refuse) -> bool:
        try:
            for document in texts:
                self.tokenizer.encode_batch(document)
        except (ValueError, OverflowError) as error:
            refuse(number, f"cannot be tokenized: {error}")
            return False
        return True

    def _encode_streams(
        self, texts: list[list[list[str]]], numbers: list[int], write: Write
    ) -> dict[str, int]:
        """Encode the texts of lines, and write them once all are encoded.

        ``texts`` has, for each line and key, a list of sequences; ``numbers`` are the lines'
        indices in the part. If the tokenizer refuses a text, nothing is written.

        Return, for each key, how often a text itself contains the end-of-document token.
        """
        encoded = []
        for stream in range(self.streams):
            mine = [t for t, n in zip(texts, numbers, strict=True) if n % self.streams == stream]
            for key in range(len(self.keys)):
                encoded.append((key, stream, self._encode([document[key] for document in mine])))
        within: Counter[str] = Counter()
        for key, stream, batch in encoded:
            write(key, stream, batch)
            if self.eod is not None:
                ends = int((batch.tokens == self.eod).sum())
                within[self.keys[key]] += ends - int((batch.documents > 0).sum())
        return within

    def _encode(self, documents: Sequence[list[str]]) -> Encoded:
        """Encode documents, each a list of sequences.

        With gigatoken, one text is also encoded by the tokenizer; raise an InexactEngine if the ids
        differ.
        """
        texts = [text for document in documents for text in document]
        ids = self._ids(texts)
        if self.fast is not None and texts:
            # Compare one text of each batch. The prime spreads its position over the batches.
            self.batches += 1
            checked = self.batches * 7919 % len(texts)
            if len(texts[checked]) > _CHECKED_CHARACTERS:
                checked = min(range(len(texts)), key=lambda i: len(texts[i]))
            if len(texts[checked]) > _CHECKED_CHARACTERS:
                self.fast.compare([texts[checked][:_CHECKED_CHARACTERS]])
            else:
                self.fast.compare_ids(texts[checked], ids[checked])
        eod = [] if self.eod is None else [np.asarray([self.eod], np.uint32)]
        arrays = list[Any]()
        lengths = list[int]()
        counts = list[int]()
        remaining = iter(ids)
        for document in documents:
            kept = [np.asarray(x) for x in islice(remaining, len(document)) if len(x)]
            arrays += kept
            lengths += map(len, kept)
            counts.append(len(kept))
            if eod and kept:
                arrays += eod
                lengths[-1] += 1
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)
        return Encoded(tokens, np.asarray(lengths, np.int32), np.asarray(counts, np.int32))

    def _ids(self, texts: Sequence[str]) -> Sequence[Any]:
        """Return the ids of each text; a long text is encoded in parts, which bounds the memory."""
        encoder = self.tokenizer if self.fast is None else self.fast
        if max(map(len, texts), default=0) <= PART_CHARACTERS:
            return encoder.encode_batch(texts)
        boundary = self.tokenizer.boundary
        ids = []
        for text in texts:
            encoded = [
                np.asarray(encoder.encode_batch([part])[0], np.uint32)
                for part in parts(text, boundary)
            ]
            ids.append(np.concatenate(encoded))
        return ids


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


def sentence_splitter(lang: str, *, keep_newlines: bool) -> Splitter:
    """Return a function that splits a text in ``lang``, one of `LANGUAGES`, into sentences.

    White space between sentences is dropped. With ``keep_newlines`` it stays at the end of the
    preceding sentence, so that the joined sentences are the text.
    """
    abbreviations = frozenset((_COMMON + " " + _ABBREVIATIONS[lang]).split())
    ordinals = lang in ("german", "dutch")

    def split(text: str) -> list[str]:
        sentences = []
        start = 0
        for match in _END.finditer(text):
            if match["mark"] is not None and not _ends_here(text, match, abbreviations, ordinals):
                continue
            space = match["space"] if match["mark"] is not None else match["wide_space"]
            end = match.end() if keep_newlines else match.end() - len(space)
            sentences.append(text[start:end] if keep_newlines else text[start:end].strip())
            start = match.end()
        rest = text[start:] if keep_newlines else text[start:].strip()
        return [*sentences, rest] if rest else sentences

    return split


def _ends_here(
    text: str, match: re.Match[str], abbreviations: frozenset[str], ordinals: bool
) -> bool:
    """Tell whether ``match``, a possible end of a sentence in ``text``, really ends a sentence.

    ``abbreviations`` are those of the language, after which no sentence ends. With ``ordinals`` a
    number of at most two digits and a full stop is an ordinal, which ends no sentence either. An
    empty line always ends a sentence.
    """
    if match["next"].islower() and "\n\n" not in match["space"]:
        return False
    if match["mark"] != "." or "\n\n" in match["space"] or match["close"]:
        return True
    # Look back 24 characters only: no abbreviation is longer.
    word = _LAST_WORD.search(text, max(0, match.start() - 24), match.start())
    last = word[0] if word else ""
    # A single capital is an initial, but "I" is far more often the pronoun.
    initial = len(last) == 1 and last.isalpha() and last.isupper() and last != "I"
    ordinal = ordinals and last.isdigit() and len(last) <= 2
    return not (initial or ordinal or last.lower() in abbreviations)
