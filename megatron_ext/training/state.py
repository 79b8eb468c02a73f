"""How far a run has come; saved with every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_ext.checkpoint.best import BestCheckpoint


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        iteration: training steps done, skipped ones included.
        consumed_train_samples: training samples used by all ranks together.
        consumed_valid_samples: validation samples used likewise.
        epoch: passes through the training data so far, with the part of the last one; None where
            the data has no epochs.
        skipped_iterations: steps without an update because of a non-finite gradient.
        nan_iterations: skipped steps whose loss was not finite either.
        floating_point_operations: of the model, forward and backward, on all ranks.
        best_checkpoints: of the lowest validation loss, lowest first (``--keep-best``).
        lowest_loss: validation loss that an early stop compares with; None before the first.
        stale_evaluations: evaluations since then (``--early-stop-patience``).
        data_plan: identity of the plan of the training data, where it has one.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    epoch: float | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    floating_point_operations: float = 0.0
    best_checkpoints: list[BestCheckpoint] = field(default_factory=list)
    lowest_loss: float | None = None
    stale_evaluations: int = 0
    data_plan: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Read back what `to_dict` gave; counters of newer versions are left out."""
        names = {field.name for field in fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        best = [BestCheckpoint(**entry) for entry in known.pop("best_checkpoints", [])]
        return cls(**known, best_checkpoints=best)
