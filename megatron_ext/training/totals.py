"""Counts and losses of a step, summed over its micro-batches and the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_ext.data.batch import Batch
from megatron_ext.losses.contract import Report, StepCounts

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext


def count_targets(batches: Sequence[Batch], context: ParallelContext) -> StepCounts:
    """Targets of the step over all micro-batches, data- and context-parallel ranks."""
    sums = torch.stack(
        [
            torch.stack(
                [
                    torch.count_nonzero(batch.loss_mask).float(),
                    *(mask.sum() for mask in (batch.loss_mask, *batch.mtp_loss_masks)),
                ]
            )
            for batch in batches
        ]
    ).sum(dim=0)
    torch.distributed.all_reduce(sums, group=context.pgs.dp_cp)
    return StepCounts(main=sums[0], weight=sums[1], mtp=sums[2:], num_microbatches=len(batches))


def reduce_reports(reports: Sequence[Report], context: ParallelContext) -> dict[str, Tensor]:
    """Sum ``[sum, count]`` entries over micro-batches, data- and context-parallel ranks."""
    if not reports:
        return {}
    keys = list(reports[0])
    # In double precision: a count beyond 2^24 tokens is not exact in single.
    entries = [torch.stack([report[key].view(2).double() for report in reports]) for key in keys]
    totals = torch.stack([entry.sum(dim=0) for entry in entries])
    torch.distributed.all_reduce(totals, group=context.pgs.dp_cp)
    return dict(zip(keys, totals.unbind(0), strict=True))


def mean_of(entry: Tensor) -> Tensor:
    """Divide ``[sum, count]``; nothing counted gives 0."""
    return torch.where(entry[1] > 0, entry[0] / entry[1].clamp(min=1e-30), 0.0)
