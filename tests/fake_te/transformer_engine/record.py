"""A record of the calls of the stand-in."""

from __future__ import annotations

from typing import Any

CALLS: list[tuple[str, dict[str, Any]]] = []
"""Name and arguments of every call, in order."""


def record(name: str, **arguments: Any) -> None:
    """Remember a call."""
    CALLS.append((name, arguments))


def of(name: str) -> list[dict[str, Any]]:
    """Return the arguments of all calls of one name."""
    return [arguments for called, arguments in CALLS if called == name]
