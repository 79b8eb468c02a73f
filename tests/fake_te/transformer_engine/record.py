"""A record of the calls of the stand-in, and the arguments that the real calls take."""

import json
from pathlib import Path
from typing import Any

FILES = json.loads((Path(__file__).parents[1] / "signatures.json").read_text(encoding="utf-8"))
SIGNATURES = {name: words.split() for file in FILES.values() for name, words in file.items()}

CALLS: list[tuple[str, dict[str, Any]]] = []
"""Name and arguments of every call, in order."""


def record(name: str, **arguments: Any) -> None:
    CALLS.append((name, arguments))


def options_of(name: str, given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return all arguments of a call, None where nothing else is said; unknown ones are refused."""
    if unknown := given.keys() - set(SIGNATURES[name]):
        raise TypeError(f"{name} takes no {unknown}")
    return {**dict.fromkeys(SIGNATURES[name]), **defaults, **given}
