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

``--help``: flags grouped by concern, with default, unit and meaning.

Megatron-LM's ``extra_args_provider``: arguments of argparse as a section of flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron_ext.config.flags import Flag, flag, flags_of
from megatron_ext.config.megatron_flags import RENAMED
from megatron_ext.errors import ConfigError

OWN_FLAGS = ("--help", "-h", "--config", "--print-config", "--no-position-embedding")
"""Flags that the parser answers itself."""


def section_name(kind: type) -> str:
    """Return a section's name in files: ``my_flags`` for ``MyFlags``, or its ``SECTION``."""
    named = getattr(kind, "SECTION", None)
    plain = kind.__name__.removesuffix("Config")
    return str(named or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower())


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
        if not {"help", "derived"} & set(field.metadata):
            yield (
                f"The field `{field.name}` of the section `{kind.__name__}` must be a flag; "
                "declare it with `megatron_ext.config.flags.flag(default, help)`."
            )
    for declared in flags_of(section_name(kind), kind):
        if declared.type not in (bool, int, float, str):
            yield (
                f"The field `{declared.field}` of the section `{kind.__name__}` is of type "
                f"{declared.type}, but a flag must be a bool, an int, a float, a str or a list of "
                "them; convert it where it is read."
            )


def describe(flag: Flag) -> str:
    """Describe a flag as two columns' worth of text: spelling and values, then meaning."""
    value = ""
    if flag.type is not bool:
        value = f" {{{','.join(map(str, flag.choices))}}}" if flag.choices else f" {_metavar(flag)}"
    return f"{flag.shown}{value}"


def _metavar(flag: Flag) -> str:
    name = (flag.unit or {int: "N", float: "X", str: "TEXT"}[flag.type]).upper()
    if isinstance(flag.nargs, int):
        return " ".join([name] * flag.nargs)
    return f"{name} ..." if flag.nargs == "+" else name


def _meaning(flag: Flag) -> str:
    default = ""
    if flag.type is not bool and flag.default is not None and flag.default != "":
        shown = (
            flag.default if not isinstance(flag.default, list) else " ".join(map(str, flag.default))
        )
        default = f" [{shown}]"
    if flag.type is bool and flag.default is True:
        return f"switch off: {flag.help}"
    return f"{flag.help}{default}"


def print_help(flags: Sequence[Flag]) -> None:
    """Print all flags to standard output."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    print("Flags have Megatron-LM's names; defaults stand in brackets.\n")
    print("  --config FILE.yaml  the same names from a file; the command line wins")
    print("  --print-config      print the resolved configuration as YAML and stop\n")
    for section, members in groupby(flags, key=lambda flag: flag.section):
        print(f"{section}:")
        for member in members:
            print(f"  {describe(member)}")
            print(textwrap.fill(_meaning(member), width, initial_indent=" " * 8,
                                subsequent_indent=" " * 8))  # fmt: skip
        print()


Provider = Callable[[argparse.ArgumentParser], "argparse.ArgumentParser | None"]

_TRUE, _FALSE = argparse._StoreTrueAction, argparse._StoreFalseAction


def section_of(provider: Provider, name: str = "ExtraArgs") -> type:
    """Return a section whose flags are the arguments that a provider adds to a parser.

    Args:
        provider: takes a parser and adds arguments to it.
        name: of the class.

    Raises:
        ConfigError: an argument that no flag can stand for.
    """
    parser = argparse.ArgumentParser(add_help=False)
    provider(parser)
    fields, required = [], []
    for action in parser._actions:
        fields.append(_field(action))
        if action.required:
            required.append(action.dest)

    def errors(self: Any, config: Any) -> list[str]:
        missing = [name for name in required if getattr(self, name) is None]
        return [f"`--{name.replace('_', '-')}` is required; give it." for name in missing]

    namespace = {"errors": errors, "__module__": __name__}
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace=namespace)


def _field(action: argparse.Action) -> tuple[str, Any, Any]:
    """Return name, type and field of an argument."""
    shown = action.option_strings[0] if action.option_strings else action.dest
    options = tuple(x for x in action.option_strings if x.startswith("--"))
    stores = type(action) in (argparse._StoreAction, _TRUE, _FALSE)
    simple = action.type in (None, int, float, str) and action.nargs != "?"
    if not stores or not simple or not options:
        raise ConfigError(
            f"The argument `{shown}` of `extra_args_provider` must be an option with two dashes "
            "that stores True, False, or values of int, float or str; declare it as a field of a "
            "section (see megatron_ext.config.sections)."
        )
    if isinstance(action, (_TRUE, _FALSE)):
        stored = isinstance(action, _TRUE)
        names, negative = (options, ()) if stored else ((), options)
        default = bool(action.default)
        return action.dest, bool, flag(default, _help(action), names=names, negative=negative)
    kind: Any = action.type or str
    nargs = "+" if action.nargs == "*" else action.nargs
    if nargs is not None:
        kind = list[kind]
    field = flag(
        action.default,
        _help(action),
        choices=None if action.choices is None else list(action.choices),
        nargs=nargs,
        names=options,
    )
    return action.dest, kind | None, field


def _help(action: argparse.Action) -> str:
    return action.help or "an argument of the program's own"
