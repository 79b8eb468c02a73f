"""Turns fields of dataclasses into command-line flags, which `flag` declares.

`flag` also takes the range of a numeric flag, which is checked before anything uses the value.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from megatron_ext.errors import ConfigError, FlagError

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

NumberT = TypeVar("NumberT", int, float)

LARGEST_INT = 2**31 - 1
LARGEST_LONG = 2**63 - 1
WORTH_SAYING = 1000
"""Error messages name upper bounds up to this one; larger ones only keep absurd values out."""


@dataclass(frozen=True)
class Range:
    """An interval from ``low`` to ``high``, which never contains NaN or infinity.

    Both ends are included, unless ``above`` excludes ``low`` or ``below`` excludes ``high``.
    """

    low: float
    high: float = LARGEST_INT
    above: bool = False
    below: bool = False

    def broken_rule(self, value: float) -> str | None:
        """Return the rule that a number breaks, such as "must be at least 1"; None if it fits."""
        small = value < self.low or (self.above and value == self.low)
        large = value > self.high or (self.below and value == self.high)
        finite = not isinstance(value, float) or math.isfinite(value)
        if finite and not small and not large:
            return None
        if not finite:
            return "must be a finite number" + (
                f", {self._bounds}" if self.low > -self.high else ""
            )
        if small or self.high <= WORTH_SAYING:
            return f"must be {self._bounds}"
        return f"must be {self._upper}"

    def in_words(self) -> str:
        """Return the bounds, such as "at least 1"; "" if they only keep absurd values out."""
        absurd = self.high > WORTH_SAYING and self.low <= -self.high
        return "" if absurd else self._bounds

    @property
    def _upper(self) -> str:
        return f"{'below' if self.below else 'at most'} {_plain(self.high)}"

    @property
    def _bounds(self) -> str:
        """Return the lower bound in words, and the upper one unless it is too large to mention."""
        lower = f"{'above' if self.above else 'at least'} {_plain(self.low)}"
        return f"{lower} and {self._upper}" if self.high <= WORTH_SAYING else lower

    def integer(self, text: str) -> int:
        """Convert text to an integer in this range; else raise argparse's ArgumentTypeError."""
        return self._read(text, int, "an integer")

    def number(self, text: str) -> float:
        """Convert text to a number in this range; else raise argparse's ArgumentTypeError."""
        return self._read(text, float, "a number")

    def _read(self, text: str, kind: Callable[[str], NumberT], named: str) -> NumberT:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"({text}) must be {named}") from None
        rule = self.broken_rule(value)
        if rule is not None:
            raise argparse.ArgumentTypeError(f"({text}) {rule}")
        return value


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 2**63 else f"{value:g}"


COUNT = Range(1)
NATURAL = Range(0)
LONG_COUNT = Range(1, LARGEST_LONG)
"""Range of a count of samples: from 1 to the largest 64-bit integer."""
LONG_NATURAL = Range(0, LARGEST_LONG)
SIZE = Range(1, 10**6)
"""Range of a width, of a number of layers or experts, or of a number of ranks."""
PROCESSES = Range(1, 1024)
SHARE = Range(0, 1)
BELOW_ONE = Range(0, 1, below=True)
"""Range of a probability below 1, or of the decay of an average."""
RATE = Range(0, WORTH_SAYING)
"""Range of a learning rate; far larger ones overflow single precision within a few steps."""
WEIGHT = Range(0, 1e6)
"""Range of a loss's weight; far larger weights make gradients overflow single precision."""
FACTOR = Range(0, 1e6, above=True)
FINITE = Range(-1e6, 1e6)
NORM = Range(0, 1e30)
"""Range of a limit on a norm, as of ``--clip-grad``; a very large one limits nothing."""


IfChanged = Literal["refuse", "refuse_to_resume", "keep", "say", "allow"]
"""The consequence if a flag differs from its value in the checkpoint that a run loads.

"refuse": the weights would mean something else, so the run ends with an error. "refuse_to_resume":
the model would compute something else from the same weights; a run that resumes ends with an error,
one that only starts from them prints a note. "keep": a run that resumes the optimizer uses the
checkpoint's value and prints a note. "say": the run uses its own value, and prints a note if it
resumes. "allow": no note, since the flag changes no result, is checked elsewhere, or may change.
"""


class Changeable:
    """The base class of config sections whose flags may differ from a checkpoint's without a note.

    A flag that sets ``if_changed`` itself is an exception (see `IfChanged`).
    """

    IF_CHANGED: ClassVar[IfChanged] = "allow"


class UsersOwn(Changeable):
    """The base class of config sections whose flags are never taken from a checkpoint.

    A flag that sets ``from_checkpoint`` itself is an exception.
    """

    FROM_CHECKPOINT: ClassVar[bool] = False


def flag(
    default: Any,
    help: str,
    bounds: Range | None = None,
    unit: str | None = None,
    *,
    choices: str | Sequence[Any] | None = None,
    nargs: int | str | None = None,
    names: str | Sequence[str] = (),
    negative: str | Sequence[str] = (),
    advice: str | None = None,
    renamed: Mapping[str, str] | None = None,
    joins: bool = False,
    if_changed: IfChanged | None = None,
    from_checkpoint: bool | None = None,
) -> Any:
    """Declare a field of a dataclass that is also a command-line flag.

    A list of words, such as ``choices``, may be given as one string of words separated by spaces.

    Args:
        default: value without the flag; a list is copied for each instance.
        help: the text in ``--help``.
        bounds: the range of a numeric flag; every numeric flag has one.
        unit: what the value counts, such as "steps"; ``--help`` shows it.
        choices: the allowed values; None allows any.
        nargs: number of values, or ``"+"`` for one or more; None means one.
        names: further spellings, besides ``--<field name>`` with dashes.
        negative: spellings that set a boolean to False, besides ``--no-<name>``.
        advice: what the error advises about a value that is out of bounds or not a choice; None
            derives it from the default or the bounds.
        renamed: values by other names, as forks of Megatron-LM have them -> the names here.
        joins: whether several words are one value with spaces, as a script without quotes gives it.
        if_changed: what happens if the checkpoint to load has a different value (see `IfChanged`);
            None takes the section's ``IF_CHANGED``, or "say" if it has none.
        from_checkpoint: whether the value may be read from the configuration in a checkpoint, which
            may come from an untrusted source. None takes the section's ``FROM_CHECKPOINT``, or True
            if it has none. Give False for a flag that permits or names code to run, or that names a
            place to write to.
    """
    metadata = {
        "help": help,
        "bounds": bounds,
        "unit": unit,
        "choices": None if choices is None else _each(choices),
        "nargs": nargs,
        "names": _each(names),
        "negative": _each(negative),
        "advice": advice,
        "renamed": renamed or {},
        "joins": joins,
        "if_changed": if_changed,
        "from_checkpoint": from_checkpoint,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _each(words: str | Sequence[Any]) -> tuple[Any, ...]:
    return tuple(words.split() if isinstance(words, str) else words)


fixed_flag = functools.partial(flag, if_changed="refuse")
resumed_flag = functools.partial(flag, if_changed="refuse_to_resume")
said_flag = functools.partial(flag, if_changed="say")


def derived(default: Any = None) -> Any:
    """Declare a field that code sets, not a command-line flag; ``default`` is the initial value."""
    return dataclasses.field(default=default, metadata={"derived": True})


@dataclass(frozen=True)
class Flag:
    """One flag as the parser and ``--help`` use it; `flag` describes the other attributes.

    Attributes:
        section, field: names of the section and of the field that declares the flag.
        type: type of one value.
        optional: whether None is allowed.
        positive: spellings that set the value (or True); ``--help`` shows the first.
        negative: spellings that set False.
    """

    section: str
    field: str
    type: type
    optional: bool
    default: Any
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    help: str
    bounds: Range | None
    unit: str | None
    choices: tuple[Any, ...] | None
    nargs: int | str | None
    advice: str | None
    renamed: Mapping[str, str]
    joins: bool
    if_changed: IfChanged | None
    from_checkpoint: bool | None

    @property
    def shown(self) -> str:
        """Return the spelling that messages show: the negative one if the flag is on by default."""
        return (self.negative if self.default is True else self.positive)[0]


@functools.cache
def flags_of(section: str, cls: type) -> tuple[Flag, ...]:
    """Return a dataclass's flags in field order; a field without a help text is not a flag."""
    hints = typing.get_type_hints(cls)
    return tuple(
        _flag_of(section, field, hints[field.name])
        for field in dataclasses.fields(cls)
        if "help" in field.metadata
    )


def _flag_of(section: str, field: dataclasses.Field[Any], hint: Any) -> Flag:
    """Return the flag that a field declares; the field's type ``hint`` gives the flag's type.

    For example, ``list[int] | None`` declares a flag that takes integers and can also be None.
    """
    optional = type(None) in typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(x for x in typing.get_args(hint) if x is not type(None))
    if typing.get_origin(hint) in (list, tuple):
        hint = typing.get_args(hint)[0]
    dashed = field.name.replace("_", "-")
    meta = dict(field.metadata)
    positive = (f"--{dashed}", *meta.pop("names"))
    negative = tuple(meta.pop("negative"))
    if hint is bool:
        negative = (*negative, f"--no-{dashed}")
    default = field.default
    if default is dataclasses.MISSING:
        default = typing.cast("Any", field.default_factory)()
    return Flag(section, field.name, hint, optional, default, positive, negative, **meta)


def must_divide(name: str, value: int | None, by: str, size: int) -> Iterator[FlagError]:
    """Yield an error if the value of one flag is no multiple of the value of another flag.

    Args:
        name: the flag to check.
        value: its value; None or 0 yields no error.
        by: the flag that must divide it.
        size: the value of ``by``.
    """
    if value and size >= 1 and value % size:
        use = -(-value // size) * size
        yield FlagError(name, value, f"must be divisible by `{by}` ({size})", f"use {use}")


def range_errors(section: Any) -> dict[str, FlagError]:
    """Return an error for each number outside the range of its flag, by the name of the field."""
    errors = {}
    for flag in flags_of("", type(section)):  # type: ignore[arg-type]
        value = getattr(section, flag.field)
        if flag.bounds is None or value is None:
            continue
        given = value if isinstance(value, (list, tuple)) else (value,)
        rule = next(filter(None, map(flag.bounds.broken_rule, given)), None)
        if rule is not None:
            shown = " ".join(map(str, given))
            errors[flag.field] = FlagError(flag.positive[0], shown, rule, _advice(flag))
    return errors


def check_ranges(section: Any) -> None:
    """Raise a ConfigError if a section made by code has a number out of its flag's range."""
    if errors := range_errors(section):
        raise ConfigError(list(errors.values()))


def _advice(flag: Flag) -> str:
    """Return what the error about a number out of range advises, such as "use 1"."""
    default = flag.default
    if flag.advice is None and default is not None:
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        return f"{shown} is the default"
    if flag.advice is None and flag.type is int and flag.bounds is not None:
        return f"use {flag.bounds.low}"
    return flag.advice or "give another, or leave it out"


def changed(run: Any, sections: Sequence[str], only: Collection[str] | None = None) -> list[str]:
    """Return the flags that are not at their defaults, as spelled on the command line.

    Args:
        run: a RunConfig.
        sections: names of the sections to search.
        only: the fields to consider; None for all.
    """
    return [
        spelling_of(section, field)
        for section in (run.by_name()[name] for name in sections)
        for field in changed_fields(section)
        if only is None or field in only
    ]


def changed_fields(section: Any) -> list[str]:
    """Return the names of a section's fields that are flags and not at their defaults."""
    flags = flags_of("", type(section))  # type: ignore[arg-type]
    return [flag.field for flag in flags if getattr(section, flag.field) != flag.default]


def if_changed(section: type) -> dict[str, IfChanged]:
    """Return for each flag of a section what happens if it differs from the checkpoint's value."""
    usual: IfChanged = getattr(section, "IF_CHANGED", "say")
    return {flag.field: flag.if_changed or usual for flag in flags_of("", section)}


def from_checkpoint(section: type) -> dict[str, bool]:
    """Return for each field's name whether its value may be read from a checkpoint's configuration.

    `flag` explains which values may not be read from there.
    """
    usual: bool = getattr(section, "FROM_CHECKPOINT", True)
    by_field = {}
    for field in dataclasses.fields(section):
        own = field.metadata.get("from_checkpoint")
        by_field[field.name] = usual if own is None else own
    return by_field


def default_of(section: Any, name: str) -> Any:
    """Return the default of a section's field."""
    return getattr(type(section)(), name)


def spelling_of(section: Any, name: str) -> str:
    """Return the spelling of a field's flag, ``--name``, or ``--no-name`` if the value is False."""
    dashed = name.replace("_", "-")
    return f"--no-{dashed}" if getattr(section, name) is False else f"--{dashed}"
