"""From clips to what the model is given and what it is to predict, on one rank.

What flags and data decide of the model of a video run, whichever it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.device.streams import to_device
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.mmdit import MMDiTConfig
from megatron_ext.video.config.run import (
    MODES,
    ConditionConfig,
    FlowConfig,
    TextDropoutConfig,
    VideoConfig,
)
from megatron_ext.video.config.wan import VideoDiTConfig
from megatron_ext.video.data.conditions import (
    Section,
    Text,
    condition,
    drop_text,
    frame_masks,
    loss_mask,
    place_references,
    sections,
)
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.encode import reference_name
from megatron_ext.video.data.randomness import Randomness, draw_microbatch
from megatron_ext.video.loss import FlowTargets, noised, shift_factor, timesteps, token_weights
from megatron_ext.video.model.tokens import TokenRange, pack, position_ids, tokens_per_frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


def patch_size_of(config: RunConfig) -> int:
    """p; a token is a square of so many latent cells a side."""
    if config.section(VideoConfig).uses_dit:
        return config.section(VideoDiTConfig).sizes.patch_size
    return config.section(MMDiTConfig).sizes(config.model).patch_size


def sequence_multiple(config: RunConfig) -> int:
    """What the tokens of text and image together must be a multiple of, so that ranks share them.

    A video DiT shares the tokens of each frame instead, and its text is whole on every rank.
    """
    if config.section(VideoConfig).uses_dit:
        return 1
    return sharing_ranks(config)


def sharing_ranks(config: RunConfig) -> int:
    """Ranks that share the tokens of a clip."""
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return parallel.context_parallel_size * shared


def with_widths(config: RunConfig, manifest: Mapping[str, Any]) -> RunConfig:
    """With the model for the latents and embeddings of a dataset.

    Raises:
        ConfigError: captions without pooled vectors, which the MMDiT needs.
    """
    if config.section(VideoConfig).uses_dit:
        dit = dataclasses.replace(
            config.section(VideoDiTConfig),
            dit_channels=manifest["latent_channels"],
            dit_text_width=manifest["text_width"],
        )
        return config.with_section(dit)
    if not manifest["pooled_width"]:
        raise ConfigError(
            f"`--video-data-path` ({config.section(VideoConfig).video_data_path}) holds captions "
            "without pooled vectors, as umt5 gives them, but the MMDiT needs these; give "
            "`--video-model video-dit` or causal-video-dit, or encode the captions with t5-clip."
        )
    mmdit = dataclasses.replace(
        config.section(MMDiTConfig),
        channels=manifest["latent_channels"],
        caption_width=manifest["text_width"],
        pooled_caption_width=manifest["pooled_width"],
    )
    return config.with_section(mmdit)


@dataclass(frozen=True)
class FlowMicrobatch:
    """One micro-batch as a pipeline stage sees it.

    Attributes:
        inputs: keywords of the model's ``forward``; those of the first stage, or as many as others
            need. The first has a row for each clip.
        num_text, num_image: tokens of the whole sequence.
        targets: on the last stage, of the image tokens that this context-parallel rank holds.
    """

    inputs: Mapping[str, Tensor | None]
    num_text: int
    num_image: int
    targets: FlowTargets | None

    @property
    def size(self) -> int:
        """Clips b."""
        first = next(iter(self.inputs.values()))
        assert first is not None
        return first.size(0)

    @property
    def loss_weights(self) -> Tensor:
        """Weights of the tokens in the loss, ``[b, n]``; on the last stage."""
        assert self.targets is not None
        return self.targets.weights

    @property
    def mtp_loss_weights(self) -> tuple[Tensor, ...]:
        """None: nothing is predicted further ahead."""
        return ()


class FlowBatchBuilder:
    """Makes micro-batches of a run.

    Every random decision follows from the seed and the number of the sample, so that all ranks
    that hold parts of one sequence decide alike, and another layout decides the same.

    Args:
        config: the run.
        context: of this rank, which needs its own stage's part only.
        null: the encoded empty caption, ``[1, l, d]`` and ``[1, e]``.
        seed: of the decisions.
    """

    def __init__(self, config: RunConfig, context: ParallelContext, null: Text, seed: int) -> None:
        self._config, self._context, self._null, self._seed = config, context, null, seed
        self._patch = patch_size_of(config)

    def __call__(self, batch: VideoBatch, samples: Sequence[int]) -> FlowMicrobatch:
        """One micro-batch of clips whose numbers in the run are ``samples``."""
        config, latents = self._config, batch.latents
        _, c, t, h, w = latents.shape
        randomness = draw_microbatch(
            self._seed,
            samples,
            (c, t, h, w),
            config.section(ConditionConfig),
            config.section(TextDropoutConfig),
        )
        times = timesteps(
            config.section(FlowConfig),
            to_device(self._normals(randomness, samples, t), latents.device),
            shift_factor(config.section(FlowConfig), (t, h, w), self._patch),
        )
        noise = to_device(randomness.noise, latents.device)
        x_t, velocity = noised(latents, noise, times, config.section(FlowConfig).sigma_min)
        masks = to_device(
            frame_masks(randomness.modes, t, config.section(ConditionConfig)), latents.device
        )
        per_frame = tokens_per_frame((t, h, w), self._patch)
        num_text, num_image = batch.text.size(1), t * per_frame
        targets = None
        if self._context.is_last_stage:
            mask = loss_mask(masks, per_frame, config.section(ConditionConfig).reference_loss)
            weights = token_weights(mask, config.section(FlowConfig).loss_normalization)
            whole = FlowTargets(
                velocity=pack(velocity, self._patch),
                weights=weights,
                times=times,
                modes=to_device(randomness.modes, latents.device),
                usual_weight=weights.sum() / self._context.pgs.cp.size(),
            )
            targets = self._own(whole, num_text)
        inputs = self._inputs(batch, randomness, x_t, times, masks)
        return FlowMicrobatch(inputs, num_text, num_image, targets)

    def _normals(self, randomness: Randomness, samples: Sequence[int], num_frames: int) -> Tensor:
        """Of which times are made, ``[b]``, or ``[b, t]`` for a time of each frame."""
        return randomness.normals

    def _own(self, whole: FlowTargets, num_text: int) -> FlowTargets:
        """The targets of what the model's output on this rank stands for."""
        own = own_image_tokens(num_text, whole.weights.size(1), self._context)
        return dataclasses.replace(
            whole, velocity=whole.velocity[:, own], weights=whole.weights[:, own]
        )

    def _inputs(
        self, batch: VideoBatch, randomness: Randomness, x_t: Tensor, times: Tensor, masks: Tensor
    ) -> dict[str, Tensor | None]:
        """Keywords of the model's ``forward``."""
        b, _, t, h, w = x_t.shape
        ids = position_ids((t, h, w), self._patch, x_t.device).expand(b, -1, -1)
        inputs: dict[str, Tensor | None] = {
            "img_ids": ids,
            "txt_ids": ids.new_zeros(b, batch.text.size(1), 3),
        }
        if self._context.is_first_stage:
            inputs |= {"img": pack(x_t, self._patch), "timesteps": times}
            inputs |= self._given(batch, randomness, masks)
        return inputs

    def text_of(self, batch: VideoBatch, randomness: Randomness) -> Text:
        """Captions, some of which are dropped."""
        device = batch.text.device
        return drop_text(
            Text(batch.text, batch.pooled),
            self._null,
            to_device(randomness.drop_text, device),
            to_device(randomness.drop_pooled, device),
        )

    def _given(
        self, batch: VideoBatch, randomness: Randomness, masks: Tensor
    ) -> dict[str, Tensor | None]:
        """Captions, references, and the strength of a guidance that is told."""
        text, sizes = (
            self.text_of(batch, randomness),
            self._config.section(MMDiTConfig).sizes(self._config.model),
        )
        given: dict[str, Tensor | None] = {"txt": text.sequence, "y_vec": text.pooled}
        if sizes.cond_embed:
            references = _references(
                batch, randomness.modes.tolist(), self._config.section(ConditionConfig)
            )
            given["cond"] = pack(condition(references, masks), self._patch)
        if sizes.guidance_embed:
            given["guidance"] = torch.full_like(
                randomness.normals, self._config.section(MMDiTConfig).guidance, device=masks.device
            )
        return given


def own_image_tokens(num_text: int, num_image: int, context: ParallelContext) -> slice:
    """The image tokens of a context-parallel rank: ranks hold equal parts of [text; image]."""
    cp = context.pgs.cp
    return TokenRange.whole(num_text, num_image).part(cp.rank(), cp.size()).image


def _references(batch: VideoBatch, modes: Sequence[int], config: ConditionConfig) -> Tensor:
    """The references that each clip's mode gives, at their places, ``[b, c, t, h, w]``."""
    placed = []
    for row, mode in enumerate(modes):
        latents = batch.latents
        given = sections(MODES[mode], latents.size(2), config)
        pieces = [(section, _piece(batch, row, section)) for section in given]
        placed.append(place_references(pieces, latents.shape[1:], latents.dtype, latents.device))
    return torch.stack(placed)


def _piece(batch: VideoBatch, row: int, section: Section) -> Tensor:
    name = reference_name("tail" if section.start else "head", section.length)
    if name not in batch.references:
        raise DataError(
            f"The clips have no reference {name}, but a condition mode needs it; preprocess them "
            f"with `--reference-lengths {section.length}`."
        )
    return batch.references[name][row]
