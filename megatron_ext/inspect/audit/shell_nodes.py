"""The commands of a bash script as a tree, from which nothing is left out but redirections."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.inspect.audit.shell_words import Part, Word


@dataclass(frozen=True)
class Assign:
    """An assignment; an array's ``value`` is a list of words, ``added`` stands for ``+=``."""

    name: str
    value: Word | list[Word]
    added: bool = False
    key: str | None = None


@dataclass
class Simple:
    """A command, the assignments before it or among its words, and what it reads as input."""

    assigns: list[Assign] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    documents: list[Word] = field(default_factory=list)
    line: int = 0
    text: str = ""


@dataclass
class Test:
    """A test ``[[ … ]]`` as words; its operators are words of their own."""

    words: list[Word]
    text: str


@dataclass
class Arithmetic:
    """A command ``(( … ))``."""

    text: str


@dataclass
class Chain:
    """Commands joined by ``&&`` and ``||``; each operator stands before its command."""

    first: Node
    rest: list[tuple[str, Node]]


@dataclass
class Pipeline:
    """Commands joined by ``|``, with the status inverted by ``!``."""

    commands: list[Node]
    inverted: bool


@dataclass
class If:
    """The branches of an ``if``: condition, its text, body; without a condition for ``else``."""

    branches: list[tuple[list[Node], str, list[Node]]]


@dataclass
class Case:
    """The branches of a ``case``, each with its patterns."""

    subject: Word
    text: str
    branches: list[tuple[list[Word], list[Node]]]


@dataclass
class For:
    """A loop over words; ``words`` is None for positional parameters or a C-style header."""

    name: str
    words: list[Word] | None
    body: list[Node]


@dataclass
class While:
    """A loop while a condition holds, or until it does."""

    condition: list[Node]
    body: list[Node]
    until: bool
    text: str


@dataclass
class Group:
    """Commands in braces, or in parentheses (a subshell)."""

    body: list[Node]
    subshell: bool


@dataclass
class Function:
    """The definition of a function."""

    name: str
    body: Node


Node = Simple | Test | Arithmetic | Chain | Pipeline | If | Case | For | While | Group | Function


def spelled(word: Word) -> str:
    """Return the literal parts of a word."""
    return "".join(part.text for part in word if part.kind == "text")


def keyed(word: Word) -> tuple[Word, Word] | None:
    """Return key and value of an array's element ``[key]=value``, None for a plain element."""
    if not word or not word[0].text.startswith("[") or word[0].kind != "text":
        return None
    for place, part in enumerate(word):
        before, sign, after = part.text.partition("]=")
        if sign and part.kind == "text" and not part.quoted:
            key = (*word[:place], Part("text", before))
            key = (Part("text", key[0].text[1:], key[0].quoted), *key[1:])
            return key, (Part("text", after), *word[place + 1 :])
    return None
