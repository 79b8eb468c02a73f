"""`Switch`, a choice that a search of layouts makes besides the layout itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.device.gpus import Gpu


@dataclass(frozen=True)
class Switch:
    """A way to run a layout that a search tries with and without.

    Attributes:
        name: its name in tables.
        values: the values of fields that it sets.
        applies: takes a `layouts.Candidate` and the kind of GPU; returns whether it can make a
            difference. A layout that the rules of the flags refuse with it is tried without it.
        saves: "state" or "activations" if it takes time to save memory of this kind; else "".
        on_host: whether it moves anything to host memory.
        changes_memory: whether a run with it needs other memory than without.
    """

    name: str
    values: Mapping[str, Any]
    applies: Callable[[Any, Gpu], bool]
    saves: str = ""
    on_host: bool = False
    changes_memory: bool = True

    def __hash__(self) -> int:
        return hash(self.name)
