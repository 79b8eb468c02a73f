r"""Finds where a long text may be cut such that the ids of its parts are those of the whole text.

A tokenizer's library needs up to 100 bytes of memory for each byte of a text, which is too much for
a document of hundreds of megabytes. So `parts` cuts such a text at word boundaries: before a space,
or an ideographic full stop, between two letters. This changes no id if the tokenizer

- splits a text by a regular expression into words, which it encodes one by one (byte-level BPE);
- never has a letter and a space or full stop after it in one word;
- decides where words begin and end without looking at the text before them, and looks beyond a word
  only after white space.

`boundary_of_pattern` and `boundary_of_backend` recognize such tokenizers by the parts of their
expressions. The text of a special token ends words, too, and may take white space beside it, or
depend on the characters beside it. So a text is not cut where one is near.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PART_CHARACTERS = 1 << 16
"""The least number of characters of a part, except the last one."""


@dataclass(frozen=True)
class Boundary:
    """The places at which a text may be cut.

    Attributes:
        pattern: matches the character after such a place.
        kept: whether that character begins the next part; otherwise no part has it.
        controls: the texts of special tokens, near which a text is not cut.
    """

    pattern: re.Pattern[str]
    kept: bool = True
    controls: Sequence[str] = ()


def parts(text: str, boundary: Boundary | None) -> Iterator[str]:
    """Yield the parts of a text, whose ids one after another are those of the text.

    The text is cut at ``boundary``; if that is None, it is the only part.
    """
    if boundary is None:
        yield text
    else:
        yield from parts_of_pieces([text], boundary)


def parts_of_pieces(pieces: Iterable[str], boundary: Boundary) -> Iterator[str]:
    """Yield the parts (see `parts`) of the text that the pieces are together.

    Only some pieces are kept at a time, unless the text cannot be cut.
    """
    near = max(map(len, boundary.controls), default=0) + 1
    text = ""
    start = seen = 0  # The text before ``start`` is yielded, and up to ``seen`` it cannot be cut.
    pending = iter(pieces)
    piece = next(pending, None)
    while piece is not None:
        text = text[start:] + piece
        seen -= start
        start = 0
        piece = next(pending, None)
        end = len(text) if piece is None else len(text) - near
        while len(text) - start > PART_CHARACTERS:
            match = _place_to_cut(text, max(start + PART_CHARACTERS, seen), end, boundary, near)
            if match is None:
                seen = max(seen, end)
                break
            yield text[start : match.start()]
            start = match.start() if boundary.kept else match.end()
    yield text[start:]


def _place_to_cut(
    text: str, start: int, end: int, boundary: Boundary, near: int
) -> re.Match[str] | None:
    """Return the first match of ``boundary`` from ``start`` on that ends by ``end``; else None.

    Matches with a special token at most ``near`` characters away are passed over.
    """
    for match in boundary.pattern.finditer(text, start):
        if match.end() > end:
            return None
        around = text[max(0, match.start() - near) : match.end() + near]
        # Normalization may make a special token's text of other characters.
        spelled = around, unicodedata.normalize("NFC", around)
        if not any(control in each for control in boundary.controls for each in spelled):
            return match
    return None


# Letters that no Unicode normalization joins with a space or a full stop: Latin, Cyrillic, kana,
# Han and Hangul.
_LETTERS = "A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_BEFORE_WORDS = re.compile(f"(?<=[{_LETTERS}])[ \u3002](?=[{_LETTERS}])")
BETWEEN_WORDS = Boundary(re.compile("(?<=[A-Za-z]) (?=[A-Za-z])"), kept=False)
BETWEEN_IDS = Boundary(re.compile(" "), kept=False)

_CASED = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = {
    r" ?\p{L}+",
    *(
        before + letters
        for before in (r"[^\r\n\p{L}\p{N}]?", r"[^\r\n\p{L}\p{N}]?+", r"[^\r\n\p{L}\p{P}\p{S}]?")
        for letters in (r"\p{L}+", r"[\p{L}\p{M}]+")
    ),
}
"""Alternatives of expressions that match the letters of a word, with a character before them."""
_WORDS_BY_CASE = {
    rf"[^\r\n\p{{L}}\p{{N}}]?{cased}{end}" for cased in _CASED for end in ("", f"{_SUFFIX}?")
}
"""Alternatives of which two together match the letters of words, parted where the case changes."""
_OTHERS = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _SUFFIX, r"'(?i:[sdmt]|ll|ve|re)"),
    *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,2}"),
    *(
        f"{run}{end}"
        for run in (r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]++", r" ?[^\s\p{L}\p{M}\p{N}]+",
                    r" ?[\p{P}\p{S}]+")
        for end in ("", r"[\r\n]*", r"[\r\n/]*")
    ),
    *(r"\s*[\r\n]", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[一-龥぀-ゟ゠-ヿ]+",
}  # fmt: skip
"""Alternatives that match no letter after which a space or full stop follows in the same match."""


def _alternatives(pattern: str) -> set[str]:
    r"""Split a regular expression at each ``|`` that is in no group and no class.

    Its line ends are written as ``\r`` and ``\n``.
    """
    found = [""]
    depth = 0
    in_class = False
    written = pattern.replace("\r", r"\r").replace("\n", r"\n")
    for token in re.findall(r"\\.|.", written, re.DOTALL):
        if token == "|" and not depth and not in_class:
            found.append("")
            continue
        depth += (token == "(") - (token == ")") if not in_class else 0
        in_class = token == "[" or (in_class and token != "]")
        found[-1] += token
    return set(found)


def _keeps_words(pattern: str) -> bool:
    """Tell whether no match of ``pattern`` has a letter and a space or full stop after it.

    Expressions with unknown alternatives are not examined; the result is then False.
    """
    return _alternatives(pattern) <= _WORDS | _WORDS_BY_CASE | _OTHERS


def boundary_of_pattern(pattern: str, controls: Sequence[str]) -> Boundary | None:
    """Return where a text may be cut that ``pattern`` splits into words; None if nowhere.

    ``controls`` are the texts of special tokens.
    """
    written = _alternatives(pattern)
    has_words = bool(written & _WORDS) or len(written & _WORDS_BY_CASE) == 2
    return (
        Boundary(_BEFORE_WORDS, controls=controls) if has_words and _keeps_words(pattern) else None
    )


def boundary_of_backend(content: Mapping[str, Any], controls: Sequence[str]) -> Boundary | None:
    """Return where a text may be cut for a tokenizer of Hugging Face's `tokenizers`.

    ``content`` is that of its tokenizer.json, ``controls`` are the texts of its special tokens.
    Return None if the ids might change.
    """
    model = content.get("model") or {}
    if content.get("normalizer") not in (None, {"type": "NFC"}):
        return None
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    splitter = content.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", []) if splitter.get("type") == "Sequence" else [splitter]
    has_words = False
    for step in steps:
        if step.get("type") == "ByteLevel":
            # Its own expression is GPT-2's.
            if step.get("add_prefix_space") is not False:
                return None
            has_words = has_words or step.get("use_regex") is not False
        elif step.get("type") == "Split":
            pattern = (step.get("pattern") or {}).get("Regex", "")
            if (
                step.get("behavior") != "Isolated"
                or step.get("invert")
                or not _keeps_words(pattern)
            ):
                return None
            has_words = has_words or boundary_of_pattern(pattern, ()) is not None
        elif step.get("type") != "Digits":
            return None
    return Boundary(_BEFORE_WORDS, controls=controls) if has_words else None
