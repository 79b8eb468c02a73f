"""Names the folders of an iteration, which hold its checkpoint, its samples and the like."""

from __future__ import annotations

import re

_NAME = re.compile(r"iter_(\d{7,})")


def name_of(iteration: int) -> str:
    """Return the name of an iteration's folder, such as ``iter_0000100``."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return the iteration whose folder has this name; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])
