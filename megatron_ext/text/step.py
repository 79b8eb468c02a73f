"""The forward step of GPT pretraining and fine-tuning, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.loss import LossConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.layers.mtp import (
    MTPTargets,
    mean_of_means_weights,
    output_head,
    per_token_weights,
)
from megatron_ext.losses.contract import (
    LossFunction,
    Report,
    StepCounts,
    share_of_step,
    weighted_token_loss,
)
from megatron_ext.losses.custom import HiddenStatesLoss, TokenLoss, load_loss
from megatron_ext.parallel.context import ParallelContext


def mtp_targets(
    batch: Batch, counts: StepCounts | None, factor: float, *, per_token: bool
) -> MTPTargets | None:
    """Return the targets of the multi-token-prediction depths; None outside training.

    Args:
        batch: one micro-batch.
        counts: targets of the whole step; None outside training.
        factor: weight of the losses of all depths together.
        per_token: a step divides by its tokens, not by those of each micro-batch.
    """
    if not batch.mtp_labels or counts is None:
        return None
    if per_token:
        weights = per_token_weights(batch.mtp_loss_weights, factor, counts.main, counts.mtp)
    else:
        weights = mean_of_means_weights(batch.mtp_loss_weights, factor / counts.num_microbatches)
    return MTPTargets(batch.mtp_labels, batch.mtp_loss_weights, weights)


def custom_loss(config: LossConfig) -> TokenLoss[Any] | None:
    """Return the custom loss that a run asks for, None without ``--loss``."""
    return None if config.loss is None else load_loss(config.loss, tuple(config.loss_args))


def prepare_batches(
    config: RunConfig, batches: Sequence[Batch], context: ParallelContext
) -> Sequence[Batch]:
    """Let a custom loss see all micro-batches of a step; see `Task.prepare_batches`."""
    loss = custom_loss(config.loss)
    if loss is None:
        return batches
    built = loss.build(batches, context)
    return [
        replace(batch, loss_weights=inputs.weights, loss_inputs=inputs)
        for batch, inputs in zip(batches, built, strict=True)
    ]


def hidden_states_loss(config: LossConfig, *, training: bool, fused: bool) -> HiddenStatesLoss:
    """Return the chunked loss; evaluation reports it without label smoothing and z-loss."""
    options: dict[str, Any] = {}
    if training:
        options = {
            "label_smoothing": config.label_smoothing,
            "z_loss_coefficient": config.z_loss_coeff,
            "gradient_accumulation_fusion": fused,
        }
    return HiddenStatesLoss(config.cross_entropy_chunk_size, options, custom_loss(config))


def gpt_forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one chunk on one micro-batch; see `Task.forward_step`."""
    per_token = config.training.calculate_per_token_loss
    factor = config.model.mtp_loss_scaling_factor
    targets = mtp_targets(batch, counts, factor, per_token=per_token)

    def share() -> Tensor | float:
        return share_of_step(batch.loss_weights, counts, per_token=per_token)

    def whole(losses: Tensor) -> tuple[Tensor, Tensor, Report]:
        return weighted_token_loss(
            losses, weights=batch.loss_weights, share=share(), mtp_targets=targets
        )

    def chunked(hidden: Tensor) -> tuple[Tensor, Tensor, Report]:
        fused = config.model.gradient_accumulation_fusion
        loss = hidden_states_loss(config.loss, training=counts is not None, fused=fused)
        head = output_head(model)
        return loss(hidden, head=head, batch=batch, share=share(), mtp_targets=targets)

    inputs = (batch.tokens, batch.position_ids, batch.attention_mask)
    if config.loss.cross_entropy_impl == "chunked":
        # megatron-core's wrapper would cast hidden states of 16 bits to float32.
        uncast = {"fp32_output": False} if config.precision.bf16 or config.precision.fp16 else {}
        hidden = model(*inputs, mtp_targets=targets, hidden_states_only=True, **uncast)
        return hidden, chunked
    losses = model(*inputs, labels=batch.labels, mtp_targets=targets)
    return losses, whole
