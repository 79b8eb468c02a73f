"""Flow matching with a Wan network, causal or bidirectional.

Every rank gets the whole latents, not only its part of the tokens, timesteps from 0 to 1000 per
clip or frame, and the text tokens. The output is the velocity of all tokens, on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.device.streams import to_device
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.video.config.window import WindowConfig
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.data.conditions import pixel_masks
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.given_frames import (
    image_embeds,
    masked_latents,
    reference_latents,
)
from megatron_ext.video.data.manifest import latent_factor
from megatron_ext.video.data.randomness import Randomness, draw_normals
from megatron_ext.video.data.sampler import Geometry
from megatron_ext.video.loss import FlowTargets
from megatron_ext.video.model.chunk import stage_blocks
from megatron_ext.video.model.tokens import LatentShape, grid, pack, unpack
from megatron_ext.video.networks.network import DataNeeds, FlowNetwork
from megatron_ext.video.networks.wan.attention import VideoDiTOptions, wan_options
from megatron_ext.video.networks.wan.blocks import check_inputs
from megatron_ext.video.networks.wan.config import (
    I2V,
    TI2V,
    VideoDiTConfig,
    VideoDiTSizes,
    is_causal,
)
from megatron_ext.video.networks.wan.cost import DiTNetwork
from megatron_ext.video.networks.wan.flops import flops_of_frames
from megatron_ext.video.networks.wan.model import VideoDiT
from megatron_ext.video.sampling.flow import References, Velocity
from megatron_ext.video.sampling.velocity import ParallelVelocity, from_last_stage
from megatron_ext.video.step import (
    FlowBatchBuilder,
    FlowMicrobatch,
    num_stages,
    sharing_ranks,
)

MAX_TIMESTEP = 1000.0
"""The network's timestep for pure noise: a flow time t in [0, 1] is given to it as 1000 t."""


class WanMicrobatch(FlowMicrobatch):
    """A micro-batch of a Wan network; `VideoDiT.boundary_shape` takes the inputs of ``forward``."""

    @property
    def boundary_inputs(self) -> Mapping[str, Any]:
        return self.inputs


class WanBatchBuilder(FlowBatchBuilder):
    """Builds the micro-batches of a Wan network, with whole latents on every rank."""

    microbatch = WanMicrobatch

    def _normals(self, randomness: Randomness, samples: Sequence[int], num_frames: int) -> Tensor:
        if not self._config.section(VideoDiTConfig).independent_block_timesteps:
            return randomness.normals
        blocks = self._config.section(WindowConfig).blocks
        normals = draw_normals(self._seed, samples, "timestep", blocks.count(num_frames))
        # A tensor of the blocks' sizes would make the host wait for a GPU.
        first = normals[:, :1].repeat_interleave(blocks.first, dim=1)
        later = normals[:, 1:].repeat_interleave(blocks.block, dim=1)
        return torch.cat([first, later], dim=1)

    def _own(self, whole: FlowTargets, num_text: int) -> FlowTargets:
        """Return ``whole`` with loss weight 0 at tokens outside this rank's share.

        All context-parallel ranks predict all tokens, but each token counts on one of them only.
        Flow times per frame, ``[b, t]``, are expanded to one per token. ``num_text`` is unused.
        """
        times = whole.times
        num_tokens = whole.weights.size(1)
        if times.dim() == 2:
            times = times.repeat_interleave(num_tokens // times.size(1), dim=1)
        cp = self._context.pgs.cp
        part = torch.arange(num_tokens, device=times.device) * cp.size() // num_tokens
        weights = torch.where(part == cp.rank(), whole.weights, 0.0)
        return dataclasses.replace(whole, weights=weights, times=times)

    def _inputs(
        self, batch: VideoBatch, randomness: Randomness, x_t: Tensor, times: Tensor, masks: Tensor
    ) -> dict[str, Tensor | None]:
        """Return the inputs of `VideoDiT.forward`; stages after the first use only their shapes."""
        dit = self._config.section(VideoDiTConfig)
        modes = randomness.modes
        timesteps = MAX_TIMESTEP * times
        inputs: dict[str, Tensor | None] = {}
        if dit.dit_condition == TI2V:
            given = reference_latents(batch, modes, self._conditions)
            x_t, timesteps = with_given_frames(x_t, timesteps, given, masks)
        if dit.dit_condition in I2V:
            masked = masked_latents(batch, modes, self._conditions)
            num_frames = x_t.size(2)
            pixels = pixel_masks(modes, num_frames, self._conditions, dit.dit_mask_channels)
            inputs["condition"] = input_channels(to_device(pixels, masked.device), masked)
        if dit.vision_places:
            inputs["vision"] = image_embeds(batch, modes, self._conditions, dit.vision_places)
        text = self.text_of(batch, randomness).sequence
        return {"x": x_t.transpose(1, 2), "timesteps": timesteps, "text": text, **inputs}


def with_given_frames(
    x: Tensor, timesteps: Tensor, given: Tensor, masks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return latents ``[b, c, t, h, w]`` with given frames in place, and timesteps ``[b, t]``.

    The frames where ``masks`` ``[b, t]`` is True are those of ``given``, without noise, so their
    timestep is 0. The others have the timestep of their clip, ``[b]``.
    """
    latents = torch.where(masks[:, None, :, None, None], given.to(x.dtype), x)
    return latents, torch.where(masks, 0.0, timesteps[:, None])


def input_channels(pixel_masks: Tensor, masked: Tensor) -> Tensor:
    """Return the channels behind the noised latents, ``[b, t, k + c, h, w]``.

    They are masks of given pixel frames ``[b, k, t]``, the same for all latent pixels, then latents
    ``[b, c, t, h, w]`` of clips whose other pixels are zero.
    """
    b, _, t, h, w = masked.shape
    spread = pixel_masks[..., None, None].expand(b, pixel_masks.size(1), t, h, w)
    return torch.cat([spread.to(masked.dtype), masked], dim=1).transpose(1, 2)


class VideoDiTVelocity(ParallelVelocity):
    """Predicts velocities with a `VideoDiT`, whose last stage returns all tokens on every rank.

    Args:
        condition: how given frames enter, a value of ``--dit-condition``.
    """

    gives_parts = False

    def __init__(self, *arguments: Any, condition: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._condition = condition
        # A network that reads given frames as input channels predicts these frames too.
        self.keeps_references = condition == TI2V

    @property
    def takes_references(self) -> bool:
        """Tell whether the model is given frames, in any form."""
        return self._condition != "none"

    def of_shape(self, shape: LatentShape) -> Velocity:
        """Return a function that predicts the velocity of latents of shape (t, h, w).

        DataError is raised if the patch size does not divide h and w.
        """
        grid(shape, self.patch_size)
        return partial(self.predict_whole, shape)

    @torch.no_grad()
    def predict_whole(
        self,
        shape: LatentShape,
        x: Tensor,
        t: Tensor,
        text: Tensor,
        pooled: Tensor,
        given: References,
    ) -> Tensor:
        """Return the velocity of all tokens of latents of ``shape`` (t, h, w), on every rank.

        The other arguments are those of `Velocity`, of which ``pooled`` is unused.
        """
        latents = unpack(x, shape, self.patch_size)
        timesteps = MAX_TIMESTEP * t
        if self._condition == TI2V:
            latents, timesteps = with_given_frames(latents, timesteps, given.latents, given.masks)
        inputs = {"x": latents.transpose(1, 2), "timesteps": timesteps, "text": text}
        if given.masked is not None and given.pixel_masks is not None:
            inputs["condition"] = input_channels(given.pixel_masks, given.masked)
        if given.image_embeds is not None:
            inputs["vision"] = given.image_embeds
        # Check this before a rank waits for another, so that all ranks raise the error.
        check_inputs(self._models[0].sizes, **inputs)
        outputs = self._run(inputs, self._models[0].boundary_shape(**inputs))
        whole = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if self.context.is_last_stage:
            whole = pack(outputs[0].float().transpose(1, 2), self.patch_size)
        return from_last_stage(whole, self.context)


class WanFlow(FlowNetwork):
    """The `FlowNetwork` of a run that trains or samples a Wan network.

    Every rank predicts the velocity of whole latents.
    """

    builder = WanBatchBuilder
    chunk = VideoDiT

    @property
    def _dit(self) -> VideoDiTConfig:
        return self.config.section(VideoDiTConfig)

    @property
    def sizes(self) -> VideoDiTSizes:
        return self._dit.sizes

    def with_widths(self, manifest: Mapping[str, Any]) -> RunConfig:
        widths = {"dit_channels": "latent_channels", "dit_text_width": "text_width"}
        given = {field: manifest[name] for field, name in widths.items()}
        images = manifest.get("image_embeds")
        if images is not None:
            given |= {"dit_vision_width": images["width"], "dit_vision_tokens": images["tokens"]}
        # A shape to price has widths alone.
        temporal = latent_factor(manifest, "temporal") if "codec" in manifest else None
        if temporal is not None:
            given["dit_mask_channels"] = temporal
        return self.config.with_section(dataclasses.replace(self._dit, **given))

    @property
    def needs(self) -> DataNeeds:
        dit = self._dit
        return DataNeeds(masked=dit.dit_condition in I2V, image_places=dit.vision_places)

    @property
    def options(self) -> VideoDiTOptions:
        causal = is_causal(self.config)
        return wan_options(self.config.section(WindowConfig), self.config.parallel, causal=causal)

    def checked(self) -> RunConfig:
        """Return the configuration as it is, since a Wan network derives no settings.

        ConfigError is raised if the ranks cannot share the blocks or the heads of the model.
        """
        sizes = self.sizes
        parallel = self.config.parallel
        stage_blocks(sizes.num_blocks, num_stages(parallel))
        shared = parallel.tensor_model_parallel_size
        if self.options.cp_comm_type == "a2a":
            shared *= parallel.context_parallel_size
        if sizes.num_heads % shared:
            raise ConfigError(
                f"`--video-dit-size {self._dit.video_dit_size}` has {sizes.num_heads} attention "
                f"heads, which {shared} ranks cannot share equally; use fewer tensor-parallel "
                "ranks, or all_gather instead of a2a."
            )
        return self.config

    def check_clips(self, shape: tuple[int, int, int], what: str) -> None:
        frames, rows, columns = grid(shape, self.patch_size)
        ranks = sharing_ranks(self.config.parallel)
        if rows * columns % ranks:
            raise ConfigError(
                f"{what} have {rows} x {columns} = {rows * columns} tokens in a latent frame, "
                f"which {ranks} ranks (context parallel, times tensor parallel with sequence "
                "parallelism) cannot share equally; use fewer ranks or another resolution."
            )
        blocks = self.config.section(WindowConfig).blocks
        if is_causal(self.config) and not blocks.begins(frames):
            rule = f"divisible by `--frame-block` ({blocks.block})"
            raise ConfigError(
                f"{what} have {frames} latent frames, which must be "
                f"{blocks.rule if blocks.first_alone else rule}; use another length or block."
            )

    def flops(self, sequence: Geometry) -> float:
        frames = sequence.shape[1]
        window = self.options.window
        return flops_of_frames(
            self.sizes, window, num_text=sequence.num_text, num_frames=frames,
            tokens_per_frame=sequence.num_image // frames, num_vision=self._dit.num_vision,
        )  # fmt: skip

    def planned(self, clip: Clip) -> DiTNetwork:
        return DiTNetwork.of(self.config, clip)

    def recomputing(self, mode: str) -> RunConfig:
        count = (self.config.model.num_layers or 0) if mode == "full" else 0
        wan = dataclasses.replace(self.config.section(WindowConfig), recompute_blocks=count)
        return self.config.with_section(wan)

    def sampled(
        self, engine: PipelineEngine, chunks: Sequence[torch.nn.Module], context: ParallelContext
    ) -> ParallelVelocity:
        return VideoDiTVelocity(
            engine, chunks, context, patch_size=self.patch_size, condition=self._dit.dit_condition
        )

    def velocity(self, output: Tensor) -> Tensor:
        """Return the output of the last stage, velocities ``[b, t, c, h, w]``, as packed tokens."""
        return pack(output.transpose(1, 2), self.patch_size)
