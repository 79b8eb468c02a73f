"""What a load gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded besides weights and optimizer.

    Attributes:
        iteration: training steps done; 0 with ``--finetune``.
        progress: the counters that were saved.
        run_config: the configuration of the run that saved.
        path: the folder.
        notes: what was not loaded, and why.
    """

    iteration: int
    progress: dict[str, Any]
    run_config: dict[str, Any]
    path: Path
    notes: list[str] = field(default_factory=list)
