"""The checkpoints of a run with the lowest validation losses (``--keep-best``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint with one of the lowest validation losses.

    Attributes:
        regular: whether the checkpoint would also have been saved without ``--keep-best``, for
            example by ``--save-interval``.
    """

    iteration: int
    loss: float
    regular: bool


def with_candidate(
    best: Sequence[BestCheckpoint], new: BestCheckpoint, keep: int
) -> tuple[list[BestCheckpoint], list[BestCheckpoint]]:
    """Return ``best`` with the checkpoint ``new``, reduced to the ``keep`` lowest losses.

    An entry of the same iteration as ``new`` is replaced. The result is (the new list, lowest loss
    first; the checkpoints of ``best`` that drop out). ``best`` itself does not change.
    """
    others = [entry for entry in best if entry.iteration != new.iteration]
    ranked = sorted([*others, new], key=lambda entry: entry.loss)
    return ranked[:keep], [entry for entry in ranked[keep:] if entry is not new]
