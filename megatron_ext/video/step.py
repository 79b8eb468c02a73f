"""What pretrain_video.py trains: an MMDiT that learns the velocity between noise and data.

Flow matching with a video DiT, causal or not: the networks that streaming starts from.

The loop, the data and the loss are those of the MMDiT. The network differs in that it is given
whole latents rather than packed tokens, timesteps of 0 to 1000, for each frame if they differ, and
the text alone, and in that it gives the velocity of all tokens on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import LossFunction, Report, StepCounts, share_of_step
from megatron_ext.video.config.mmdit import MMDiTConfig
from megatron_ext.video.config.run import ConditionConfig, VideoConfig
from megatron_ext.video.config.wan import VideoDiTConfig
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.randomness import Randomness, draw_normals
from megatron_ext.video.loss import FlowTargets, flow_matching_loss
from megatron_ext.video.microbatch import FlowBatchBuilder, FlowMicrobatch, sharing_ranks
from megatron_ext.video.model.mmdit.model import MMDiT
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from megatron_ext.video.model.tokens import grid, pack
from megatron_ext.video.model.wan.model import VideoDiT
from megatron_ext.video.model.wan.options import VideoDiTOptions, stage_blocks
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.rules import window_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


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
    mmdit = config.section(MMDiTConfig)
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
    return MMDiT.build(sizes, options, transformer_config, context, vp_stage=vp_stage)


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
        batch.loss_weights,
        counts,
        per_token=config.training.calculate_per_token_loss,
        usual_weight=batch.targets.usual_weight,
    )
    return flow_matching_loss(
        velocity,
        targets=batch.targets,
        share=share,
        reported_modes=config.section(ConditionConfig).modes,
    )


def boundary_shape(batches: Sequence[FlowMicrobatch], chunk: torch.nn.Module) -> Sequence[int]:
    """What passes between stages, as the model says; see `Task.boundary_shape`."""
    first = batches[0]
    shape_of = get_attr_wrapped_model(chunk, "boundary_shape")
    shape: Sequence[int] = shape_of(first.num_text, first.num_image, first.size)
    return shape


MAX_TIMESTEP = 1000.0
"""What the network is told at time 1, where there is only noise."""


def dit_options(config: RunConfig) -> VideoDiTOptions:
    """How the network of a run attends, starts and is recomputed.

    Raises:
        ConfigError: flags out of their range.
    """
    return VideoDiTOptions(
        window=window_of(config.section(StreamingConfig))
        if config.section(VideoConfig).is_causal
        else None,
        zero_head=config.section(StreamingConfig).zero_head,
        recompute_blocks=config.section(StreamingConfig).recompute_blocks,
        cp_comm_type=config.parallel.cp_comm_type[0],
    )


def build_dit_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
) -> VideoDiT:
    """One pipeline chunk of the video DiT of a run; see `Task.model_chunk`."""
    return VideoDiT.build(
        config.section(VideoDiTConfig).sizes,
        dit_options(config),
        transformer_config,
        context,
        vp_stage=vp_stage,
    )


def check_dit(config: RunConfig) -> None:
    """Refuse what no rank could build.

    Raises:
        ConfigError: more stages than blocks, or heads that ranks cannot share.
    """
    sizes, parallel = config.section(VideoDiTConfig).sizes, config.parallel
    dit_options(config)
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    stage_blocks(sizes.num_blocks, parallel.pipeline_model_parallel_size * chunks)
    shared = parallel.tensor_model_parallel_size
    if parallel.cp_comm_type[0] == "a2a":
        shared *= parallel.context_parallel_size
    if sizes.num_heads % shared:
        raise ConfigError(
            f"`--video-dit-size {config.section(VideoDiTConfig).video_dit_size}` has "
            f"{sizes.num_heads} attention heads, which {shared} ranks cannot share equally; use "
            "fewer tensor-parallel ranks, or all_gather instead of a2a."
        )


def check_clips(config: RunConfig, shape: tuple[int, int, int], what: str) -> None:
    """Refuse clips that the network of a run does not take.

    Args:
        config: of the run.
        shape: (t, h, w) of their latents.
        what: names them in the error.

    Raises:
        ConfigError: tokens of a frame that ranks cannot share equally, or no whole frame blocks.
        DataError: see `grid`.
    """
    frames, rows, columns = grid(shape, config.section(VideoDiTConfig).sizes.patch_size)
    if rows * columns % sharing_ranks(config):
        raise ConfigError(
            f"{what} have {rows} x {columns} = {rows * columns} tokens in a latent frame, which "
            f"{sharing_ranks(config)} ranks (context parallel, times tensor parallel with sequence "
            "parallelism) cannot share equally; use fewer ranks or another resolution."
        )
    if (
        config.section(VideoConfig).is_causal
        and frames % config.section(StreamingConfig).frame_block
    ):
        raise ConfigError(
            f"{what} have {frames} latent frames, which must be divisible by `--frame-block` "
            f"({config.section(StreamingConfig).frame_block}); use another length or block."
        )


class WanBatchBuilder(FlowBatchBuilder):
    """Makes micro-batches of whole latents."""

    def _normals(self, randomness: Randomness, samples: Sequence[int], num_frames: int) -> Tensor:
        if not self._config.section(VideoDiTConfig).independent_block_timesteps:
            return randomness.normals
        block = self._config.section(StreamingConfig).frame_block
        normals = draw_normals(self._seed, samples, "timestep", num_frames // block)
        return normals.repeat_interleave(block, dim=1)

    def _own(self, whole: FlowTargets, num_text: int) -> FlowTargets:
        """Context-parallel ranks have the same output; each counts its part of the tokens."""
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
        """The same on all stages, of which those after the first look at the shapes alone."""
        return {
            "x": x_t.transpose(1, 2),
            "timesteps": MAX_TIMESTEP * times,
            "text": self.text_of(batch, randomness).sequence,
        }


def dit_forward_step(
    config: RunConfig, batch: FlowMicrobatch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one chunk on one micro-batch; see `Task.forward_step`."""
    output: Tensor = model(**batch.inputs)
    return output, partial(_loss, config=config, batch=batch, counts=counts)


def _loss(
    flow: Tensor, *, config: RunConfig, batch: FlowMicrobatch, counts: StepCounts | None
) -> tuple[Tensor, Tensor, Report]:
    velocity = pack(flow.transpose(1, 2), config.section(VideoDiTConfig).sizes.patch_size)
    return flow_loss(velocity, config=config, batch=batch, counts=counts)


def dit_boundary_shape(batches: Sequence[FlowMicrobatch], chunk: torch.nn.Module) -> Sequence[int]:
    """What passes between stages, as the model says; see `Task.boundary_shape`."""
    shape: Sequence[int] = get_attr_wrapped_model(chunk, "boundary_shape")(**batches[0].inputs)
    return shape
