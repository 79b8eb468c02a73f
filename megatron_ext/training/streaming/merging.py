"""The networks of a streaming run, as their adapters are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer import TransformerConfig

from megatron_ext.checkpoint.companion import CRITIC
from megatron_ext.checkpoint.lora_merge import GPT, Network
from megatron_ext.models.causal_video import VideoDiT
from megatron_ext.training.streaming.networks import (
    build_generator_chunk,
    build_network,
    of_size,
)

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
    return build_network(config, transformer_config, context, size=config.streaming.critic_size)


def _described_critic(run: RunConfig) -> RunConfig:
    return of_size(run, run.streaming.critic_size)


_CRITIC = Network(
    _build_critic_chunk, _described_critic, CRITIC, lambda run: run.streaming.critic_checkpoint
)
