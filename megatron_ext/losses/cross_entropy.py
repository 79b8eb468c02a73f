"""Per-token losses of a micro-batch as a loss of the contract."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.losses.contract import Report, StepCounts, pair
from megatron_ext.models.mtp import MTPTargets


def share_of_step(
    weights: Tensor,
    counts: StepCounts | None,
    *,
    per_token: bool,
    usual_weight: Tensor | None = None,
) -> Tensor | float:
    """The factor that turns a micro-batch's weighted sum into its share of the step's loss.

    The gradients of a step are divided by its number of targets N. For a weighted mean over the
    D = sum of weights of the step, sums are therefore multiplied by N / D, which for weights of 0
    and 1 is 1. In the mean of micro-batch means N and D are the micro-batch's own.

    Args:
        weights: of this micro-batch, ``[b, s/c]``.
        counts: of the step; None in evaluation.
        per_token: per-token normalization, else the mean of micro-batch means.
        usual_weight: D of a micro-batch over its context-parallel ranks, divided by their number,
            where they hold unequal parts of it: the mean over ranks is then that of the whole.
    """
    if counts is None:
        return 1.0
    if per_token:
        return counts.main / counts.weight.clamp(min=1e-30)
    weight = weights.sum() if usual_weight is None else usual_weight
    return torch.count_nonzero(weights) / weight.clamp(min=1e-30)


def weighted_token_loss(
    losses: Tensor,
    *,
    weights: Tensor,
    share: Tensor | float = 1.0,
    mtp_targets: MTPTargets | None = None,
) -> tuple[Tensor, Tensor, Report]:
    """Weighted sum of per-token losses, number of targets, and what to log.

    Args:
        losses: cross-entropy per token, ``[b, s]``.
        weights: of the tokens, 0 where there is no target, ``[b, s]``.
        share: see `share_of_step`.
        mtp_targets: its reports, filled by the forward pass, join the log.
    """
    weights = weights.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * weights)
    report = {"lm loss": pair(total, weights.sum()), **mtp_report(mtp_targets)}
    return total * share, number_of_targets(weights), report


def number_of_targets(weights: Tensor) -> Tensor:
    """Integer scalar."""
    return torch.count_nonzero(weights).int()


def mtp_report(targets: MTPTargets | None) -> Report:
    """Log entries of the prediction depths."""
    entries = () if targets is None else targets.reports
    return {f"mtp_{depth} loss": entry for depth, entry in enumerate(entries, start=1)}
