"""What pretrain_video.py trains: an MMDiT that learns the velocity between noise and data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.losses.contract import LossFunction, Report, StepCounts
from megatron_ext.losses.cross_entropy import share_of_step
from megatron_ext.losses.flow_matching import flow_matching_loss
from megatron_ext.models.mmdit import MMDiT, MMDiTOptions, build_mmdit_chunk
from megatron_ext.training.video.microbatch import FlowMicrobatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.config import RunConfig
    from megatron_ext.layout import ParallelContext


def build_video_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
) -> MMDiT:
    """One pipeline chunk of the MMDiT of a run; see `Task.model_chunk`."""
    mmdit = config.mmdit
    sizes = mmdit.sizes(config.model)

    def recomputed(asked: int | None, blocks: int) -> int:
        return blocks if asked is None else asked

    options = MMDiTOptions(
        adaln_zero=mmdit.adaln_zero,
        recompute_double_blocks=recomputed(mmdit.recompute_double_blocks, sizes.num_double_blocks),
        recompute_single_blocks=recomputed(mmdit.recompute_single_blocks, sizes.num_single_blocks),
        cp_comm_type=config.parallel.cp_comm_type[0],
        double_block_cost=mmdit.double_block_cost,
    )
    return build_mmdit_chunk(sizes, options, transformer_config, context, vp_stage=vp_stage)


def flow_forward_step(
    config: RunConfig, batch: FlowMicrobatch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one chunk on one micro-batch; see `Task.forward_step`."""
    velocity: Tensor = model(**batch.inputs)
    return velocity, partial(flow_loss, config=config, batch=batch, counts=counts)


def flow_loss(
    velocity: Tensor, *, config: RunConfig, batch: FlowMicrobatch, counts: StepCounts | None
) -> tuple[Tensor, Tensor, Report]:
    """The loss of a micro-batch on the last stage, from the velocity of the targets' tokens."""
    assert batch.targets is not None
    share = share_of_step(
        batch.loss_mask,
        counts,
        per_token=config.training.calculate_per_token_loss,
        usual_weight=batch.targets.usual_weight,
    )
    return flow_matching_loss(
        velocity,
        targets=batch.targets,
        share=share,
        reported_modes=config.conditions.modes,
    )


def boundary_shape(batches: Sequence[FlowMicrobatch], chunk: torch.nn.Module) -> Sequence[int]:
    """What passes between stages, as the model says; see `Task.boundary_shape`."""
    first = batches[0]
    shape_of = get_attr_wrapped_model(chunk, "boundary_shape")
    shape: Sequence[int] = shape_of(first.num_text, first.num_image, first.size)
    return shape
