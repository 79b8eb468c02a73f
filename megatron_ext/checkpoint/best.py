"""The checkpoints of the lowest validation loss, and the file that names the best of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint.paths import folder_of, sync_folder

BEST_TRACKER = "best_checkpointed_iteration.txt"


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint among the best.

    Attributes:
        iteration: training steps done.
        loss: validation loss.
        regular: it would have been saved for another reason too.
    """

    iteration: int
    loss: float
    regular: bool


def with_candidate(
    best: Sequence[BestCheckpoint], new: BestCheckpoint, keep: int
) -> tuple[list[BestCheckpoint], list[BestCheckpoint]]:
    """The ``keep`` best, lowest loss first, and the former ones that are no longer among them.

    Of equal losses the earlier stays.
    """
    others = [entry for entry in best if entry.iteration != new.iteration]
    ranked = sorted([*others, new], key=lambda entry: entry.loss)
    return ranked[:keep], [entry for entry in ranked[keep:] if entry is not new]


def write_best(root: Path, best: BestCheckpoint) -> None:
    """Write the iteration and the loss of the best checkpoint in one step.

    A run that goes on in another folder than it was loaded from leaves the file alone until it has
    a best checkpoint there.

    Raises:
        OSError: the file cannot be written.
    """
    path = root / BEST_TRACKER
    if not folder_of(root, best.iteration).is_dir():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(f"{best.iteration} {best.loss!r}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(root)
