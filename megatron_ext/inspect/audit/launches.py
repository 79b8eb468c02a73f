"""Recognizes the commands of a script that start a training program or shape its flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import DataError
from megatron_ext.inspect.audit.conditions import test
from megatron_ext.inspect.audit.expand import (
    World,
    arithmetic,
    readable,
    split_all,
    split_for,
    text_of,
    unknown,
    unknowns,
)
from megatron_ext.inspect.audit.shell import DECLARING, parse
from megatron_ext.inspect.audit.shell_nodes import Simple
from megatron_ext.inspect.audit.shell_words import OPEN
from megatron_ext.inspect.audit.walk import Walk

MAX_SOURCES = 20
"""Files that a script may source, one within the other, before the walk gives up."""

_PROGRAM = re.compile(r"(?:^|[/}\ue001])[\w.-]*(?:pretrain|train|finetune|sft)[\w-]*\.py$")
_LAUNCHERS = re.compile(r"(?:^|/)(?:torchrun|python[\d.]*|deepspeed|accelerate|srun|mpirun)$")
_MEGATRON = frozenset(
    "--num-layers --hidden-size --micro-batch-size --tensor-model-parallel-size --seq-length "
    "--global-batch-size --num-experts --load".split()
)
"""Flags by which the words of a training program are known where its name is open."""
_QUIET = frozenset(
    "echo printf cat ls cp mv rm ln sed awk grep mkdir chmod chown touch which pip git".split()
)
"""Commands whose words are no launch, even where they name a training program."""
_PLACE = re.compile(r"%[-+ 0-9.]*[bdfgiqsu]")
"""A place for a word in a format of ``printf``."""


@dataclass(frozen=True)
class Launch:
    """One start of a training program.

    Attributes:
        launcher: the words before the program, such as ``torchrun --nproc_per_node 8``.
        program: the program, such as ``pretrain_gpt.py``.
        words: the words after it.
        assumed: texts of open conditions, and whether they hold on the way to this launch.
    """

    launcher: tuple[str, ...]
    program: str
    words: tuple[str, ...]
    line: int = 1
    assumed: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def of_flags(cls, words: Sequence[str], assumed: tuple[tuple[str, bool], ...] = ()) -> Launch:
        """Return a launch of Megatron-LM's pretrain_gpt.py with these flags."""
        return cls((), "pretrain_gpt.py", tuple(words), assumed=assumed)


class Reader(Walk):
    """A walk that keeps the launches of a script and carries out the commands that shape them."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.folder = path.resolve().parent if path else None
        self.found: list[Launch] = []
        self.sourced = 0
        self._output: list[str] | None = None

    def command(
        self, words: list[str], node: Simple, world: World, before: World | None
    ) -> list[World]:
        """Take note of a launch, or carry out a built-in command or a function."""
        name = words[0].rsplit("/", 1)[-1]
        if words[0] in world.functions:
            worlds = self._call(words, world)
        elif name in _BUILTINS:
            worlds = _BUILTINS[name](self, words, node, world)
        elif self._output is not None:
            self._output.append(unknown("$(" + name + ")"))
            worlds = [world]
        else:
            worlds = self.launched(words, node, world)
        for each in worlds if before and name not in DECLARING else []:
            for assign in node.assigns:
                old = before.variables.get(assign.name) if before else None
                each.variables.pop(assign.name, None)
                if old is not None:
                    each.variables[assign.name] = old
        return worlds

    @property
    def captures(self) -> bool:
        """Whether the commands are those of a command substitution."""
        return self._output is not None

    def launched(self, words: list[str], node: Simple, world: World) -> list[World]:
        """Take note of the launch that a command is, or holds as the text for a shell."""
        name = words[0].rsplit("/", 1)[-1]
        place = next((i for i, x in enumerate(words) if _PROGRAM.search(x)), None)
        if place is None and _LAUNCHERS.search(words[0]):
            place = next((i for i, x in enumerate(words) if x.endswith(".py")), None)
        if place is None and _LAUNCHERS.search(words[0]) and _MEGATRON & set(words):
            place = next((i for i, x in enumerate(words) if i and set(x) & {OPEN}), None)
        if place is not None and name not in _QUIET:
            launch = Launch(
                tuple(words[:place]), words[place], tuple(words[place + 1 :]), node.line,
                world.assumed,
            )  # fmt: skip
            self.found.append(launch)
            return [world]
        texts = [text_of(x, world) for x in node.documents]
        inner = [x for x in (*words[1:], *texts) if ".py" in x and re.search(r"\s--", x)]
        worlds = [world]
        if inner and (name not in _QUIET or name == "cat"):
            for text in inner:
                worlds = self._text(text, worlds)
        elif words[0].startswith("--") and self.found:
            self.note(
                f"Line {node.line} begins with `{words[0]}`, which is not passed to the program: "
                "the line before ends in a comment, or lacks the backslash that would continue it."
            )
        return worlds

    def _text(self, text: str, worlds: list[World]) -> list[World]:
        try:
            nodes = parse(text)
        except DataError:
            self.note(f"The text {text[:40]!r}… for another shell cannot be read.")
            return worlds
        inside = [x.copy() for x in worlds]
        self.run(nodes, inside)
        return worlds

    def _call(self, words: list[str], world: World) -> list[World]:
        """Walk through the body of a function."""
        outer = world.positional
        world.positional = tuple(words[1:])
        after = self.run([world.functions[words[0]].body], [world])
        for each in after:
            each.positional = outer
            each.ended = "" if each.ended == "returned" else each.ended
        return after

    def capture(self, text: str, world: World) -> str:
        """Return what a command substitution prints, or a mark if that is open."""
        outer, self._output = self._output, []
        inner = world.copy()
        try:
            nodes = parse(text)
            launches = len(self.found)
            worlds = self.run(nodes, [inner])
            del self.found[launches:]
            printed = "".join(self._output)
        except DataError:
            worlds, printed = [], ""
        finally:
            self._output = outer
        if len(worlds) != 1 or unknowns(printed) == ["$"] or _open_command(printed):
            return unknown("$(" + " ".join(text.split()) + ")")
        return printed.rstrip("\n")

    def say(self, text: str) -> None:
        """Keep what a command prints, within a command substitution."""
        if self._output is not None:
            self._output.append(text)

    def join_lines(self) -> None:
        """Join the lines that were printed so far within a command substitution."""
        if self._output is not None:
            self._output[:] = [" ".join("".join(self._output).split())]

    def variables(self, worlds: list[World]) -> None:
        """Take variables that hold flags for a launch, in a script that is sourced by another."""
        for world in worlds:
            names, words = [], []
            for name, value in world.variables.items():
                values = value.split() if isinstance(value, str) else list(value)
                if _MEGATRON & {x.partition("=")[0] for y in values for x in y.split()}:
                    names.append(name)
                    words += [x for y in values for x in y.split()]
            if names:
                self.note(
                    "The script starts no training program; the flags that it leaves in "
                    f"{', '.join(names)} are audited."
                )
                self.found.append(Launch.of_flags(words, world.assumed))


def _open_command(printed: str) -> bool:
    return any(name.startswith("$(") for name in unknowns(printed))


def _echo(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    rest = words[1:]
    while rest and re.fullmatch(r"-[neE]+", rest[0]):
        rest = rest[1:]
    reader.say(" ".join(rest) + "\n")
    return [world]


def _printf(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    """Print words in a format, or put them into the variable that ``-v`` names."""
    rest = [x for x in words[1:3] if x != "--"] + words[3:]
    if rest[:1] == ["-v"]:
        world.variables.update({name: _formatted(rest[2:]) for name in rest[1:2]})
    else:
        reader.say(_formatted(rest))
    return [world]


def _formatted(words: list[str]) -> str:
    """Return words in the format that is the first, used again while words are left."""
    form = "".join(words[:1]).replace("\\n", "\n").replace("\\t", "\t")
    places, rest = len(_PLACE.findall(form)), iter(words[1:])
    rounds = max(-(-(len(words) - 1) // places), 1) if places else 1
    return "".join(_PLACE.sub(lambda _: next(rest, ""), form) for _ in range(rounds))


def _cat(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    texts = [text_of(x, world) for x in node.documents]
    reader.say("".join(texts) if texts else unknown("$(cat)"))
    return [world] if not texts or reader.captures else reader.launched(words, node, world)


def _read(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    """Set the variables of ``read`` to what stands in its heredoc, or leave them open."""
    valued = [i + 1 for i, x in enumerate(words) if re.fullmatch(r"-\w*[dinNptu]", x)]
    names = [x for i, x in enumerate(words) if i and i not in valued and x.isidentifier()]
    text = "\n".join(text_of(x, world) for x in node.documents).strip()
    if not any(re.fullmatch(r"-\w*d", x) for x in words):
        text = text.partition("\n")[0]
    if not node.documents or not names:
        world.variables.update({name: unknown(name) for name in names})
    elif any(re.fullmatch(r"-\w*a\w*", x) for x in words):
        world.variables[names[-1]] = split_all(text, world)
    else:
        world.variables.update(split_for(names, text, world))
    return [world]


def _filter(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    """Join the lines that the commands before it in a pipeline printed, or leave them open."""
    if not reader.captures:
        return reader.launched(words, node, world)
    if words in (["xargs"], ["tr", "\\n", " "]):
        reader.join_lines()
    elif words[0] != "tee":
        reader.say(unknown(f"$({words[0]})"))
    return [world]


def _getopts(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    """Leave open which option comes next, and its value."""
    world.variables.update({name: unknown(name) for name in (*words[2:3], "OPTARG")})
    world.status = None
    return [world]


def _test(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    inside = words[1:]
    if words[0] == "[" and inside[-1:] == ["]"]:
        inside.pop()
    world.status = test(inside, world)
    return [world]


def _exit(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    if words[0] == "return":
        world.ended = "returned"
    else:
        world.ended = "failed" if words[1:] and words[1] != "0" else "ended"
    return [world]


def _unset(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    for name in words[1:]:
        world.variables[name] = ""
        if name in world.given:
            world.given = {k: v for k, v in world.given.items() if k != name}
    return [world]


def _set(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    if "--" in words:
        world.positional = tuple(words[words.index("--") + 1 :])
    return [world]


def _shift(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    number = arithmetic(words[1], world) if len(words) > 1 else 1
    if world.positional is not None:
        world.positional = world.positional[number or 0 :]
    return [world]


def _source(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    """Walk through a sourced file in the current folder or beside the script, or note it."""
    name = words[1] if len(words) > 1 else ""
    folders = [Path(str(world.variables["PWD"])), reader.folder or Path()]
    path = next((x / name for x in folders if (x / name).is_file()), None)
    reader.sourced += 1
    if name and path and reader.sourced <= MAX_SOURCES:
        try:
            return reader.run(parse(path.read_text(encoding="utf-8")), [world])
        except (OSError, UnicodeDecodeError, DataError):
            pass
    reader.note(f"The sourced file {readable(name) or 'without a name'} is not read.")
    return [world]


def _eval(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    try:
        return reader.run(parse(" ".join(words[1:])), [world])
    except DataError:
        reader.note(f"Line {node.line}: what `eval` is given cannot be read.")
        return [world]


def _exec(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    rest = [x for x in words[1:] if x != "--"]
    return reader.command(rest, node, world, None) if rest else [world]


def _path(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    """Print what the tools for names of paths print, and follow ``cd``."""
    name = words[0].rsplit("/", 1)[-1]
    plain = [x for x in words[1:] if not x.startswith("-")]
    here = str(world.variables.get("PWD", unknown("PWD")))
    target = plain[0] if plain else here
    if name == "dirname":
        reader.say(str(Path(target).parent))
    elif name == "basename":
        reader.say(Path(target).name.removesuffix(plain[1] if len(plain) > 1 else ""))
    elif name == "cd":
        world.variables["PWD"] = str(Path(here) / target)
    else:
        reader.say(here if name == "pwd" else str(Path(here) / target))
    return [world]


def _seq(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    numbers = [arithmetic(x, world) for x in words[1:]]
    known = [x for x in numbers if x is not None]
    if len(known) != len(numbers) or not 1 <= len(known) <= 3:
        reader.say(unknown("$(seq)"))
        return [world]
    first, step = (known[0] if len(known) > 1 else 1), (known[1] if len(known) > 2 else 1)
    reader.say("\n".join(map(str, range(first, known[-1] + 1, step or 1))))
    return [world]


def _expr(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    value = arithmetic(" ".join(words[1:]), world)
    reader.say(unknown("$(expr)") if value is None else str(value))
    return [world]


def _let(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    for word in words[1:]:
        reader.calculate(word, world)
    return [world]


def _declare(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    """Set variables whose assignments are quoted whole, such as ``export "X=$Y"``."""
    for word in words[1:]:
        name, sign, value = word.partition("=")
        if sign and name.isidentifier():
            world.variables[name] = value
    return [world]


def _nothing(reader: Reader, words: list[str], node: Simple, world: World) -> list[World]:
    world.status = words[0] != "false"
    return [world]


_BUILTINS: dict[str, Callable[[Reader, list[str], Simple, World], list[World]]] = {
    "echo": _echo, "printf": _printf, "tr": _filter, "xargs": _filter, "tee": _filter,
    "cat": _cat, "read": _read, "[": _test, "test": _test,
    "exit": _exit, "return": _exit, "unset": _unset, "set": _set, "shift": _shift,
    "source": _source, ".": _source, "eval": _eval, "exec": _exec, "dirname": _path,
    "basename": _path, "realpath": _path, "readlink": _path, "pwd": _path, "cd": _path,
    "seq": _seq, "getopts": _getopts, "let": _let, "expr": _expr,
    **dict.fromkeys((":", "true", "false"), _nothing),
    **dict.fromkeys(DECLARING, _declare),
}  # fmt: skip
