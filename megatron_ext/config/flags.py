"""One mechanism for all flags: a dataclass field with metadata is a command-line flag."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


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
    """
    metadata = {
        "help": help,
        "unit": unit,
        "choices": choices,
        "nargs": nargs,
        "names": tuple(names),
        "negative": tuple(negative),
        "gpu_only": gpu_only,
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
        help, unit, choices, nargs, gpu_only: see `flag`.
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
