"""Evaluates the words and the arithmetic of a bash script without running a command.

What a script leaves open, such as a variable that its environment gives, becomes a mark
``<NAME>`` in private characters; it flows through texts like any other value.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ext.inspect.audit.shell_nodes import Function
from megatron_ext.inspect.audit.shell_words import CLOSE, OPEN, Lexer, Part, Word

_BLANK = "\ue002"
_MARK = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
_PARAM = re.compile(
    r"(!?)(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[((?:[^\[\]]|\[[^\]]*\])*)\])?(.*)", re.DOTALL
)
_STAR = re.compile(r"\*|\w+\[\*\]")
"""Names behind ``${`` whose values are joined to one word in quotes."""
_DEFAULTS = re.compile(r"(:?[-=+?])(.*)", re.DOTALL)

Value = str | tuple[str, ...] | dict[str, str]


def unknown(name: str) -> str:
    """Return the mark of a value that the script leaves open."""
    return f"{OPEN}{name.replace(' ', _BLANK)}{CLOSE}"


def unknowns(text: str) -> list[str]:
    """Return the names of what is open in a text."""
    return [name.replace(_BLANK, " ") for name in _MARK.findall(text)]


def known_part(text: str) -> str:
    """Return a text without what is open in it."""
    return _MARK.sub("", text)


def readable(text: str) -> str:
    """Return a text with its marks as a reader of the script knows them: ``$NAME``."""
    shown = _MARK.sub(lambda x: x[1] if x[1].startswith("$") else f"${x[1]}", text)
    return shown.replace(_BLANK, " ")


@dataclass
class World:
    """The state of a script on one of the ways through its branches."""

    variables: dict[str, Value] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    positional: tuple[str, ...] | None = None
    assumed: tuple[tuple[str, bool], ...] = ()
    status: bool | None = True
    ended: str = ""
    capture: Callable[[str, World], str] | None = None

    def copy(self) -> World:
        """Return an independent copy."""
        return World(
            dict(self.variables), self.given, dict(self.functions), self.positional, self.assumed,
            self.status, self.ended, self.capture,
        )  # fmt: skip

    @property
    def separators(self) -> str:
        """The characters at which values are split; the first joins the values of ``[*]``."""
        given = self.variables.get("IFS", " ")
        return given if isinstance(given, str) and not unknowns(given) else " "

    def get(self, name: str) -> Value | None:
        """Return a variable or a positional parameter, None if nothing gave it a value."""
        if name.isdigit():
            return self._positional(int(name))
        if name in "@*":
            return self.positional
        if name == "#":
            return None if self.positional is None else str(len(self.positional))
        return self.variables.get(name, self.given.get(name))

    def _positional(self, number: int) -> Value | None:
        if number == 0:
            return self.variables.get("0")
        if self.positional is None:
            return self.given.get(str(number))
        return self.positional[number - 1] if number <= len(self.positional) else ""


def fields(word: Word, world: World) -> list[str]:
    """Return the words that a word of a command becomes: expanded, and split where not quoted."""
    found: list[str] = []
    current: str | None = None
    for part in word:
        values = _values(part, world)
        if part.kind == "param" and not values:
            continue
        pieces: list[str] = []
        if part.quoted or part.kind == "text":
            pieces = values
        else:
            for value in values:
                pieces += _split(value, world) if len(values) == 1 or value else []
        for index, piece in enumerate(pieces):
            if index:
                if current:
                    found.append(current)
                current = None
            current = (current or "") + piece
    return found if current is None else [*found, *([current] if current or _quoted(word) else [])]


def _quoted(word: Word) -> bool:
    return any(part.quoted and part.kind == "text" for part in word)


def _split(value: str, world: World) -> list[str]:
    """Split at blanks; a blank at an end separates from what stands beside it."""
    pieces = re.split(_pattern(world), value)
    return pieces if any(pieces) or not value else ["", ""]


def _pattern(world: World) -> str:
    return r"[ \t\n]+" if not world.separators.strip() else f"[{re.escape(world.separators)}]"


def split_for(names: Sequence[str], value: str, world: World) -> dict[str, str]:
    """Return a text as ``read`` shares it out among variables; the last one has the rest."""
    pieces, pattern = [], _pattern(world)
    for _ in names[1:]:
        piece, value = [*re.split(pattern, value, maxsplit=1), ""][:2]
        pieces.append(piece)
    return dict(zip(names, [*pieces, value], strict=True))


def split_all(value: str, world: World) -> tuple[str, ...]:
    """Return the elements of an array that is read from a text."""
    return tuple(x for x in re.split(_pattern(world), value.strip()) if x)


def text_of(word: Word, world: World) -> str:
    """Return a word as one text, as in an assignment."""
    return "".join(" ".join(_values(part, world)) for part in word)


def _values(part: Part, world: World) -> list[str]:
    if part.kind == "text":
        return [part.text]
    if part.kind == "arithmetic":
        number = arithmetic(part.text, world)
        shown = " ".join(readable(part.text).split())
        return [unknown(f"$(({shown}))") if number is None else str(number)]
    if part.kind == "command":
        if world.capture is None:
            return [unknown(f"$({part.text.strip()})")]
        return [world.capture(part.text, world)]
    values = parameter(part.text, world)
    return [world.separators[:1].join(values)] if part.quoted and _STAR.match(part.text) else values


def parameter(text: str, world: World) -> list[str]:
    """Return the values of what stands in ``${…}``."""
    found = _PARAM.fullmatch(text)
    if not found:
        return [unknown(text)]
    indirect, length, name, key, rest = found.groups()
    if indirect and not rest:
        inner = world.get(name)
        if not isinstance(inner, str) or unknowns(inner):
            return [unknown(f"${{!{name}}}")]
        name, _, index = inner.partition("[")
        key = index.rstrip("]") or key
    if length and (rest or not name):
        return [unknown(text)]
    values = _of_name(name, key, world)
    if length:
        if values is None or any(map(unknowns, values)):
            return [unknown(f"#{name}")]
        return [str(len(values) if key in ("@", "*") else len("".join(values)))]
    whole = (key or name) in ("@", "*")
    if whole and values and rest.startswith(":") and not _DEFAULTS.match(rest):
        # Positional parameters are counted from 1.
        return _slice(values, rest, world, int(not key))
    return _with_operator(name, values, rest, world)


def _of_name(name: str, key: str | None, world: World) -> list[str] | None:
    """Return the values of a variable or of an element of an array, None if it is not set."""
    value = world.get(name)
    if value is None:
        return None
    if isinstance(value, dict):
        if key in ("@", "*"):
            return list(value.values())
        index = subscript(key or "0", world)
        return [value[index]] if index in value else None
    if isinstance(value, str):
        return [value]
    if key in ("@", "*") or name in ("@", "*"):
        return list(value)
    place = arithmetic(key, world) if key else 0
    if place is None:
        return [unknown(f"{name}[{key}]")]
    return [value[place]] if -len(value) <= place < len(value) else None


def subscript(key: str, world: World) -> str:
    """Return what stands between the brackets of an element, expanded and without quotes."""
    return text_of(tuple(Lexer(key).quoted("")), world).strip("\"'")


def _with_operator(name: str, values: list[str] | None, rest: str, world: World) -> list[str]:
    """Apply what follows the name in ``${name…}``."""
    given = _DEFAULTS.match(rest)
    if not given:
        if values is None:
            return [unknown(name)] if name not in ("@", "*") else [unknown("@")]
        return [_edited(value, rest, world) for value in values]
    kind, word = given.groups()
    empty = values is None or (kind[0] == ":" and not any(values))
    if kind[-1] == "+":
        return [] if empty else fields(tuple(Lexer(word).word("")), world)
    if not empty or kind[-1] == "?":
        return values or [unknown(name)]
    default = fields_text(word, world)
    if kind[-1] == "=":
        world.variables[name] = default
    return [default]


def fields_text(text: str, world: World) -> str:
    """Return the text of a default, whose quotes do not stay."""
    return text_of(Lexer(text).word(""), world)


def _slice(values: list[str], rest: str, world: World, first: int) -> list[str]:
    """Return a part of an array, which begins at ``first``, for ``${A[@]:start:length}``."""
    numbers = [arithmetic(x, world) for x in rest[1:].split(":")]
    start, length = numbers[0] or 0, numbers[1] if len(numbers) > 1 else None
    found = values[start if start < 0 else max(start - first, 0) :]
    return found if length is None else found[:length]


def _edited(value: str, rest: str, world: World) -> str:
    """Apply an operator on texts: cutting, replacing, upper and lower case, a part."""
    if not rest or (unknowns(value) and rest[0] in "^,:/"):
        return value
    if rest[0] in "^,":
        change = str.upper if rest[0] == "^" else str.lower
        return change(value) if rest[:2] in ("^^", ",,") else change(value[:1]) + value[1:]
    if rest[0] in "%#":
        greedy = rest[:2] in ("%%", "##")
        return _cut(value, fields_text(rest[1 + greedy :], world), rest[0] == "%", greedy)
    if rest[0] == "/":
        every = rest[:2] == "//"
        old, _, new = rest[1 + every :].partition("/")
        anchor, old = (old[0], old[1:]) if old[:1] in ("#", "%") and not every else ("", old)
        pattern = _regex(fields_text(old, world))
        pattern = {"#": rf"\A{pattern}", "%": rf"{pattern}\Z"}.get(anchor, pattern)
        return re.sub(pattern, lambda _: fields_text(new, world), value, count=0 if every else 1)
    if rest[0] == ":":
        numbers = [arithmetic(x, world) for x in rest[1:].split(":")]
        if None not in numbers:
            start = numbers[0] or 0
            return value[start:] if len(numbers) == 1 else value[start:][: numbers[1]]
    return unknown(readable(value) + rest)


def _regex(pattern: str) -> str:
    return fnmatch.translate(pattern).removeprefix("(?s:").removesuffix(")\\Z").removesuffix(")\\z")


def _cut(value: str, pattern: str, at_end: bool, greedy: bool) -> str:
    """Cut the shortest or longest match of a glob from one end."""
    cuts = range(len(value) + 1)
    if at_end:
        places = [i for i in cuts if fnmatch.fnmatchcase(value[i:], pattern)]
        return value[: (min if greedy else max)(places)] if places else value
    places = [i for i in cuts if fnmatch.fnmatchcase(value[:i], pattern)]
    return value[(max if greedy else min)(places) :] if places else value


_BINARY: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.FloorDiv: lambda a, b: int(a / b), ast.Mod: lambda a, b: a - b * int(a / b),
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def arithmetic(text: str, world: World) -> int | None:
    """Return the value of an arithmetic expression, None if something in it is open."""
    filled = text_of(tuple(Lexer(text.replace('"', "")).quoted("")), world)
    if unknowns(filled):
        return None
    ternary = re.fullmatch(r"(.+?)\?(.+):(.+)", filled, re.DOTALL)
    if ternary:
        chosen = arithmetic(ternary[1], world)
        return None if chosen is None else arithmetic(ternary[2 if chosen else 3], world)
    python = filled.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    python = re.sub(r"!(?!=)", " not ", python)
    try:
        tree = ast.parse(python.strip() or "0", mode="eval").body
        return _number(tree, world)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _number(node: ast.AST, world: World) -> int:
    """Return the value of a node; raise ValueError if something in it is open."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        value = world.get(node.id)
        number = arithmetic(value, world) if isinstance(value, str) else None
        if number is None:
            raise ValueError(node.id)
        return number
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left, world), _number(node.right, world)
        if isinstance(node.op, ast.Pow | ast.LShift) and right > 64:
            raise ValueError(right)
        return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _number(node.left, world), _number(node.comparators[0], world)
        return int(_BINARY[type(node.ops[0])](left, right))
    if isinstance(node, ast.UnaryOp):
        inner = _number(node.operand, world)
        return int(not inner) if isinstance(node.op, ast.Not) else -inner
    if isinstance(node, ast.BoolOp):
        values = [bool(_number(x, world)) for x in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError(ast.dump(node))
