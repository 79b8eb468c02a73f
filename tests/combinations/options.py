"""Options that may vary in a run: values of each flag, from the flags and ``values.txt``."""

import functools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.config.flags import Flag, flags_of
from megatron_ext.config.sections import all_flags, section_name, spellings
from megatron_ext.text.task import TEXT
from megatron_ext.train.task import Task
from megatron_ext.video.task import VIDEO

SECTIONS: dict[str, list[str]] = {}
for _line in (Path(__file__).parent / "values.txt").read_text(encoding="utf-8").splitlines():
    if _line.startswith("["):
        _lines = SECTIONS[_line[1:-1]] = []
    elif _line and not _line.startswith("#"):
        _lines.append(_line)


def _pairs(name: str) -> dict[str, str]:
    return dict(line.split(": ", 1) if ": " in line else (line, "") for line in SECTIONS[name])


def _lists(name: str) -> dict[str, list[str]]:
    return {key: [x.strip() for x in text.split("|")] for key, text in _pairs(name).items()}


VALUES, NEEDS = _lists("values"), _lists("needs")
SECTION_NEEDS, FIXED = _pairs("section needs"), _pairs("fixed")
NETWORKS = {
    name.removeprefix("networks "): lines
    for name, lines in SECTIONS.items()
    if name.startswith("networks ")
}
WHOLES = {name: lines for name, lines in SECTIONS.items() if name.startswith("whole")}


def words_of(text: str, data: str) -> list[str]:
    """Return the words of a text, with the folder of the inputs in its place."""
    return [word.format(data=data) for word in shlex.split(text)]


Settings = dict[str, tuple[bool, tuple[str, ...]]]
"""Fields, each with its sign and its values."""


@dataclass(frozen=True)
class Option:
    """Flags that are drawn together, with ``{data}`` for the folder of inputs.

    The section is that of the main flag, or "whole" for flags that are usually given together.
    """

    text: str
    section: str

    @functools.cached_property
    def settings(self) -> Settings:
        return settings_of(words_of(self.text, "{data}"))

    def agrees_with(self, settings: Settings) -> bool:
        return all(settings.get(name, value) == value for name, value in self.settings.items())


@functools.cache
def _table() -> dict[str, tuple[Flag, bool]]:
    return spellings(every_flag())


_INSTEAD = {"train_samples": "train_iters", "train_epochs": "train_iters"}
"""Fields that say the same as another one, of which a run takes only one."""


def settings_of(words: Sequence[str]) -> Settings:
    """Return the fields that a command line sets; the last word on a field wins."""
    found: Settings = {}
    name, values = "", []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                flag, sign = _table().get(name, (None, True))
                found[flag.field if flag else name] = (sign, tuple(values))
            name, values = word, []
        else:
            values.append(word)
    return found


def joined(parts: Iterable[Sequence[str]]) -> list[str]:
    """Join command lines to one, in which a later one wins over an earlier one."""
    last: dict[str, list[str]] = {}
    for words in parts:
        group: list[str] = []
        for word in [*words, "--"]:
            if word.startswith("--"):
                if group:
                    flag, _ = _table().get(group[0], (None, True))
                    name = flag.field if flag else group[0]
                    last[_INSTEAD.get(name, name)] = group
                group = []
            group.append(word)
    return [word for group in last.values() for word in group]


def name_of(flag: Flag) -> str:
    """Return the name by which the tables know a flag: its field, dashed."""
    return flag.field.replace("_", "-")


def values_of(flag: Flag) -> list[str] | None:
    """Return the flag with each of its values; None where nothing says what they are."""
    name = name_of(flag)
    first = flag.positive[0]
    if flag.type is bool:
        return [flag.shown, flag.positive[0] if flag.default is True else flag.negative[-1]]
    if name in VALUES:
        return [f"{first} {value}" for value in VALUES[name]]
    if flag.choices:
        return [f"{first} {choice}" for choice in flag.choices]
    return None


@functools.cache
def every_flag() -> list[Flag]:
    return list({flag.field: flag for flag in (*all_flags(TEXT), *all_flags(VIDEO))}.values())


def _words_of_task(task: Task) -> frozenset[str]:
    """Return every spelling of the flags of a task's own sections."""
    kinds = {section_name(kind): kind for kind in task.sections}
    return frozenset(spellings([x for name in kinds for x in flags_of(name, kinds[name])]))


@functools.cache
def words_elsewhere(script: str) -> frozenset[str]:
    """Return the spellings of the flags that the other program has and ``script`` lacks."""
    own, other = (TEXT, VIDEO) if script == "pretrain_gpt.py" else (VIDEO, TEXT)
    return _words_of_task(other) - _words_of_task(own)


@functools.cache
def options_of(sections: tuple[str, ...], script: str) -> tuple[Option, ...]:
    """Return every option of these sections, and the flags that are usually given together."""
    found = {}
    for flag in every_flag():
        name = name_of(flag)
        if flag.section not in sections or name in FIXED:
            continue
        needs = [SECTION_NEEDS.get(flag.section, ""), *NEEDS.get(name, [])]
        for value in values_of(flag) or []:
            words = joined([" ".join(needs).split(), value.split()])
            text = " ".join(words) if "'" not in value else f"{' '.join(needs)} {value}".strip()
            found[text] = Option(text, flag.section)
    for name in sections:
        if name in WHOLES:
            found.update({text: Option(text, name) for text in WHOLES[name]})
    foreign = words_elsewhere(script)
    return tuple(found[text] for text in found if not foreign & set(text.split()))


@functools.cache
def networks_of(program: str) -> tuple[Option, ...]:
    """Return the options that name the networks of a program, one of which each case has."""
    return tuple(Option(text, "networks") for text in NETWORKS.get(program, ()))
