"""Implements `StreamedNetwork`, through which ``--task streaming`` uses a network, for Wan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.stages import Ranks, Stage
from megatron_ext.planning.weights import Weight
from megatron_ext.video.config.window import WindowConfig
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.network import StreamedNetwork
from megatron_ext.video.networks.wan.attention import AttentionPlan, VideoDiTOptions, wan_options
from megatron_ext.video.networks.wan.blocks import check_inputs
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.cost import DiTNetwork, dit_weights
from megatron_ext.video.networks.wan.flops import flops_of_pass
from megatron_ext.video.networks.wan.model import VideoDiT


class StreamedWan(StreamedNetwork):
    """Gives streaming the networks of Wan: a causal generator, bidirectional critic and teacher."""

    chunk = VideoDiT

    def options(
        self, flags: WindowConfig, parallel: ParallelConfig, *, causal: bool
    ) -> VideoDiTOptions:
        return wan_options(flags, parallel, causal=causal)

    def check_inputs(
        self, sizes: VideoDiTSizes, x: Tensor, timesteps: Tensor, text: Tensor
    ) -> None:
        check_inputs(sizes, x, timesteps, text)

    def weights(
        self, lora: LoraConfig, sizes: VideoDiTSizes, tp: int, stage: Stage
    ) -> list[Weight]:
        return dit_weights(lora, sizes, tp, stage)

    def on_clip(
        self, config: RunConfig, ranks: Ranks, sizes: VideoDiTSizes, clip: Clip
    ) -> DiTNetwork:
        own = replace(ranks, b=clip.micro_batch_size)
        return DiTNetwork(config, own, sizes, clip, AttentionPlan.bidirectional(clip.frames))

    def on_block(
        self,
        config: RunConfig,
        ranks: Ranks,
        sizes: VideoDiTSizes,
        clip: Clip,
        window: FrameWindow,
    ) -> DiTNetwork:
        # Choose a block late enough that the window is full of cached frames.
        first = window.at_or_after(window.block * (1 + window.window // window.block))
        seen = sorted(f for part in window.visible(first) for f in part if f < first)
        plan = AttentionPlan.causal(window, first, clip.frames, seen)
        return DiTNetwork(config, ranks, sizes, clip, plan, num_times=clip.frames)

    def pass_flops(self, model: VideoDiT, **inputs: Any) -> float:
        return flops_of_pass(model, **inputs)


STREAMED = StreamedWan()
