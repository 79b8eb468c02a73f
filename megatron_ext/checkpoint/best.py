"""The checkpoints of a run with the lowest validation losses (``--keep-best``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint with one of the lowest validation losses.

    Attributes:
        regular: whether it was saved for another reason too, such as ``--save-interval``.
    """

    iteration: int
    loss: float
    regular: bool


def with_candidate(
    best: Sequence[BestCheckpoint], new: BestCheckpoint, keep: int
) -> tuple[list[BestCheckpoint], list[BestCheckpoint]]:
    """Rank ``best`` and ``new`` by loss; return the ``keep`` lowest, and the rest of ``best``."""
    others = [entry for entry in best if entry.iteration != new.iteration]
    ranked = sorted([*others, new], key=lambda entry: entry.loss)
    return ranked[:keep], [entry for entry in ranked[keep:] if entry is not new]
