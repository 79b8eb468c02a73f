"""The forward step of GPT pretraining and fine-tuning, its loss, and the FLOPs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import LossConfig
from megatron_ext.data.batch import Batch
from megatron_ext.errors import ConfigError
from megatron_ext.layers.auxiliary_loss import (
    MTPTargets,
    OutputHead,
    mean_of_means_weights,
    per_token_weights,
)
from megatron_ext.losses.contract import (
    LossFunction,
    Report,
    StepCounts,
    share_of_step,
    weighted_token_loss,
)
from megatron_ext.losses.linear_cross_entropy import hidden_states_loss
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.cost.products import flops_per_sample
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.run import Run

if TYPE_CHECKING:
    from megatron_ext.losses.custom import TokenLoss


def mtp_targets(
    batch: Batch, counts: StepCounts | None, factor: float, *, per_token: bool
) -> MTPTargets | None:
    """Return the labels and loss weights of a micro-batch's multi-token-prediction (MTP) depths.

    Return None in evaluation and for a batch without targets.

    Args:
        counts: numbers of targets and micro-batches of the step; None in evaluation.
        factor: weight of the depths' mean loss in the training loss.
        per_token: whether losses are divided by the tokens of the step; otherwise, by the tokens of
            each micro-batch and by the number of micro-batches.
    """
    if not batch.mtp_labels or counts is None:
        return None
    if per_token:
        weights = per_token_weights(batch.mtp_loss_weights, factor, counts.main, counts.mtp)
    else:
        weights = mean_of_means_weights(batch.mtp_loss_weights, factor / counts.num_microbatches)
    return MTPTargets(batch.mtp_labels, batch.mtp_loss_weights, weights)


def custom_loss(config: LossConfig) -> TokenLoss[Any] | None:
    """Return the custom loss that ``--loss`` names; None without that flag."""
    if config.loss is None:
        return None
    from megatron_ext.losses.custom import load_loss

    return load_loss(config.loss, tuple(config.loss_args))


def prepare_batches(
    config: RunConfig, batches: Sequence[Batch], context: ParallelContext
) -> Sequence[Batch]:
    """Return a step's micro-batches with the inputs of a custom loss added.

    The custom loss computes its inputs from all micro-batches together. Without a custom loss,
    return the micro-batches unchanged.
    """
    loss = custom_loss(config.loss)
    if loss is None:
        return batches
    built = loss.build(batches, context)
    return [
        replace(batch, loss_weights=inputs.weights, loss_inputs=inputs)
        for batch, inputs in zip(batches, built, strict=True)
    ]


def output_head(model: torch.nn.Module) -> OutputHead:
    """Return the output head of a model chunk, which may be wrapped.

    Raise a ConfigError if the model has no method ``output_head``.
    """
    bare: Any = unwrap_model(model)
    if not hasattr(bare, "output_head"):
        raise ConfigError(
            f"The model `{type(bare).__name__}` has no method `output_head`, which chunked losses "
            "need; add it (see `auxiliary_loss.OutputHead`) or use `--cross-entropy-impl eager`."
        )
    head: OutputHead = bare.output_head()
    return head


def gpt_forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one model chunk on one micro-batch; return its output and the loss function.

    The loss function is called with the output of the last stage. ``counts`` are the numbers of
    targets of the whole step; None in evaluation.
    """
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
        options: dict[str, Any] = {}
        if counts is not None:  # evaluation reports the loss without label smoothing and z-loss
            options = {
                "label_smoothing": config.loss.label_smoothing,
                "z_loss_coefficient": config.loss.z_loss_coeff,
                "gradient_accumulation_fusion": config.model.gradient_accumulation_fusion,
            }
        return hidden_states_loss(
            hidden,
            output_head(model),
            batch,
            share=share(),
            mtp_targets=targets,
            custom=custom_loss(config.loss),
            block_size=config.loss.cross_entropy_chunk_size,
            **options,
        )

    inputs = (batch.tokens, batch.position_ids, batch.attention_mask)
    if config.loss.cross_entropy_impl == "chunked":
        # megatron-core's wrapper would cast hidden states of 16 bits to float32.
        uncast = {"fp32_output": False} if config.precision.bf16 or config.precision.fp16 else {}
        hidden = model(*inputs, mtp_targets=targets, hidden_states_only=True, **uncast)
        return hidden, chunked
    losses = model(*inputs, labels=batch.labels, mtp_targets=targets)
    return losses, whole


def text_step_stats(run: Run, num_microbatches: int) -> StepStats:
    """Return the numbers of samples, tokens and FLOPs of a step.

    The number of samples is the global batch size. Tokens and FLOPs are those of
    ``num_microbatches`` full micro-batches on each replica, padding included.
    """
    rows = num_microbatches * run.batch_size.samples_per_microbatch
    length = run.seq_length
    if length not in run.flops_of_samples:
        model = replace(run.config.model, seq_length=length)
        run.flops_of_samples[length] = flops_per_sample(replace(run.config, model=model))
    return StepStats(
        samples=run.batch_size.global_batch_size,
        tokens=rows * (length or 0),
        flops=rows * run.flops_of_samples[length],
    )
