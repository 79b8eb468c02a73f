"""Reads the words of a bash script: quotes, comments, continued lines and expansions.

A word is a tuple of parts, each a literal or an expansion that stays text until
``megatron_ext/inspect/audit/expand.py`` evaluates it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_ext.errors import DataError

OPEN, CLOSE = "\ue000", "\ue001"
"""Around the name of a value that is open, as `expand.unknown` writes it."""
_META = " \t\n;&|<>()"
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", "&>>", "&>", ";", "&", "|", "(", ")", "\n")
_KEYWORD = re.compile(r"[^\s;&|<>()'\"$`\\]+")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PLAIN = re.compile(r"[\w./:=,@%+\-\[\]{}*?~^#!]+")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True)
class Part:
    """A piece of a word.

    Attributes:
        kind: ``text``, ``param`` (what stands in ``${}``), ``command`` or ``arithmetic``.
        quoted: whether it stands in quotes, so that its value is not split at blanks.
    """

    kind: str
    text: str
    quoted: bool = False


Word = tuple[Part, ...]


class Lexer:
    """A position in a script, and what can be read from there."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def error(self, what: str, at: int | None = None) -> DataError:
        """Return an error that names the line."""
        return DataError(f"Line {self.line(at)} of the script cannot be read: {what}.")

    def line(self, at: int | None = None) -> int:
        """Return the number of the line at a position, or at the current one."""
        return self.text.count("\n", 0, self.at if at is None else at) + 1

    def blanks(self) -> None:
        """Skip blanks, continued lines, and a comment if one follows."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def operator(self) -> str:
        """Return the operator that follows, or an empty text; it is not taken."""
        self.blanks()
        return next((x for x in _OPERATORS if self.text.startswith(x, self.at)), "")

    def keyword(self) -> str:
        """Return the plain word that follows, or an empty text; it is not taken."""
        self.blanks()
        found = _KEYWORD.match(self.text, self.at)
        return found.group() if found else ""

    def word(self, stops: str = _META) -> Word:
        """Take a word up to a blank or an operator.

        Raises:
            DataError: a quote or a bracket is not closed.
        """
        parts: list[Part] = []
        while self.at < len(self.text) and self.text[self.at] not in stops:
            parts += self._piece()
        return tuple(parts)

    def _piece(self) -> list[Part]:
        char = self.text[self.at]
        if char == "\\":
            self.at += 2
            escaped = self.text[self.at - 1 : self.at]
            return [] if escaped == "\n" else [Part("text", escaped, True)]
        if char == "'":
            return [Part("text", self._until("'"), True)]
        if char == '"':
            self.at += 1
            return [Part("text", "", True), *self.quoted('"')]
        if self.text.startswith("$'", self.at):
            self.at += 1
            plain = re.sub(r"\\(.)", lambda x: _ESCAPES.get(x[1], x[0]), self._until("'"))
            return [Part("text", plain, True)]
        if char in "$`":
            return [self._expansion(False)]
        if char == OPEN:
            return [Part("text", self._mark())]
        run = _PLAIN.match(self.text, self.at)
        self.at += len(run.group()) if run else 1
        return [Part("text", run.group() if run else char)]

    def _mark(self) -> str:
        """Take the mark of an open value, which an earlier expansion has left in the text."""
        start, end = self.at, self.text.find(CLOSE, self.at)
        self.at = end + 1 if end >= 0 else len(self.text)
        return self.text[start : self.at]

    def _until(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self.error(f"the quote {quote} is not closed")
        found = self.text[self.at + 1 : end]
        self.at = end + 1
        return found

    def quoted(self, end: str) -> list[Part]:
        """Take parts up to the quote ``end``, or up to the end of the text if it is empty."""
        parts: list[Part] = []
        start, plain = self.at, ""
        while self.at < len(self.text) and (not end or self.text[self.at] != end):
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                escaped = self.text[self.at + 1]
                plain += "" if escaped == "\n" else escaped
                self.at += 2
            elif char in "$`":
                parts += [Part("text", plain, True), self._expansion(True)]
                plain = ""
            elif char == OPEN:
                plain += self._mark()
            else:
                plain += char
                self.at += 1
        if end and self.at >= len(self.text):
            raise self.error(f"the quote {end} is not closed", start)
        self.at += len(end)
        return [*parts, Part("text", plain, True)]

    def _expansion(self, quoted: bool) -> Part:
        """Take what a dollar or a backquote begins."""
        if self.text[self.at] == "`":
            return Part("command", self._until("`").replace("\\`", "`"), quoted)
        if self.text.startswith("$((", self.at) and (inner := self.arithmetic(self.at + 1)):
            return Part("arithmetic", inner, quoted)
        if self.text.startswith("$(", self.at):
            return Part("command", self.bracketed("(", ")"), quoted)
        if self.text.startswith("${", self.at):
            return Part("param", self.bracketed("{", "}"), quoted)
        if self.text.startswith("$[", self.at):
            return Part("arithmetic", self.bracketed("[", "]"), quoted)
        name = _NAME.match(self.text, self.at + 1)
        self.at += 1 + (len(name.group()) if name else 0)
        return Part("param", name.group(), quoted) if name else Part("text", "$", quoted)

    def arithmetic(self, at: int) -> str:
        """Take ``((…))`` at a position; return its inside, or nothing if it is something else."""
        depth, here = 0, at
        while here < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[here], 0)
            here += 1
            if depth == 0:
                break
        inside = self.text[at + 2 : here - 2]
        if depth or self.text[here - 2 : here] != "))":
            return ""
        self.at = here
        return inside or "0"

    def bracketed(self, opening: str, closing: str) -> str:
        """Take a bracket that begins at the next ``opening``; return its inside."""
        start = self.at
        self.at = self.text.index(opening, self.at) + 1
        first, depth = self.at, 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 1
            elif char == "'" and opening == "(":
                self._until("'")
                continue
            elif char == '"':
                self.at += 1
                self.quoted('"')
                continue
            elif char == "#" and opening == "(" and self.text[self.at - 1] in " \t\n":
                self.blanks()
                continue
            else:
                depth += (char == opening) - (char == closing)
            self.at += 1
            if depth == 0:
                return self.text[first : self.at - 1]
        raise self.error(f"the bracket {opening} is not closed", start)
