"""Flow matching with a network of double and single blocks on [text; image].

The network's inputs are packed image tokens, text tokens and pooled text. Flags may add reference
frames and a guidance strength. A rank's output is the velocity of its image tokens.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.video.config.joint import JointConfig, JointSizes
from megatron_ext.video.config.run import ConditionConfig
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.cost.joint import JointNetwork, flops_of_clip
from megatron_ext.video.data.conditions import condition
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.given_frames import reference_latents
from megatron_ext.video.data.randomness import Randomness
from megatron_ext.video.data.sampler import Geometry
from megatron_ext.video.loss import FlowTargets
from megatron_ext.video.model.joint_blocks import JointOptions, stage_blocks
from megatron_ext.video.model.joint_chunk import SWITCHES, check_inputs
from megatron_ext.video.model.tokens import TokenRange, pack, position_ids
from megatron_ext.video.networks.network import DataNeeds, FlowNetwork
from megatron_ext.video.sampling.velocity import ParallelVelocity
from megatron_ext.video.step import (
    FlowBatchBuilder,
    num_stages,
    sharing_ranks,
)


class JointBatchBuilder(FlowBatchBuilder):
    """Builds micro-batches of packed tokens."""

    def _own(self, whole: FlowTargets, num_text: int) -> FlowTargets:
        """Return the targets of the image tokens that this context-parallel rank holds.

        ``whole`` has the targets of all image tokens, which follow ``num_text`` text tokens in the
        sequence.
        """
        cp = self._context.pgs.cp
        tokens = TokenRange.whole(num_text, whole.weights.size(1))
        own = tokens.part(cp.rank(), cp.size()).image
        return dataclasses.replace(
            whole, velocity=whole.velocity[:, own], weights=whole.weights[:, own]
        )

    def _inputs(
        self, batch: VideoBatch, randomness: Randomness, x_t: Tensor, times: Tensor, masks: Tensor
    ) -> dict[str, Tensor | None]:
        b, _, t, h, w = x_t.shape
        ids = position_ids((t, h, w), self._patch, x_t.device).expand(b, -1, -1)
        txt_ids = ids.new_zeros(b, batch.text.size(1), 3)
        inputs: dict[str, Tensor | None] = {"img_ids": ids, "txt_ids": txt_ids}
        if not self._context.is_first_stage:
            return inputs
        flags = self._config.section(JointConfig)
        text = self.text_of(batch, randomness)
        inputs |= {"img": pack(x_t, self._patch), "timesteps": times}
        inputs |= {"txt": text.sequence, "y_vec": text.pooled}
        if flags.cond_embed:
            references = reference_latents(batch, randomness.modes, self._conditions)
            inputs["cond"] = pack(condition(references, masks), self._patch)
        if flags.guidance_embed:
            like = randomness.normals
            inputs["guidance"] = torch.full_like(like, flags.guidance, device=masks.device)
        return inputs


class JointVelocity(ParallelVelocity):
    """Predicts velocities with a `JointChunk`; all ranks check the inputs, so all raise errors."""

    def check_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        sizes = self._models[0].sizes
        check_inputs(sizes, {**dict.fromkeys(SWITCHES), **inputs}, is_first_stage=True)


class JointFlow(FlowNetwork):
    """The `FlowNetwork` of a run that trains or samples double and single blocks.

    Each rank predicts the velocity of the image tokens that it holds.

    Attributes:
        velocity_class: the class that predicts velocities for a sampler.
    """

    builder = JointBatchBuilder
    velocity_class: type[ParallelVelocity] = JointVelocity

    @property
    @abstractmethod
    def sizes(self) -> JointSizes: ...

    @property
    def needs(self) -> DataNeeds:
        references = self.config.section(ConditionConfig).modes != ("t2v",)
        return DataNeeds(references=references or self.config.section(JointConfig).cond_embed)

    @property
    def sequence_multiple(self) -> int:
        """Return the number of ranks that split [text; image]; it must divide the token count."""
        return sharing_ranks(self.config.parallel)

    def with_widths(self, manifest: Mapping[str, Any]) -> RunConfig:
        flags = dataclasses.replace(
            self.config.section(JointConfig),
            channels=manifest["latent_channels"],
            caption_width=manifest["text_width"],
            pooled_caption_width=manifest["pooled_width"],
        )
        return self.config.with_section(flags)

    def checked(self) -> RunConfig:
        """Check the parallel layout; return the configuration with ``cond_embed`` filled in.

        It is True if the run has another condition mode than t2v (text to video), or starts from
        weights that take reference frames: without any, these get zeros and add a bias.

        Raises:
            ConfigError: there are too many stages, or ``a2a`` cannot split the heads equally.
        """
        flags = self.config.section(JointConfig)
        flags = dataclasses.replace(flags, cond_embed=self.needs.references)
        sizes = self.sizes
        parallel = self.config.parallel
        stage_blocks(sizes, num_stages(parallel), flags.double_block_cost)
        shared = parallel.tensor_model_parallel_size * parallel.context_parallel_size
        if parallel.cp_comm_type[0] == "a2a" and sizes.num_heads % shared:
            raise ConfigError(
                f"`--cp-comm-type a2a` trades heads ({sizes.num_heads}), which must be divisible "
                f"by tensor x context parallel size ({shared}); use all_gather."
            )
        return self.config.with_section(flags)

    def flops(self, sequence: Geometry) -> float:
        return flops_of_clip(self.sizes, sequence.num_text, sequence.num_image)

    def planned(self, clip: Clip) -> JointNetwork:
        return JointNetwork.of(self.config, self.sizes, clip)

    def recomputing(self, mode: str) -> RunConfig:
        blocks = None if mode == "full" else 0
        flags = dataclasses.replace(
            self.config.section(JointConfig),
            recompute_double_blocks=blocks,
            recompute_single_blocks=blocks,
        )
        return self.config.with_section(flags)

    @property
    def options(self) -> JointOptions:
        """Return the options that the flags set.

        If no number of double (or single) blocks to recompute is given, all are recomputed.
        """
        flags = self.config.section(JointConfig)
        sizes = self.sizes
        double = flags.recompute_double_blocks
        single = flags.recompute_single_blocks
        return JointOptions(
            adaln_zero=flags.adaln_zero,
            recompute_double_blocks=sizes.num_double_blocks if double is None else double,
            recompute_single_blocks=sizes.num_single_blocks if single is None else single,
            cp_comm_type=self.config.parallel.cp_comm_type[0],
            double_block_cost=flags.double_block_cost,
        )

    def sampled(
        self, engine: PipelineEngine, chunks: Sequence[torch.nn.Module], context: ParallelContext
    ) -> ParallelVelocity:
        sizes = self.sizes
        flags = self.config.section(JointConfig)
        guidance = flags.guidance if sizes.guidance_embed else None
        return self.velocity_class(
            engine, chunks, context, patch_size=sizes.patch_size, guidance=guidance
        )
