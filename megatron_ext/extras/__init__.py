"""Add-ons: optional folders that plug into the extension points of the engine.

The flags of an add-on are known without importing it; its code is imported when one of its flags is
given. Nothing outside an add-on imports it directly: `part` and `needed` look it up by name. If its
folder is deleted, everything else still works, and giving one of its flags is an error that says
so.

The extension points are sections of flags (`config.sections`), callbacks between steps
(`train.callbacks.callback`), reporters of records (`train.reporting.records`), and what a launcher
does around its ranks (`train.supervision`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, tell_errors


def is_there(name: str) -> bool:
    """Return whether the folder of the add-on ``name`` exists and holds Python files."""
    # A folder with nothing but Python's caches does not count.
    return any(Path(__file__).with_name(name).glob("*.py"))


def part(name: str, module: str) -> Any:
    """Import and return a module of the add-on ``name``; return None if its folder is missing."""
    return import_module(f"{__name__}.{name}.{module}") if is_there(name) else None


def needed(name: str, module: str, flag: str) -> Any:
    """Import and return a module of the add-on ``name``, which the given ``flag`` needs.

    Raises:
        ConfigError: the add-on's folder is missing.
    """
    loaded = part(name, module)
    if loaded is None:
        raise ConfigError(missing(name, flag))
    return loaded


def missing(name: str, flag: str) -> str:
    """Return the error sentence for a flag of an add-on whose folder is missing."""
    return (
        f"`{flag}` needs the add-on {name}, but the folder megatron_ext/extras/{name} is not "
        "there; put it back, or leave the flag out."
    )


def run_tool(name: str, module: str, argv: Sequence[str], *, description: str) -> int:
    """Run ``main`` of a module of the add-on ``name``, the program behind ``tools/<name>.py``.

    Return its exit code; 2 if the add-on's folder is missing. ``argv`` are its arguments, without
    the program's name, and ``description`` is the text of its help.
    """
    try:
        main = needed(name, module, f"tools/{name}.py").main
    except ConfigError as error:
        tell_errors(error.messages)
        return 2
    code: int = main(argv, description)
    return code
