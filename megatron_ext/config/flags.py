"""One mechanism for all flags: a dataclass field with metadata is a command-line flag."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.ranges import Range
from megatron_ext.errors import ConfigError


def flag(
    default: Any,
    help: str,
    *,
    unit: str | None = None,
    choices: Sequence[Any] | None = None,
    nargs: int | str | None = None,
    names: Sequence[str] = (),
    negative: Sequence[str] = (),
    gpu_only: str | None = None,
    bounds: Range | None = None,
    advice: str | None = None,
) -> Any:
    """A field that is also a flag.

    Args:
        default: value without the flag; a list is copied for each instance.
        help: what the flag does, one sentence or phrase.
        unit: of the value.
        choices: allowed values.
        nargs: number of values, or ``"+"`` for one or more; None means one.
        names: further spellings; the field's own name, dashed, is always one.
        negative: spellings that set a boolean to False, besides ``--no-<name>``.
        gpu_only: why the flag has no effect on a CPU.
        bounds: the numbers that a numeric flag takes; each of them has some.
        advice: what to do about a number outside of them, where the default is none.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "choices": choices,
        "nargs": nargs,
        "names": tuple(names),
        "negative": tuple(negative),
        "gpu_only": gpu_only,
        "bounds": bounds,
        "advice": advice,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Flag:
    """One flag as the parser and ``--help`` see it.

    Attributes:
        section: name of the RunConfig section that holds the field.
        field: name of the field.
        type: type of one value.
        optional: whether None is allowed.
        default: value without the flag.
        help, unit, choices, nargs, gpu_only, bounds, advice: see `flag`.
        positive: spellings that set the value (or True), the first is shown.
        negative: spellings that set False.
    """

    section: str
    field: str
    type: type
    optional: bool
    default: Any
    help: str
    unit: str | None
    choices: Sequence[Any] | None
    nargs: int | str | None
    gpu_only: str | None
    bounds: Range | None
    advice: str | None
    positive: tuple[str, ...]
    negative: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The spelling that changes the default."""
        if self.type is bool and self.default is True:
            return self.negative[0]
        return self.positive[0]


@functools.cache
def flags_of(section: str, cls: type) -> tuple[Flag, ...]:
    """The flags of a dataclass, in the order of its fields; fields without metadata are derived."""
    hints = typing.get_type_hints(cls)
    return tuple(
        _flag_of(section, field, hints[field.name])
        for field in dataclasses.fields(cls)
        if "help" in field.metadata
    )


def _flag_of(section: str, field: dataclasses.Field[Any], hint: Any) -> Flag:
    kind, optional = _value_type(hint)
    dashed = field.name.replace("_", "-")
    meta = field.metadata
    negative: tuple[str, ...] = ()
    if kind is bool:
        negative = (*meta["negative"], f"--no-{dashed}")
    default = field.default
    if default is dataclasses.MISSING:
        default = typing.cast(Any, field.default_factory)()
    return Flag(
        section=section,
        field=field.name,
        type=kind,
        optional=optional,
        default=default,
        help=meta["help"],
        unit=meta["unit"],
        choices=meta["choices"],
        nargs=meta["nargs"],
        gpu_only=meta["gpu_only"],
        bounds=meta["bounds"],
        advice=meta["advice"],
        positive=(f"--{dashed}", *meta["names"]),
        negative=negative,
    )


def _value_type(hint: Any) -> tuple[type, bool]:
    """The type of one value, and whether None is allowed: ``list[int] | None`` is (int, True)."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [x for x in typing.get_args(hint) if x is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0]
    if typing.get_origin(hint) in (list, tuple):
        hint = typing.get_args(hint)[0]
    return hint, optional


def range_errors(section: Any) -> dict[str, str]:
    """Return a sentence for each number of a section outside of its flag's range, by field."""
    found = {}
    for flag in flags_of("", type(section)):  # type: ignore[arg-type]
        value = getattr(section, flag.field)
        if flag.bounds is None or value is None:
            continue
        given = value if isinstance(value, (list, tuple)) else (value,)
        rule = next(filter(None, map(flag.bounds.broken_rule, given)), None)
        if rule is not None:
            shown = " ".join(map(str, given))
            found[flag.field] = f"`{flag.positive[0]}` ({shown}) {rule}; {_advice(flag)}."
    return found


def check_ranges(section: Any) -> None:
    """Check the numbers of a section that is also made without a run.

    Raises:
        ConfigError: with one sentence for each number outside of its range.
    """
    errors = range_errors(section)
    if errors:
        raise ConfigError(list(errors.values()))


def _advice(flag: Flag) -> str:
    """What to do about a number outside of the range."""
    if flag.advice is not None:
        return flag.advice
    if flag.default is not None:
        default = flag.default
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        return f"{shown} is the default"
    if flag.type is int and flag.bounds is not None:
        return f"use {flag.bounds.low}"
    return "give another, or leave it out"


def changed(run: Any, sections: Sequence[str], only: Collection[str] | None = None) -> list[str]:
    """Spellings of the flags of a run's sections that are not at their defaults.

    Args:
        run: a RunConfig.
        sections: names of them.
        only: fields to look at; None for all.
    """
    return [
        spelling_of(section, field)
        for section in (getattr(run, name) for name in sections)
        for field in changed_fields(section)
        if only is None or field in only
    ]


def changed_fields(section: Any) -> list[str]:
    """Names of the flags of a section that are not at their defaults."""
    default = type(section)()
    return [
        field.name
        for field in dataclasses.fields(section)
        if "help" in field.metadata and getattr(section, field.name) != getattr(default, field.name)
    ]


def default_of(section: Any, name: str) -> Any:
    """What a field of a section is without its flag."""
    return getattr(type(section)(), name)


def spelling_of(section: Any, name: str) -> str:
    """The spelling that changes a field's default to what it is."""
    dashed = name.replace("_", "-")
    return f"--no-{dashed}" if getattr(section, name) is False else f"--{dashed}"
