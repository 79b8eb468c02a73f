"""Sections of a user's own: frozen dataclasses whose fields are flags, declared as ours are.

A task names them (``Task(sections=(MyFlags,), ...)``), and their flags stand in ``--help``, in the
resolved configuration, in ``--config`` files and in checkpoints, beside the engine's::

    @dataclass(frozen=True)
    class MyFlags:
        hidden_cap: float | None = flag(
            None, "bound of the hidden states before the head", bounds=Range(0, 1e6, above=True)
        )

``config.section(MyFlags).hidden_cap`` reads them; a number outside of its `bounds` is refused, NaN
and infinity included. A section may have a method
``errors(config) -> list[str]``, which gives a sentence for each value that cannot be run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_ext.config.flags import flags_of
from megatron_ext.config.spelling import RENAMED
from megatron_ext.errors import ConfigError

OWN_FLAGS = ("--help", "-h", "--config", "--print-config", "--no-position-embedding")
"""Flags that the parser answers itself."""


def section_name(kind: type) -> str:
    """Return what a section is called in configurations: ``my_flags`` for ``MyFlags``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def named(sections: Sequence[type]) -> dict[str, type]:
    """Return sections by their names."""
    return {section_name(kind): kind for kind in sections}


def check_sections(sections: Sequence[type], engine: Mapping[str, type]) -> None:
    """Check that a user's sections can stand beside the engine's.

    Args:
        sections: the user's.
        engine: the engine's, by name.

    Raises:
        ConfigError: a section that is no frozen dataclass of flags, or a name that is taken.
    """
    errors: list[str] = []
    taken = dict.fromkeys([*OWN_FLAGS, *RENAMED], "the parser")
    for name, kind in engine.items():
        taken |= dict.fromkeys(_names(name, kind), f"the section `{name}`")
    for kind in sections:
        wrong = list(_shape_errors(kind))
        if not wrong:
            names = _names(section_name(kind), kind)
            wrong = [
                f"The section `{kind.__name__}` has the name `{name}`, which is that of "
                f"{taken[name]}; choose another."
                for name in names
                if name in taken
            ]
            taken |= dict.fromkeys(names, f"the section `{section_name(kind)}`")
        errors += wrong
    if errors:
        raise ConfigError(errors)


def _names(name: str, kind: Any) -> list[str]:
    """Return the names that a section takes: its own, its fields' and their flags'."""
    flags = flags_of(name, kind)
    return [
        name,
        *(field.name for field in dataclasses.fields(kind)),
        *(spelling for flag in flags for spelling in (*flag.positive, *flag.negative)),
    ]


def _shape_errors(kind: Any) -> Iterator[str]:
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        yield (
            f"The section `{getattr(kind, '__name__', kind)}` must be a frozen dataclass; write "
            "`@dataclass(frozen=True)` above its class."
        )
        return
    for field in dataclasses.fields(kind):
        if "help" not in field.metadata:
            yield (
                f"The field `{field.name}` of the section `{kind.__name__}` must be a flag; "
                "declare it with `megatron_ext.config.flags.flag(default, help)`."
            )
    for flag in flags_of(section_name(kind), kind):
        if flag.type not in (bool, int, float, str):
            yield (
                f"The field `{flag.field}` of the section `{kind.__name__}` is of type "
                f"{flag.type}, but a flag must be a bool, an int, a float, a str or a list of "
                "them; convert it where it is read."
            )
