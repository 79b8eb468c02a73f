"""Evaluation: the mean loss over a split, the same on every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.data.loader import BatchSource
from megatron_ext.training.step import StepRunner
from megatron_ext.training.totals import mean_of, reduce_reports


def evaluate(
    runner: StepRunner, source: BatchSource, num_steps: int, num_microbatches: int
) -> dict[str, float]:
    """Mean of each loss over the targets of ``num_steps`` global batches.

    Args:
        runner: of the step.
        source: the split.
        num_steps: steps.
        num_microbatches: of each step, unless the source has a plan of its own.

    Returns:
        Losses by name on the last pipeline stage; empty on the others. Those of which the split
        had no target are left out, such as that of a condition mode; but for the first, which is
        then 0.
    """
    for chunk in runner.chunks:
        chunk.eval()
    totals: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for _ in range(num_steps):
                count = source.num_microbatches(num_microbatches)
                batches = source.next_step(count)
                reports = runner.forward_backward(batches, count, forward_only=True)
                for key, entry in reduce_reports(reports, runner.context).items():
                    totals[key] = totals[key] + entry if key in totals else entry
    finally:
        for chunk in runner.chunks:
            chunk.train()
    first = next(iter(totals), None)
    return {
        key: float(mean_of(entry))
        for key, entry in totals.items()
        if key == first or float(entry[1]) > 0
    }


def agreed_length(source: BatchSource, device: torch.device) -> int:
    """Samples of a split, agreed with the ranks that do not open it."""
    count = torch.tensor(source.num_samples or 0, device=device)
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
    return int(count)
