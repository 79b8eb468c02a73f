"""The forward step of GPT pretraining and fine-tuning, and the loss that it ends in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


def mtp_targets(config: RunConfig, batch: Batch, counts: StepCounts | None) -> MTPTargets | None:
    """What the multi-token-prediction depths are to learn; None outside training."""
    if not batch.mtp_labels or counts is None:
        return None
    factor = config.model.mtp_loss_scaling_factor
    if config.training.calculate_per_token_loss:
        weights = per_token_weights(batch.mtp_loss_weights, factor, counts.main, counts.mtp)
    else:
        weights = mean_of_means_weights(batch.mtp_loss_weights, factor / counts.num_microbatches)
    return MTPTargets(batch.mtp_labels, batch.mtp_loss_weights, weights)


def own_loss(config: RunConfig) -> TokenLoss[Any] | None:
    """The loss of the user's own that a run asks for."""
    loss = config.loss
    return None if loss.loss is None else load_loss(loss.loss, tuple(loss.loss_args))


def prepare_batches(
    config: RunConfig, batches: Sequence[Batch], context: ParallelContext
) -> Sequence[Batch]:
    """Let a loss of the user's own see all micro-batches of a step; see `Task.prepare_batches`."""
    loss = own_loss(config)
    if loss is None:
        return batches
    built = loss.build(batches, context)
    return [
        replace(batch, loss_weights=inputs.weights, loss_inputs=inputs)
        for batch, inputs in zip(batches, built, strict=True)
    ]


def hidden_states_loss(config: RunConfig, *, training: bool) -> HiddenStatesLoss:
    """The chunked loss of a run; evaluation reports it without label smoothing and z-loss."""
    options: dict[str, Any] = {}
    if training:
        options = {
            "label_smoothing": config.loss.label_smoothing,
            "z_loss_coefficient": config.loss.z_loss_coeff,
            "gradient_accumulation_fusion": config.model.gradient_accumulation_fusion,
        }
    return HiddenStatesLoss(config.loss.cross_entropy_chunk_size, options, own_loss(config))


def gpt_forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one chunk on one micro-batch; see `Task.forward_step`."""
    targets = mtp_targets(config, batch, counts)
    inputs = (batch.tokens, batch.position_ids, batch.attention_mask)
    if config.loss.cross_entropy_impl == "chunked":
        hidden = model(*inputs, mtp_targets=targets, hidden_states_only=True, **_as_it_is(config))
        return hidden, partial(
            _chunked, config=config, batch=batch, model=model, counts=counts, targets=targets
        )
    losses = model(*inputs, labels=batch.labels, mtp_targets=targets)
    return losses, partial(_whole, config=config, batch=batch, counts=counts, targets=targets)


def _as_it_is(config: RunConfig) -> dict[str, bool]:
    """Keep hidden states in 16 bits, which megatron-core's wrapper would cast to float32."""
    return {"fp32_output": False} if config.precision.bf16 or config.precision.fp16 else {}


def _share(config: RunConfig, batch: Batch, counts: StepCounts | None) -> Tensor | float:
    per_token = config.training.calculate_per_token_loss
    return share_of_step(batch.loss_weights, counts, per_token=per_token)


def _whole(
    losses: Tensor,
    *,
    config: RunConfig,
    batch: Batch,
    counts: StepCounts | None,
    targets: MTPTargets | None,
) -> tuple[Tensor, Tensor, Report]:
    return weighted_token_loss(
        losses,
        weights=batch.loss_weights,
        share=_share(config, batch, counts),
        mtp_targets=targets,
    )


def _chunked(
    hidden: Tensor,
    *,
    config: RunConfig,
    batch: Batch,
    model: torch.nn.Module,
    counts: StepCounts | None,
    targets: MTPTargets | None,
) -> tuple[Tensor, Tensor, Report]:
    return hidden_states_loss(config, training=counts is not None)(
        hidden,
        head=output_head(model),
        batch=batch,
        share=_share(config, batch, counts),
        mtp_targets=targets,
    )
