"""Writes given values as one line of flags, for ``--print-config --as-flags``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ext.config.sections import value_of_words
from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ext.config.flags import Flag
    from megatron_ext.config.sections import Values


def flag_line(given: Values, lower: Values, table: Mapping[str, tuple[Flag, bool]]) -> str:
    """Return a line of flags for a shell that sets the values ``given``.

    Values that the run has without a flag are left out.

    Args:
        given: the values by section and field.
        lower: the values that replace the flags' defaults where no flag is given.
        table: spelling -> (flag, True), or (flag, False) for spellings such as ``--no-x``.

    Raises:
        ConfigError: a value cannot be written on a command line.
    """
    errors = []
    words = []
    for flag in {flag.field: flag for flag, _ in table.values()}.values():
        values = given.get(flag.section, {})
        if flag.field not in values:
            continue
        value = values[flag.field]
        # A GPU's number format depends on whether one is given, not only on its value.
        if value == lower.get(flag.section, {}).get(flag.field, flag.default):
            if flag.field != "bf16":
                continue
        written = _words(flag, value)
        if written is None:
            errors.append(
                f"`{flag.field}` ({value}) cannot be written as a flag, so there is no line of "
                "flags for this configuration; use `--print-config` without `--as-flags`."
            )
        else:
            words += written
    if errors:
        raise ConfigError(errors)
    return shlex.join(words)


def words_of(flag: Flag, value: Any) -> list[str]:
    """Return the words of a command line that set a flag; [] for None, which no words can set."""
    if value is None:
        return []
    if flag.type is bool:
        return [flag.positive[0] if value else flag.negative[0]]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [flag.positive[0], *map(str, values)]


def _words(flag: Flag, value: Any) -> list[str] | None:
    """Return the words that set a flag to a value, or None if none are read as this value."""
    words = words_of(flag, value)
    if not words or flag.type is bool:
        return words or None
    name, *given = words
    if any(word.startswith("--") for word in given):
        return None
    try:
        read = value_of_words(flag, name, given)
    except ConfigError:
        return None
    return words if read == (list(value) if isinstance(value, tuple) else value) else None
