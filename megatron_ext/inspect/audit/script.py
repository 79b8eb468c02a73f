"""Finds the flags that a launch script of Megatron-LM passes to its training program.

The script is walked through, never run: every way through its open conditions gives its launches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.disk.reading import UnreadableFile, read_yaml
from megatron_ext.errors import DataError
from megatron_ext.inspect.audit.expand import World, unknown
from megatron_ext.inspect.audit.launches import Launch, Reader
from megatron_ext.inspect.audit.shell import parse


@dataclass
class Script:
    """The launches of a script, and sentences about what could not be read."""

    launches: list[Launch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_script(path: Path, variables: Mapping[str, str] | None = None) -> Script:
    """Return the launches of a script.

    Args:
        variables: values of variables that the script leaves open; ``1`` is its first argument.

    Raises:
        DataError: the file cannot be read or parsed, or starts no training program.
    """
    if path.suffix in (".yaml", ".yml"):
        return _recipe(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The script {path} cannot be read: {error}.") from error
    found = read_text(text, variables, path)
    if not found.launches:
        raise DataError(
            f"The script {path} starts no training program, such as "
            "`torchrun … pretrain_gpt.py …`; name the script that does, or give the flags "
            "after `--`."
        )
    return found


def read_text(
    text: str, variables: Mapping[str, str] | None = None, path: Path | None = None
) -> Script:
    """Return the launches of a script's text; see `read_script`."""
    walk = Reader(path)
    start = World(given=dict(variables or {}), capture=walk.capture)
    start.variables["PWD"] = str(path.resolve().parent) if path else unknown("PWD")
    if path:
        start.variables["0"] = start.variables["BASH_SOURCE"] = str(path.resolve())
    numbered = [name for name in start.given if name.isdigit()]
    if "@" in start.given or numbered:
        last = max(map(int, numbered), default=0)
        values = [start.given.get(str(i + 1), unknown(str(i + 1))) for i in range(last)]
        start.positional = (*values, *start.given.get("@", "").split())
    worlds = walk.run(parse(text), [start])
    if not walk.found:
        walk.variables(worlds)
    return Script(_distinct(walk.found), walk.notes)


def _distinct(launches: list[Launch]) -> list[Launch]:
    """Return launches without repetitions; an assumption that makes no difference is dropped."""
    by_words: dict[tuple[object, ...], Launch] = {}
    for launch in launches:
        key = launch.launcher, launch.program, launch.words
        seen = by_words.get(key)
        both = tuple(x for x in seen.assumed if x in launch.assumed) if seen else launch.assumed
        by_words[key] = Launch(*key, launch.line, both)
    return list(by_words.values())


def _recipe(path: Path) -> Script:
    """Return the flags of a recipe of Megatron-LM's functional tests: ``MODEL_ARGS`` of a YAML."""
    try:
        recipe = read_yaml(path)
    except UnreadableFile as error:
        raise DataError(f"The recipe {path} cannot be read: {error.reason}.") from error
    flags = recipe.get("MODEL_ARGS") if isinstance(recipe, dict) else None
    if not isinstance(flags, dict):
        raise DataError(f"The recipe {path} has no `MODEL_ARGS`, a mapping of flags to values.")
    words: list[str] = []
    for name, value in flags.items():
        if value is False or value is None:
            continue
        values = [] if value is True else value if isinstance(value, list) else str(value).split()
        words += [
            re.sub(r"\$\{?(\w+)\}?", lambda x: unknown(x[1]), str(x)) for x in (name, *values)
        ]
    return Script([Launch.of_flags(words)])
