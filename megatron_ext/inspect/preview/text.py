"""Rows as coloured terminal text.

A token is green by the weight with which it is predicted, dim where it has none, and underlined
where it is only read. Without colours, what is trained stands between ⟦ and ⟧, a weight other than
1 before it. The number before a line is the position id of its first token.

Token ids to pieces of text that can be shown.

A piece is one token, or the few whose bytes make one character together. What a piece adds to the
text is found by decoding it with the tokens before it, since decoders treat the beginning of a text
in ways of their own.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from megatron_ext.inspect.preview.collect import Floats, Row
from megatron_ext.inspect.preview.documents import Document, documents_of

if TYPE_CHECKING:
    from megatron_ext.data.samplers import Ints
    from megatron_ext.text.tokenizers.base import Tokenizer

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


GUTTER = 10
GRADES = 8
NOTHING = "∅"
"""Where a multi-token-prediction depth has nothing to learn."""

_LIGHTEST, _FULL = (200, 180, 60), (40, 200, 90)  # a small weight is yellow, a full one green


def grade(weight: float, heaviest: float) -> int:
    """A weight among `GRADES` shades, 0 only for a weight of 0.

    Args:
        weight: of a token.
        heaviest: weight of the strongest shade.
    """
    if not weight > 0:
        return 0
    return min(GRADES, max(1, math.ceil(GRADES * weight / max(heaviest, 1e-30) - 1e-6)))


def style_of(piece: Piece, heaviest: float) -> Style:
    """How a piece is shown where there are colours."""
    if math.isnan(piece.weight):
        return Style(dim=True, underline=True)
    shade = grade(piece.weight, heaviest)
    if not shade:
        return Style(dim=True, bold=piece.is_special)
    share = (shade - 1) / (GRADES - 1)
    red, green, blue = (
        round(low + share * (high - low)) for low, high in zip(_LIGHTEST, _FULL, strict=True)
    )
    return Style(color=f"rgb({red},{green},{blue})", bold=piece.is_special)


def describe(document: Document) -> str:
    """A document's header."""
    words = [f"document {document.number}"]
    origin = document.origin
    if origin is not None:
        words.append(f"sample {origin.sample}")
        place = origin.source if origin.number is None else f"{origin.source}:{origin.number}"
        words.append(place)
    if document.end > document.start:
        first = document.row.positions[document.start]
        last = document.row.positions[document.end - 1]
        words.append(f"columns {document.start}–{document.end - 1}, positions {first}–{last}")
    weight = float(document.targets.sum())
    words.append(f"{document.trained} of {len(document.targets)} trained, weight {weight:.6g}")
    if origin is not None and origin.cut:
        words.append(f"{origin.cut} tokens cut off")
    return " · ".join(words)


def describe_row(row: Row) -> str:
    """A row's header."""
    padding = int(row.is_padding.sum())
    return (
        f"data-parallel rank {row.dp_rank} · micro-batch {row.microbatch + 1} · "
        f"row {row.number + 1} · {row.size - padding} of {row.size} positions filled, "
        f"{padding} padding"
    )


class Terminal:
    """Prints rows.

    Args:
        console: of rich; its width and its colours are used.
        pieces: of the tokenizer.
        eod: id that ends a document in a stream.
        heaviest: weight of the strongest green.
    """

    def __init__(self, console: Console, pieces: Pieces, eod: int, heaviest: float) -> None:
        self._console, self._pieces, self._eod = console, pieces, eod
        self._heaviest = heaviest
        self._marks = console.no_color or console.color_system is None

    def print(self, text: str, style: str = "") -> None:
        """A plain line, in which nothing is markup."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def row(self, row: Row) -> None:
        """One row with its documents."""
        self._console.print(Rule(Text(describe_row(row)), align="left"))
        for document in documents_of(row, self._eod):
            self.print(describe(document), "bold cyan")
            self._tokens("", document.positions, self._of(document.ids, document.weights))
            for depth in range(1, len(row.mtp_labels) + 1):
                ids, weights = document.mtp_targets(depth)
                self._tokens(f"MTP {depth}", document.positions, self._of(ids, weights))

    def _of(self, ids: Ints, weights: Floats) -> list[Piece]:
        """Pieces, with `NOTHING` for each id of -1."""
        pieces = self._pieces.of([i for i in ids.tolist() if i >= 0], _kept(ids, weights))
        places = [i for i, token in enumerate(ids.tolist()) if token >= 0]
        shown = [Piece(p.text, places[p.first], p.count, p.weight, p.is_special) for p in pieces]
        missing = [Piece(NOTHING, i, 1, 0.0) for i, token in enumerate(ids.tolist()) if token < 0]
        return sorted([*shown, *missing], key=lambda piece: piece.first)

    def _tokens(self, name: str, positions: Ints, pieces: Sequence[Piece]) -> None:
        for first, line in self._lines(pieces):
            position = int(positions[first])
            label = name or ("" if position < 0 else str(position))
            gutter = (f"{label:>{GUTTER - 3}} │ ", "dim")
            self._console.print(Text.assemble(gutter, line), soft_wrap=True)

    def _lines(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Text]]:
        """Lines with the index of their first token; they end at newlines and at the width."""
        room = max(20, self._console.width - GUTTER)
        line, first, used, ends = Text(), 0, 0, False
        weight = 0.0
        for piece in pieces:
            width = cell_len(piece.text)
            if line and (ends or used + width > room):
                yield first, self._closed(line, weight)
                line, used, weight = Text(), 0, 0.0
            if not line:
                first = piece.first
            mark = self._mark(weight, piece.weight)
            line.append(mark)
            line.append(piece.text, style=style_of(piece, self._heaviest))
            used, weight = used + width + cell_len(mark), piece.weight
            ends = piece.text.endswith("↵")
        if line:
            yield first, self._closed(line, weight)

    def _mark(self, before: float, weight: float) -> str:
        """What stands between two pieces where there are no colours."""
        if not self._marks or before == weight or not (before > 0 or weight > 0):
            return ""
        begin = "" if not weight > 0 else "⟦" if weight == 1 else f"⟦{weight:.3g}|"
        return ("⟧" if before > 0 else "") + begin

    def _closed(self, line: Text, weight: float) -> Text:
        return line.append(self._mark(weight, 0.0))


def _kept(ids: Ints, weights: Floats) -> list[float]:
    return [float(w) for i, w in zip(ids.tolist(), weights, strict=True) if i >= 0]
