"""Registry of the networks that pretrain_video.py trains by flow matching."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.losses.contract import LossFunction, StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.model.chunk import VideoChunk
from megatron_ext.video.model.mmdit.flow import MMDiTFlow
from megatron_ext.video.model.wan.flow import WanFlow
from megatron_ext.video.step import FlowMicrobatch, FlowNetwork

NETWORKS: dict[str, type[FlowNetwork]] = {
    "mmdit": MMDiTFlow,
    "video-dit": WanFlow,
    "causal-video-dit": WanFlow,
}
"""Networks by the value of ``--video-model``."""


def network_of(config: RunConfig) -> FlowNetwork:
    """Return the network that `--video-model` names, built for the run's configuration."""
    return NETWORKS[config.section(VideoConfig).video_model](config)


def build_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    vp_stage: int | None = None,
    **stage: bool,
) -> VideoChunk:
    """Build one pipeline chunk of the run's network, for virtual stage ``vp_stage``.

    ``stage`` is unused, since ``context`` holds the pipeline stage.
    """
    network = network_of(config)
    return network.chunk.build(
        network.sizes, network.options, transformer_config, context, vp_stage=vp_stage
    )


def forward_step(
    config: RunConfig, batch: FlowMicrobatch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one chunk on one micro-batch; return its output and the loss function."""
    return network_of(config).forward_step(batch, model, counts)
