"""The networks of a streaming run, as their adapters are merged."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron.core.transformer import TransformerConfig

from megatron_ext.checkpoint.lora_merge import GPT, Network
from megatron_ext.models.causal_video import VideoDiT, VideoDiTOptions, build_video_dit_chunk
from megatron_ext.training.streaming.networks import build_generator_chunk
from megatron_ext.training.streaming.stored import CRITIC

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.layout import ParallelContext


def network_of(run: RunConfig, name: str | None) -> Network:
    """What a checkpoint's run trained.

    Args:
        run: that saved it.
        name: generator or critic of a streaming run; None for the generator, or the only one.
    """
    if not run.video.streams:
        return GPT
    return _CRITIC if name == CRITIC else Network(build_generator_chunk)


def _build_critic_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
) -> VideoDiT:
    streaming = config.streaming
    options = VideoDiTOptions(zero_head=streaming.zero_head)
    sizes = streaming.sizes(streaming.critic_size)
    return build_video_dit_chunk(sizes, options, transformer_config, context, vp_stage=vp_stage)


def _described_critic(run: RunConfig) -> RunConfig:
    model = run.streaming.described(run.model, run.streaming.critic_size)
    return dataclasses.replace(run, model=model)


_CRITIC = Network(
    _build_critic_chunk, _described_critic, CRITIC, lambda run: run.streaming.critic_checkpoint
)
