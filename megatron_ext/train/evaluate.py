"""Evaluation: the mean loss over a split, the same on every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_ext.data.loader import BatchSource
from megatron_ext.train.step import StepRunner
from megatron_ext.train.totals import mean_of, reduce_reports


def evaluate(
    runner: StepRunner,
    source: BatchSource,
    num_steps: int,
    num_microbatches: int,
    *,
    collects: bool = False,
) -> tuple[dict[str, float], Any]:
    """Mean of each loss over the targets of ``num_steps`` global batches.

    Args:
        runner: of the step.
        source: the split.
        num_steps: steps.
        num_microbatches: of each step, unless the source has a plan of its own.
        collects: also collect what `Task.process_non_loss_data` takes.

    Returns:
        Losses by name on the last pipeline stage; empty on the others. Those of which the split
        had no target are left out, such as that of a condition mode; but for the first, which is
        then 0. And what was collected.
    """
    for chunk in runner.chunks:
        chunk.eval()
    totals: dict[str, Tensor] = {}
    collected: Any = []
    silent = None if runner.context.is_reporting_rank else True
    bar = tqdm(range(num_steps), "Evaluating", unit="step", delay=1.0, leave=False, disable=silent)
    try:
        with torch.no_grad():
            for _ in bar:
                count = source.num_microbatches(num_microbatches)
                batches = source.next_step(count)
                reports = runner.forward_backward(batches, count, forward_only=True)
                for key, entry in reduce_reports(reports, runner.context).items():
                    totals[key] = totals[key] + entry if key in totals else entry
            if collects and runner.task.non_loss_data is not None:
                collected = runner.task.non_loss_data(runner.chunks)
            elif collects and num_steps > 0:
                collected = runner.forward_backward(
                    batches, count, forward_only=True, collect_non_loss_data=True
                )
    finally:
        for chunk in runner.chunks:
            chunk.train()
    first = next(iter(totals), None)
    losses = {
        key: float(mean_of(entry))
        for key, entry in totals.items()
        if key == first or float(entry[1]) > 0
    }
    return losses, collected


def agreed_length(source: BatchSource, device: torch.device) -> int:
    """Samples of a split, agreed with the ranks that do not open it."""
    count = torch.tensor(source.num_samples or 0, device=device)
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
    return int(count)
