"""Megatron-LM's ``extra_args_provider``: arguments of argparse as a section of flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from megatron_ext.config.flags import flag
from megatron_ext.errors import ConfigError

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
            "section (see megatron_ext.config.own)."
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
