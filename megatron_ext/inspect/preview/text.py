"""Prints rows of tokens in a terminal, with each token's weight in the loss as its colour.

A token is yellow (small weight) to green (large weight), dim if its weight is 0, and underlined if
it is only read, not predicted. In a terminal without colours, trained tokens stand between ⟦ and ⟧,
with the weight in front if it is not 1. Each line begins with the position id of its first token.

A span is one token, or the few tokens whose bytes together form one character. A span is decoded
together with the tokens before it, since decoders treat the beginning of a text specially.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from megatron_ext.data.samplers import Ints
from megatron_ext.inspect.preview.rows import Document, Floats, Row, documents_of
from megatron_ext.text.tokenizers.base import Tokenizer

LONGEST = 8
"""Largest number of tokens that are tried as one span.

A character has at most 4 bytes and so 4 tokens, but a token may also begin the next character.
"""

_SHOWN = {"\n": "↵", "\t": "⇥"}
_UNKNOWN = "\ufffd"
_HIDDEN = frozenset("Cc Cf Co Cs Cn Zl Zp".split())


@dataclass(frozen=True)
class TokenSpan:
    """Neighbouring tokens of equal weight that are shown as one.

    Attributes:
        text: the text, with every character visible; a newline is ↵.
        first: index of the first token.
        weight: weight of each token as a target; NaN if the tokens are only read.
        is_special: whether the span is a special token, such as the end of a turn.
    """

    text: str
    first: int
    count: int
    weight: float
    is_special: bool = False


class SpanSplitter:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._controls = set(tokenizer.control_texts())
        named = (tokenizer.eos, tokenizer.bos, tokenizer.pad, tokenizer.eod)
        self._named = {number for number in named if number >= 0}
        self._special: dict[int, bool] = {}
        self._decoded: dict[tuple[int, ...], str] = {}

    def is_special(self, token: int) -> bool:
        if token not in self._special:
            self._special[token] = token in self._named or self._decode((token,)) in self._controls
        return self._special[token]

    def text_of(self, token: int) -> str:
        return self.split([token], [0.0])[0].text

    def split(self, ids: Sequence[int], weights: Sequence[float]) -> list[TokenSpan]:
        """Group consecutive tokens into spans; a weight of NaN marks a token that is only read."""
        spans: list[TokenSpan] = []
        before: tuple[int, ...] = ()
        first = 0
        while first < len(ids):
            token = int(ids[first])
            if self.is_special(token):
                text = visible(self._decode((token,))) or _number(token)
                spans.append(TokenSpan(text, first, 1, float(weights[first]), True))
                # Text after a special token is decoded as if it were in the middle of a text.
                before = (token,)
                first = first + 1
                continue
            added, count = self._added(before, ids, first)
            group = [float(weight) for weight in weights[first : first + count]]
            if added is None or not all(_alike(weight, group[0]) for weight in group):
                for i, weight in enumerate(group):
                    spans.append(TokenSpan(_number(int(ids[first + i])), first + i, 1, weight))
            else:
                spans.append(TokenSpan(visible(added), first, count, group[0]))
            before = tuple(int(i) for i in ids[first : first + count])
            first += count
        return spans

    def _added(
        self, before: tuple[int, ...], ids: Sequence[int], first: int
    ) -> tuple[str | None, int]:
        """Decode the fewest tokens from index ``first`` on that form whole characters.

        Args:
            before: the tokens before index ``first``, which influence decoding.

        Returns:
            The text and the number of its tokens; ``(None, 1)`` if the tokens form no text.
        """
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
            valid = all(0 <= i < self._tokenizer.vocab_size for i in ids)
            text = self._tokenizer.detokenize(ids, skip_special_tokens=False) if valid else ""
            self._decoded[ids] = text
        return self._decoded[ids]


def _alike(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _number(token: int) -> str:
    return f"⟨{token}⟩"


def visible(text: str) -> str:
    """Escape control characters and invisible characters, and show newlines as ↵."""
    return "".join(_SHOWN.get(character) or _visible(character) for character in text)


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}"


GUTTER = 10
GRADES = 8
NOTHING = "∅"
"""Symbol for a position where an MTP depth has no target."""

# a small weight is yellow, a full one green
_LIGHTEST = (200, 180, 60)
_FULL = (40, 200, 90)


def grade(weight: float, heaviest: float) -> int:
    """Return a weight's shade, from 1 to `GRADES` (at ``heaviest``); 0 if it is 0 or NaN."""
    if not weight > 0:
        return 0
    return min(GRADES, max(1, math.ceil(GRADES * weight / max(heaviest, 1e-30) - 1e-6)))


def style_of(span: TokenSpan, heaviest: float) -> Style:
    if math.isnan(span.weight):
        return Style(dim=True, underline=True)
    shade = grade(span.weight, heaviest)
    if not shade:
        return Style(dim=True, bold=span.is_special)
    share = (shade - 1) / (GRADES - 1)
    red, green, blue = (
        round(low + share * (high - low)) for low, high in zip(_LIGHTEST, _FULL, strict=True)
    )
    return Style(color=f"rgb({red},{green},{blue})", bold=span.is_special)


def describe(document: Document) -> str:
    words = [f"document {document.number}"]
    provenance = document.provenance
    if provenance is not None:
        words.append(str(provenance))
    if document.end > document.start:
        first = document.row.positions[document.start]
        last = document.row.positions[document.end - 1]
        words.append(f"columns {document.start}–{document.end - 1}, positions {first}–{last}")
    weight = float(document.targets.sum())
    words.append(f"{document.trained} of {len(document.targets)} trained, weight {weight:.6g}")
    if provenance is not None and provenance.cut:
        words.append(f"{provenance.cut} tokens cut off")
    return " · ".join(words)


def describe_row(row: Row) -> str:
    padding = int(row.is_padding.sum())
    return (
        f"data-parallel rank {row.dp_rank} · micro-batch {row.microbatch + 1} · "
        f"row {row.number + 1} · {row.size - padding} of {row.size} positions filled, "
        f"{padding} padding"
    )


class Terminal:
    """Prints rows in a terminal.

    Args:
        console: the terminal.
        splitter: splits tokens into spans that can be shown.
        eod: the token that ends a document in a stream.
        heaviest: the weight that is shown in full green.
    """

    def __init__(self, console: Console, splitter: SpanSplitter, eod: int, heaviest: float) -> None:
        self._console = console
        self._splitter = splitter
        self._eod = eod
        self._heaviest = heaviest
        self._marks = console.no_color or console.color_system is None

    def print(self, text: str, style: str = "") -> None:
        """Print a line in a style of rich; markup such as ``[bold]`` in ``text`` stays as it is."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def row(self, row: Row) -> None:
        self._console.print(Rule(Text(describe_row(row)), align="left"))
        for document in documents_of(row, self._eod):
            self.print(describe(document), "bold cyan")
            self._tokens("", document.positions, self._of(document.ids, document.weights))
            for depth in range(1, len(row.mtp_labels) + 1):
                ids, weights = document.mtp_targets(depth)
                self._tokens(f"MTP {depth}", document.positions, self._of(ids, weights))

    def _of(self, ids: Ints, weights: Floats) -> list[TokenSpan]:
        """Group n tokens into spans, which are shown as one text each; return them in order.

        Args:
            ids: ids of the tokens, ``[n]``. An id of -1 says that there is no target; it becomes a
                span of its own, shown as `NOTHING`.
            weights: weight of each token in the loss, ``[n]``; NaN if the token is only read.
        """
        places = np.flatnonzero(ids >= 0).tolist()
        spans = self._splitter.split(ids[places].tolist(), weights[places].tolist())
        shown = [replace(span, first=places[span.first]) for span in spans]
        missing = [TokenSpan(NOTHING, i, 1, 0.0) for i in np.flatnonzero(ids < 0).tolist()]
        return sorted([*shown, *missing], key=lambda span: span.first)

    def _tokens(self, name: str, positions: Ints, spans: Sequence[TokenSpan]) -> None:
        for first, line in self._lines(spans):
            position = int(positions[first])
            label = name or ("" if position < 0 else str(position))
            gutter = (f"{label:>{GUTTER - 3}} │ ", "dim")
            self._console.print(Text.assemble(gutter, line), soft_wrap=True)

    def _lines(self, spans: Sequence[TokenSpan]) -> Iterator[tuple[int, Text]]:
        """Yield each line's first token index and text; a newline or the full width ends a line."""
        room = max(20, self._console.width - GUTTER)
        line = Text()
        first = 0
        used = 0
        ends = False
        weight = 0.0
        for span in spans:
            width = cell_len(span.text)
            if line and (ends or used + width > room):
                yield first, self._closed(line, weight)
                line = Text()
                used = 0
                weight = 0.0
            if not line:
                first = span.first
            mark = self._mark(weight, span.weight)
            line.append(mark).append(span.text, style=style_of(span, self._heaviest))
            used = used + width + cell_len(mark)
            weight = span.weight
            ends = span.text.endswith("↵")
        if line:
            yield first, self._closed(line, weight)

    def _mark(self, before: float, weight: float) -> str:
        """Return what to print between spans of weights ``before`` and ``weight``: ⟧, ⟦ or both.

        Return "" if the weights are equal, both spans are untrained, or the terminal has colours.
        """
        if not self._marks or before == weight or not (before > 0 or weight > 0):
            return ""
        begin = "" if not weight > 0 else "⟦" if weight == 1 else f"⟦{weight:.3g}|"
        return ("⟧" if before > 0 else "") + begin

    def _closed(self, line: Text, weight: float) -> Text:
        return line.append(self._mark(weight, 0.0))
