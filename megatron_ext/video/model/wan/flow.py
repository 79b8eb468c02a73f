"""Flow matching with a Wan network, causal or not: the networks that streaming starts from.

The network is given whole latents rather than packed tokens, timesteps of 0 to 1000, for each
frame if they differ, and the text alone, and it gives the velocity of all tokens on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.wan import VideoDiTConfig
from megatron_ext.video.cost.flops import flops_of_frames
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.randomness import Randomness, draw_normals
from megatron_ext.video.data.sampler import Geometry
from megatron_ext.video.loss import FlowTargets
from megatron_ext.video.model.tokens import grid, pack
from megatron_ext.video.model.wan.model import VideoDiT
from megatron_ext.video.model.wan.options import VideoDiTOptions, stage_blocks
from megatron_ext.video.step import (
    FlowBatchBuilder,
    FlowMicrobatch,
    FlowNetwork,
    num_stages,
    sharing_ranks,
)
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.rules import window_of

MAX_TIMESTEP = 1000.0
"""The timestep at time 1, where there is only noise."""


class WanBatchBuilder(FlowBatchBuilder):
    """Makes micro-batches of whole latents."""

    def _normals(self, randomness: Randomness, samples: Sequence[int], num_frames: int) -> Tensor:
        if not self._config.section(VideoDiTConfig).independent_block_timesteps:
            return randomness.normals
        block = self._config.section(StreamingConfig).frame_block
        normals = draw_normals(self._seed, samples, "timestep", num_frames // block)
        return normals.repeat_interleave(block, dim=1)

    def _own(self, whole: FlowTargets, num_text: int) -> FlowTargets:
        """Let each context-parallel rank count its part of the tokens: all have one output."""
        times, num_tokens = whole.times, whole.weights.size(1)
        if times.dim() == 2:
            times = times.repeat_interleave(num_tokens // times.size(1), dim=1)
        cp = self._context.pgs.cp
        part = torch.arange(num_tokens, device=times.device) * cp.size() // num_tokens
        weights = torch.where(part == cp.rank(), whole.weights, 0.0)
        return dataclasses.replace(whole, weights=weights, times=times)

    def _inputs(
        self, batch: VideoBatch, randomness: Randomness, x_t: Tensor, times: Tensor, masks: Tensor
    ) -> dict[str, Tensor | None]:
        """Return the same on all stages; those after the first look at the shapes alone."""
        return {
            "x": x_t.transpose(1, 2),
            "timesteps": MAX_TIMESTEP * times,
            "text": self.text_of(batch, randomness).sequence,
        }


class WanFlow(FlowNetwork):
    """A Wan network, which predicts the flow of whole latents."""

    builder = WanBatchBuilder

    def patch_size(self, config: RunConfig) -> int:
        return config.section(VideoDiTConfig).sizes.patch_size

    def with_widths(self, config: RunConfig, manifest: Mapping[str, Any]) -> RunConfig:
        return config.with_section(
            dataclasses.replace(
                config.section(VideoDiTConfig),
                dit_channels=manifest["latent_channels"],
                dit_text_width=manifest["text_width"],
            )
        )

    def options(self, config: RunConfig) -> VideoDiTOptions:
        """Return how the network attends, starts and is recomputed.

        Raises:
            ConfigError: flags are out of their range.
        """
        streaming = config.section(StreamingConfig)
        return VideoDiTOptions(
            window=window_of(streaming) if config.section(VideoConfig).is_causal else None,
            zero_head=streaming.zero_head,
            recompute_blocks=streaming.recompute_blocks,
            cp_comm_type=config.parallel.cp_comm_type[0],
        )

    def checked(self, config: RunConfig) -> RunConfig:
        """Return the configuration as it is, once the layout has been checked."""
        dit, parallel = config.section(VideoDiTConfig), config.parallel
        self.options(config)
        stage_blocks(dit.sizes.num_blocks, num_stages(config))
        shared = parallel.tensor_model_parallel_size
        if parallel.cp_comm_type[0] == "a2a":
            shared *= parallel.context_parallel_size
        if dit.sizes.num_heads % shared:
            raise ConfigError(
                f"`--video-dit-size {dit.video_dit_size}` has {dit.sizes.num_heads} attention "
                f"heads, which {shared} ranks cannot share equally; use fewer tensor-parallel "
                "ranks, or all_gather instead of a2a."
            )
        return config

    def check_clips(self, config: RunConfig, shape: tuple[int, int, int], what: str) -> None:
        frames, rows, columns = grid(shape, self.patch_size(config))
        if rows * columns % sharing_ranks(config):
            raise ConfigError(
                f"{what} have {rows} x {columns} = {rows * columns} tokens in a latent frame, "
                f"which {sharing_ranks(config)} ranks (context parallel, times tensor parallel "
                "with sequence parallelism) cannot share equally; use fewer ranks or another "
                "resolution."
            )
        block = config.section(StreamingConfig).frame_block
        if config.section(VideoConfig).is_causal and frames % block:
            raise ConfigError(
                f"{what} have {frames} latent frames, which must be divisible by `--frame-block` "
                f"({block}); use another length or block."
            )

    def flops(self, config: RunConfig, sequence: Geometry) -> float:
        frames = sequence.shape[1]
        return flops_of_frames(
            config.section(VideoDiTConfig).sizes,
            self.options(config).window,
            num_text=sequence.num_text,
            num_frames=frames,
            tokens_per_frame=sequence.num_image // frames,
        )

    def build_chunk(
        self,
        config: RunConfig,
        transformer_config: TransformerConfig,
        context: ParallelContext,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
    ) -> VideoDiT:
        sizes, options = config.section(VideoDiTConfig).sizes, self.options(config)
        return VideoDiT.build(sizes, options, transformer_config, context, vp_stage=vp_stage)

    def boundary_shape(
        self, batches: Sequence[FlowMicrobatch], chunk: torch.nn.Module
    ) -> Sequence[int]:
        shape_of = get_attr_wrapped_model(chunk, "boundary_shape")
        shape: Sequence[int] = shape_of(**batches[0].inputs)
        return shape

    def velocity(self, config: RunConfig, output: Tensor) -> Tensor:
        """Return the flow of whole latents as packed tokens."""
        return pack(output.transpose(1, 2), self.patch_size(config))


WAN = WanFlow()
