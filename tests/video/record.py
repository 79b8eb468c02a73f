"""What a run is given, step by step, written down by its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_ext.train.run import Run


def record_steps(run: Run, folder: Path) -> None:
    """Let rank 0 save the inputs and targets of each training step as ``folder/STEP.pt``."""
    if run.context.rank != 0:
        return
    folder.mkdir(exist_ok=True)
    next_step = run.train_source.next_step

    def recorded(num_microbatches: int) -> Any:
        batches: Any = next_step(num_microbatches)
        content = [
            {**batch.inputs, **({} if batch.targets is None else vars(batch.targets))}
            for batch in batches
        ]
        torch.save(content, folder / f"{run.progress.iteration + 1}.pt")
        return batches

    run.train_source.next_step = recorded  # type: ignore[method-assign]


def recorded_steps(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Micro-batches of each step, by the step's number from 1 on."""
    return {int(path.stem): torch.load(path) for path in folder.iterdir()}
