"""The forward step of GPT pretraining."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_ext.data.batch import Batch
from megatron_ext.losses.contract import LossFunction, StepCounts
from megatron_ext.losses.cross_entropy import masked_token_loss
from megatron_ext.models.mtp import MTPTargets, mean_of_means_weights, per_token_weights

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig


def mtp_targets(config: RunConfig, batch: Batch, counts: StepCounts | None) -> MTPTargets | None:
    """What the multi-token-prediction depths are to learn; None outside training."""
    if not batch.mtp_labels or counts is None:
        return None
    factor = config.model.mtp_loss_scaling_factor
    if config.training.calculate_per_token_loss:
        weights = per_token_weights(batch.mtp_loss_masks, factor, counts.main, counts.mtp)
    else:
        weights = mean_of_means_weights(batch.mtp_loss_masks, factor / counts.num_microbatches)
    return MTPTargets(batch.mtp_labels, batch.mtp_loss_masks, weights)


def gpt_forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one chunk on one micro-batch; see `Task.forward_step`."""
    targets = mtp_targets(config, batch, counts)
    output = model(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        mtp_targets=targets,
    )
    return output, partial(masked_token_loss, loss_mask=batch.loss_mask, mtp_targets=targets)
