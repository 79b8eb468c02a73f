"""Encodes texts by gigatoken, as long as it gives exactly the ids of the native tokenizer.

gigatoken is an order of magnitude faster than the native tokenizers, SentencePiece and Hugging
Face's `tokenizers`, but it is young, and optional. Before use it is compared with the native
tokenizer on hard strings and on texts of the input; during the run, on a sample of texts. The first
difference raises an `InexactEngine`.

Two kinds of texts always go to the native tokenizer: texts that contain the text of a control
token, and, if the tokenizer normalizes, texts with combining characters. (SentencePiece normalizes
the longest sequence in its table, gigatoken one grapheme cluster at a time. Both normalize single
characters in the same way, except U+0085.)
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_ext.text.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from megatron_ext.text.tokenizers.base import Ids

HARD_STRINGS: tuple[str, ...] = (
    "",
    " ",
    "  ",
    "   leading and trailing   ",
    "a  b   c    d",
    "tab\tnewline\nreturn\r\n\n\n  mixed \t \n ",
    "it's we'll THEY'VE don't I'm he'd you're 'tis O'Neill's",
    "0 12 123 1234 12345 3.14159 1,000,000 \xbd \xb2 \u0663 \u4e00\u4e8c\u4e09",
    "punctuation!?...;;:: --- *** ((( ))) [[ ]] {{ }} <<>> @#$%^&*_+=|\\/~`",
    "def f(x):\n    if x > 0:\n        return {'a': [1, 2]}\n",
    "https://example.org/a_b?c=d&e=%20f#g user@example.org",
    "CamelCase snake_case kebab-case SCREAMING_CASE iPhone15",
    "\xe9 \xf1 \xfc \xdf \xf8 \xe6 \u0153 \u2014 \u2013 \u201cqu"
    "otes\u201d \u2018single\u2019 \u2026 \u2022 \xa7",
    "e\u0301 decomposed n\u0303 \u212b \xc5 \ufb01 \ufb02 \u2163 \u338f \uff46\uff55\uff4c\uff4c",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 "
    "\U0001f1e9\U0001f1ea \u262f \u2665\ufe0f",
    "\u6f22\u5b57\u3068\u304b\u306a\u6df7\u3058\u308a\u6587\u3002\u4e2d\u6587\u6ca1\u6709"
    "\u7a7a\u683c\uff0c\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u043a\u0438\u0440\u0438\u043b\u043b"
    "\u0438\u0446\u0430 \u05e2\u05d1\u05e8\u05d9\u05ea \u0627\u0644\u0639\u0631\u0628"
    "\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "zero\u200bwidth soft\xadhyphen nb\xa0sp thin\u2009ideographic\u3000x",
    "\x00\x01\x1f\x7f\x80\x9f",
    "\ufeffbom \ufffc \ufffd \U0010ffff \ue000",
    "\u2581 lower one eighth block \u2581\u2581 \u0120 \u010a",
    *"< <| <0 </ <|end text<|endoftext [INST] <<SYS>>".split(),
    "a" * 300,
    " " * 300,
    "\n" * 50,
    "ab" * 200 + "!" * 100,
    "The quick brown fox jumps over the lazy dog. " * 5,
)


class InexactEngine(Exception):
    """Raised if gigatoken is unusable, or gives other ids than the tokenizer's own library."""


class FastEncoder:
    """Encodes texts by gigatoken, a fast library, or by the tokenizer's own where ids may differ.

    Raises:
        InexactEngine: gigatoken is not installed, or cannot load this tokenizer exactly.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        source = tokenizer.fast_source()
        if source is None:
            raise InexactEngine(f"{tokenizer.kind} has no faster engine")
        self._native = tokenizer
        self._controls = tokenizer.control_texts()
        # Most tokenizers' control tokens share a character, such as "<". Looking for it first is
        # much faster than looking for each of them.
        shared = set.intersection(*map(set, self._controls)) if self._controls else set()
        self._mark = min(shared, default="")
        self._combining = source[0] == "sentencepiece" or '"normalizer":null' not in source[1]
        self._encode = _load(*source)
        self.compare(HARD_STRINGS)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """Return the ids of each text."""
        encoded = []
        for text in texts:
            spelled = self._mark in text and any(control in text for control in self._controls)
            may_differ = spelled or (self._combining and has_combining(text))
            encoded.append(self._native.tokenize(text) if may_differ else self._encode(text))
        return encoded

    def compare(self, texts: Sequence[str]) -> None:
        """Check that gigatoken and the tokenizer's own library give the same ids for each text.

        Raise an InexactEngine at the first text for which the ids differ.
        """
        for text, ids in zip(texts, self.encode_batch(texts), strict=True):
            self.compare_ids(text, ids)

    def compare_ids(self, text: str, ids: Ids) -> None:
        """Raise an InexactEngine unless the tokenizer's own library gives ``ids`` for ``text``."""
        native = self._native.tokenize(text)
        if not np.array_equal(np.asarray(ids, np.int64), np.asarray(native, np.int64)):
            start = text[:40].encode("unicode_escape").decode()
            raise InexactEngine(f"gigatoken gives other ids for a text that starts {start!r}")


def has_combining(text: str) -> bool:
    """Tell whether gigatoken and the tokenizer's own library may normalize a text differently.

    This is so if it has U+0085, or a character that may join its neighbour in a grapheme cluster.
    """
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return bool(_combining_table()[codes].any())


@functools.cache
def _combining_table() -> npt.NDArray[np.bool_]:
    """Return a table ``[0x110000]``: for each code point, whether `has_combining` looks for it.

    It looks for U+0085, marks, joiners, jamo, prepended characters, unassigned and private code
    points, and all code points above U+FFFF except emoji and Han.
    """
    table = np.zeros(0x110000, np.bool_)
    for code in (*range(0x80, 0x3100), *range(0xA000, 0xAC00), *range(0xF900, 0x10000)):
        table[code] = unicodedata.category(chr(code)) in ("Mn", "Mc", "Me", "Cn", "Co")
    # U+0085, prepended characters that begin a cluster, and Thai and Lao AM, which end one.
    for code in (0x85, *range(0x0600, 0x0606), 0x06DD, 0x070F, 0x08E2, 0x0D4E, 0x0E33, 0x0EB3):
        table[code] = True
    # Hangul jamo, half-width voicing marks and jamo, joiners, rare planes.
    jamo = (0x1100, 0x1200), (0xA960, 0xA980), (0xD7B0, 0xD800), (0x3130, 0x3190), (0xFF9E, 0xFFE0)
    for first, last in (*jamo, (0x200C, 0x200E), (0x10000, 0x110000)):
        table[first:last] = True
    table[0x1F300:0x1FB00] = False  # Emoji, of which skin tones are set again below.
    table[0x1F3FB:0x1F400] = True
    table[0x20000:0x40000] = False  # rare Han characters
    return table


def _load(kind: str, source: str) -> Any:
    try:
        import gigatoken
    except ImportError:
        raise InexactEngine("gigatoken is not installed") from None
    try:
        if kind == "sentencepiece":
            return gigatoken.Tokenizer.from_sentencepiece(source).backend.encode
        return gigatoken.Tokenizer.from_json(source).backend.encode
    except Exception as error:  # gigatoken documents no class for its errors.
        reason = " ".join(str(error).split())[:120]
        raise InexactEngine(f"gigatoken cannot load this tokenizer ({reason})") from None
