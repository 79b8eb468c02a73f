"""The flags of a program by name, and the values of the words that follow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.config.flags import Flag, flags_of
from megatron_ext.config.megatron_flags import NO_EFFECT, RENAMED, UNSUPPORTED
from megatron_ext.config.run import LeftOut, Program, TaskFlags, engine_sections
from megatron_ext.config.sections import OWN_FLAGS, named
from megatron_ext.errors import ConfigError


def sections_of(program: Program) -> dict[str, type]:
    """Return the sections that a program knows by name, the task's last."""
    return engine_sections() | named(program.sections)


def all_flags(program: Program) -> list[Flag]:
    """Return every flag of a program, by section; those of its task come last."""
    return [
        flag
        for name, kind in sections_of(program).items()
        for flag in flags_of(name, kind)
        if not is_left_out(program, name, flag.field)
    ]


def is_left_out(program: Program | TaskFlags, section: str, field: str) -> bool:
    left_out = program.left_out.get(section, {})
    return "*" in left_out or field in left_out


def left_out_flags(program: Program) -> dict[str, Flag]:
    """Return the engine's flags that the program does not know, by field."""
    return {
        flag.field: flag
        for section, kind in engine_sections().items()
        for flag in flags_of(section, kind)
        if is_left_out(program, section, flag.field)
    }


def reason_left_out(left_out: LeftOut, flag: Flag) -> str:
    """Return why a flag is left out."""
    fields = left_out[flag.section]
    return fields.get(flag.field) or fields["*"]


def spellings(flags: Sequence[Flag]) -> dict[str, tuple[Flag, bool]]:
    """Map every canonical spelling to its flag and whether it sets True (or a value)."""
    table: dict[str, tuple[Flag, bool]] = {}
    for flag in flags:
        table.update({canonical(name): (flag, False) for name in flag.negative})
        table.update({canonical(name): (flag, True) for name in flag.positive})
    return table


def canonical(name: str) -> str:
    return "--" + name.lstrip("-").replace("_", "-")


def known_names(table: Mapping[str, Any]) -> list[str]:
    """Return every name that gets an answer other than "unknown"."""
    return [*table, *(canonical(x) for x in NO_EFFECT), *RENAMED, *UNSUPPORTED, *OWN_FLAGS]


def value_of_words(flag: Flag, named: str, words: Sequence[str]) -> Any:
    """Return what words say for a flag that is no switch.

    Raises:
        ConfigError: too many words or too few, no numbers, or none of the choices.
    """
    wanted = flag.nargs or 1
    if (wanted == "+" and not words) or (isinstance(wanted, int) and len(words) != wanted):
        number = "at least one value" if wanted == "+" else f"{wanted} value(s)"
        raise ConfigError(f"`{named}` takes {number}, but got {len(words)}.")
    try:
        converted = [_convert(flag, word) for word in words]
    except ValueError:
        kind = {int: "an integer", float: "a number"}[flag.type]
        raise ConfigError(f"`{named}` ({' '.join(words)}) must be {kind}.") from None
    wrong = [value for value in converted if flag.choices and value not in flag.choices]
    if wrong:
        allowed = ", ".join(str(choice) for choice in flag.choices or ())
        raise ConfigError(f"`{named}` ({wrong[0]}) must be one of {allowed}.")
    return converted if flag.nargs else converted[0]


def _convert(flag: Flag, text: str) -> Any:
    if flag.type is int:
        # Megatron-LM's scripts write "(-1,0)" for windows and "1_000" for counts.
        return int(text.strip("(),").replace("_", ""))
    return flag.type(text)


def value_of_entry(flag: Flag, named: str, value: Any) -> Any:
    """Return an entry of a file as the flag's type; YAML reads 1e-4 as text, and any name as any.

    Raises:
        ConfigError: an entry of another type, or see `value_of_words`.
    """
    if value == flag.default or (value is None and flag.optional):
        return value
    if flag.type is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"`{named}` ({value}) must be true or false.")
        return value
    if value is None or isinstance(value, Mapping):
        raise ConfigError(f"`{named}` ({value}) must be a value or a list of values.")
    words = value if isinstance(value, (list, tuple)) else [value]
    return value_of_words(flag, named, [str(word) for word in words])
