"""Token ids to pieces of text that can be shown.

A piece is one token, or the few whose bytes make one character together. What a piece adds to the
text is found by decoding it with the tokens before it, since decoders treat the beginning of a text
in ways of their own.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.data.tokenizers import Tokenizer

LONGEST = 8
"""Tokens that make one character, at most; a character takes at most 4 bytes."""

_UNKNOWN = "\ufffd"
_HIDDEN = frozenset("Cc Cf Co Cs Cn Zl Zp".split())


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that are shown as one, and weigh alike.

    Attributes:
        text: with every character visible; a newline is ↵.
        first: index of the first token.
        count: of tokens.
        weight: NaN where it is only read, not predicted.
        is_special: a token of the tokenizer's own, not of the text.
    """

    text: str
    first: int
    count: int
    weight: float
    is_special: bool = False


class Pieces:
    """Cuts ids of one tokenizer into pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        controls = set(tokenizer.control_texts())
        named = (tokenizer.eos, tokenizer.bos, tokenizer.pad, tokenizer.eod)
        self._named = {number for number in named if number >= 0}
        self._controls = controls
        self._special: dict[int, bool] = {}
        self._decoded: dict[tuple[int, ...], str] = {}

    def is_special(self, token: int) -> bool:
        """Whether an id is a token of the tokenizer's own, such as the end of a turn."""
        if token not in self._special:
            self._special[token] = token in self._named or self._decode((token,)) in self._controls
        return self._special[token]

    def text_of(self, token: int) -> str:
        """A token by itself, for a sentence."""
        return self.of([token], [0.0])[0].text

    def of(self, ids: Sequence[int], weights: Sequence[float]) -> list[Piece]:
        """The pieces of neighbouring tokens.

        Args:
            ids: ``[n]``.
            weights: ``[n]``, NaN where a token is only read.
        """
        found: list[Piece] = []
        before: tuple[int, ...] = ()
        first = 0
        while first < len(ids):
            token = int(ids[first])
            if self.is_special(token):
                text = visible(self._decode((token,))) or _number(token)
                found.append(Piece(text, first, 1, float(weights[first]), True))
                # What follows a special token is decoded as if it stood in the middle of a text.
                before, first = (token,), first + 1
                continue
            added, count = self._added(before, ids, first)
            group = [float(weight) for weight in weights[first : first + count]]
            if added is None or not all(_alike(weight, group[0]) for weight in group):
                for i, weight in enumerate(group):
                    found.append(Piece(_number(int(ids[first + i])), first + i, 1, weight))
            else:
                found.append(Piece(visible(added), first, count, group[0]))
            before = tuple(int(i) for i in ids[first : first + count])
            first += count
        return found

    def _added(
        self, before: tuple[int, ...], ids: Sequence[int], first: int
    ) -> tuple[str | None, int]:
        """Text that the tokens from ``first`` on add, and how many it takes; None: no text."""
        start = self._decode(before)
        for count in range(1, min(LONGEST, len(ids) - first) + 1):
            group = tuple(int(i) for i in ids[first : first + count])
            if count > 1 and self.is_special(group[-1]):
                break
            whole = self._decode(before + group)
            added = whole[len(start) :] if whole.startswith(start) else self._decode(group)
            if added and _UNKNOWN not in added:
                return added, count
            if not added:
                break
        return None, 1

    def _decode(self, ids: tuple[int, ...]) -> str:
        if ids not in self._decoded:
            known = all(0 <= i < self._tokenizer.vocab_size for i in ids)
            text = self._tokenizer.detokenize(ids, skip_special_tokens=False) if known else ""
            self._decoded[ids] = text
        return self._decoded[ids]


def _alike(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _number(token: int) -> str:
    """A token without a text of its own."""
    return f"⟨{token}⟩"


def visible(text: str) -> str:
    """A text in which control characters and invisible ones are escaped, and newlines are ↵."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\n":
        return "↵"
    if character == "\t":
        return "⇥"
    if unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}"
