"""Flow matching as a plan sees it: `FLOW_COST`, which its task hands to `planning`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.network import Case, TaskCost
from megatron_ext.video.config.mmdit import MMDiTConfig
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.cost.clip import Clip, ClipNetwork
from megatron_ext.video.cost.mmdit import MMDiTNetwork
from megatron_ext.video.cost.wan import DiTNetwork
from megatron_ext.video.data.setup import planned_clips
from megatron_ext.video.streaming.config import StreamingConfig


def network_of(config: RunConfig, clip: Clip) -> ClipNetwork:
    """Return the network of a resolved run on the clips of one bucket."""
    return (DiTNetwork if config.section(VideoConfig).uses_dit else MMDiTNetwork).of(config, clip)


def cases(config: RunConfig) -> Sequence[Case]:
    """Return the network on each bucket of the data, which is opened."""
    return [
        Case(
            network=network_of(config, clip),
            name=clip.name,
            share=clip.share,
            columns={
                "clips at a time": str(clip.micro_batch_size),
                "text + image tokens": f"{clip.num_text} + {clip.num_image}",
            },
        )
        for clip in planned_clips(config)
    ]


def with_recomputation(config: RunConfig, mode: str) -> RunConfig:
    """Return the same run with all blocks recomputed (``full``) or none."""
    if config.section(VideoConfig).uses_dit:
        count = (config.model.num_layers or 0) if mode == "full" else 0
        return config.with_section(replace(config.section(StreamingConfig), recompute_blocks=count))
    blocks = None if mode == "full" else 0
    mmdit = replace(
        config.section(MMDiTConfig), recompute_double_blocks=blocks, recompute_single_blocks=blocks
    )
    return config.with_section(mmdit)


FLOW_COST = TaskCost(cases=cases, modes=("none", "full"), recompute=with_recomputation)
