"""The pretraining loss: cross-entropy summed over the unmasked tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.losses.contract import Report, pair
from megatron_ext.models.mtp import MTPTargets


def masked_token_loss(
    losses: Tensor, *, loss_mask: Tensor, mtp_targets: MTPTargets | None = None
) -> tuple[Tensor, Tensor, Report]:
    """Sum of per-token losses, number of targets, and what to log.

    Args:
        losses: cross-entropy per token, ``[b, s]``.
        loss_mask: 0 or 1 per token, ``[b, s]``.
        mtp_targets: its reports, filled by the forward pass, join the log.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    count = mask.sum().to(torch.int)
    report = {"lm loss": pair(total, count)}
    if mtp_targets is not None:
        for depth, entry in enumerate(mtp_targets.reports, start=1):
            report[f"mtp_{depth} loss"] = entry
    return total, count, report
