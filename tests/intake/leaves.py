"""Changes one leaf of a nested value: another value, another type, gone, or an entry more."""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
STRANGER = "another_tool"
"""Name of the entry that is put beside others; no program of ours knows it."""


@dataclass(frozen=True)
class Change:
    """One change of a nested value.

    Attributes:
        path: keys and indices from the outermost value to the changed leaf.
        kind: "other", "type", "gone", "null" or "added".
        value: the new value of the leaf, where it has one.
    """

    path: Path
    kind: str
    value: Any = None

    @property
    def name(self) -> str:
        """The last key on the way to the leaf, by which a message should call it."""
        return str([step for step in self.path if isinstance(step, str)][-1])

    def applied(self, whole: Any) -> Any:
        """Return a copy of ``whole`` with the change."""
        changed = copy.deepcopy(whole)
        inner = changed
        for step in self.path[:-1]:
            inner = inner[step]
        if self.kind == "gone":
            del inner[self.path[-1]]
        else:
            inner[self.path[-1]] = copy.deepcopy(self.value)
        return changed


def changes(whole: Any, dice: random.Random) -> Iterator[Change]:
    """Yield changes of every leaf, and an entry more in every object."""
    for path, value in _parts(whole):
        if isinstance(value, dict):
            yield Change((*path, STRANGER), "added", "left here")
        if not path or isinstance(value, dict | list):
            continue
        yield Change(path, "other", _other(value, dice))
        if isinstance(path[-1], str):
            yield Change(path, "gone")
            yield Change(path, "null")
        yield Change(path, "type", [value] if not isinstance(value, str) else {"text": value})


def _parts(whole: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, whole
    if isinstance(whole, dict):
        for key, value in whole.items():
            yield from _parts(value, (*path, key))
    elif isinstance(whole, list):
        for index, value in enumerate(whole):
            yield from _parts(value, (*path, index))


def _other(value: Any, dice: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + dice.randint(1, 3)
    if isinstance(value, float):
        return value * dice.choice([0.5, 2.0, 3.0]) + 0.125
    if value is None:
        return dice.choice([7, "seven", True])
    return f"{value}{dice.choice(['x', ' y', '7'])}"
