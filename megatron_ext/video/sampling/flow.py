"""Sampling of latent videos: Euler's method along the learned flow, from noise to data.

Guidance by text and by reference images (classifier-free, arXiv:2207.12598 and 2211.09800).

With c the prediction for caption and references, u for the empty caption and references, and u2
for neither, Open-Sora 2.0 takes

    v = u2 + image_scale * (u - u2) + text_scale * (c - u).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.run import FlowConfig
from megatron_ext.video.data.conditions import Text, condition, null_like
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.loss import shift, shift_factor
from megatron_ext.video.model.tokens import LatentShape, pack, tokens_per_frame, unpack


@dataclass(frozen=True)
class GuidanceConfig:
    """Scales of the guidance; 1 is the plain prediction.

    Attributes:
        text_scale: of the caption.
        image_scale: of the references.
        oscillate_text: from step ``oscillation_start`` on, odd steps take a text scale of 1.
        oscillate_image: likewise for the image scale.
        oscillation_start: first step that may oscillate, counted from 0.
        scale_image_by_frame: the image scale rises over the latent frames from 1 to an end value,
            which falls over the steps from ``image_scale`` towards 1.

    Raises:
        ConfigError: a scale that is not finite, or a negative first step.
    """

    text_scale: float = 7.5
    image_scale: float = 3.0
    oscillate_text: bool = True
    oscillate_image: bool = True
    oscillation_start: int = 10
    scale_image_by_frame: bool = True

    def __post_init__(self) -> None:
        for name in ("text_scale", "image_scale"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be finite; 1 turns this guidance off."
                )
        if self.oscillation_start < 0:
            raise ConfigError(
                f"`oscillation_start` ({self.oscillation_start}) must be 0 or more steps; turn "
                "`oscillate_text` and `oscillate_image` off to have none."
            )


def _rests(config: GuidanceConfig, step: int) -> bool:
    return step >= config.oscillation_start and step % 2 == 1


def text_scale(config: GuidanceConfig, step: int) -> float:
    """Scale of the caption at a step, counted from 0."""
    return 1.0 if config.oscillate_text and _rests(config, step) else config.text_scale


def image_scale(config: GuidanceConfig, step: int, num_steps: int, num_frames: int) -> Tensor:
    """Scale of the references at a step.

    Args:
        config: see `GuidanceConfig`.
        step: counted from 0.
        num_steps: of the sampler.
        num_frames: latent frames t.

    Returns:
        Of each latent frame, ``[t]`` float32.
    """
    scale = 1.0 if config.oscillate_image and _rests(config, step) else config.image_scale
    # A scale below 1 weakens the references; there is nothing to be spread over the frames.
    if not config.scale_image_by_frame or scale <= 1:
        return torch.full((num_frames,), scale)
    end = scale + (1 - scale) * step / num_steps
    return torch.linspace(1, end, num_frames)


def guided(c: Tensor, u: Tensor, u2: Tensor, text: float, image: Tensor | float) -> Tensor:
    """Join the three predictions; exactly ``c`` where both scales are 1.

    Args:
        c: for caption and references, ``[b, n, d]``.
        u: for the empty caption and references.
        u2: for the empty caption and no references.
        text: scale of the caption.
        image: scale of the references, a number or ``[n, 1]``.
    """
    return c + (text - 1) * (c - u) + (image - 1) * (u - u2)


Velocity = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``velocity(x, t, text, pooled, cond)``: tokens ``[b, n, c*p*p]`` float32, times ``[b]`` float32,
``[b, l, d]``, ``[b, e]`` and ``[b, n, (1+c)*p*p]`` to the velocity of the tokens."""


@dataclass(frozen=True)
class SamplingConfig:
    """How clips are sampled.

    Attributes:
        num_steps: of Euler's method.
        guidance: see `GuidanceConfig`.

    Raises:
        ConfigError: no step.
    """

    num_steps: int = 50
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(
                f"`num_steps` ({self.num_steps}) must be 1 or more; 50 is usual, 10 to 20 do for "
                "a first look."
            )


@dataclass(frozen=True)
class References:
    """Given frames of the clips that are sampled.

    Attributes:
        latents: ``[b, c, t, h, w]``; anything where there is no reference.
        masks: True at references, of `video.data.conditions.frame_masks`, ``[b, t]`` bool.
    """

    latents: Tensor
    masks: Tensor


def initial_noise(seed: int, num_clips: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Where sampling starts, ``[b, c, t, h, w]`` float32; clip i gets the same in any batch."""
    return draw_noise(seed, range(num_clips), shape, purpose="sampling noise")


def times(config: FlowConfig, num_steps: int, shape: LatentShape, patch_size: int) -> Tensor:
    """Times from 1 to 0 with the shift of training, ``[num_steps + 1]`` float32."""
    return shift(torch.linspace(1, 0, num_steps + 1), shift_factor(config, shape, patch_size))


@torch.no_grad()
def sample(
    velocity: Velocity,
    text: Text,
    null: Text,
    noise: Tensor,
    *,
    patch_size: int,
    flow: FlowConfig,
    sampling: SamplingConfig,
    references: References | None = None,
) -> Tensor:
    """Sample clips.

    Args:
        velocity: the model; called once a step with the predictions of the guidance in one batch.
        text: captions, ``[b, l, d]`` and ``[b, e]``.
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]``, k at most l.
        noise: of `initial_noise`, ``[b, c, t, h, w]`` on the device of the model.
        patch_size: p.
        flow: that of training.
        sampling: steps and guidance.
        references: given frames; None samples from the caption alone.

    Returns:
        Latents ``[b, c, t, h, w]`` float32; the references stand in them as they were given.

    Raises:
        DataError: captions, noise and references that do not fit each other.
    """
    _check(text, noise, references)
    noise = noise.float()
    _, _, t, h, w = noise.shape
    guide = _Guide(velocity, text, null, noise, patch_size, sampling, references)
    steps = times(flow, sampling.num_steps, (t, h, w), patch_size).tolist()
    x = pack(noise, patch_size)
    for step, (now, after) in enumerate(zip(steps, steps[1:], strict=False)):
        x = x + (after - now) * guide(x, now, step)
    latents = unpack(x, (t, h, w), patch_size)
    if references is None:
        return latents
    given = references.masks.to(x.device)[:, None, :, None, None]
    return torch.where(given, references.latents.to(latents), latents)


class _Guide:
    """Guided velocity of clips; what does not change between steps is prepared once."""

    def __init__(
        self,
        velocity: Velocity,
        text: Text,
        null: Text,
        noise: Tensor,
        patch_size: int,
        sampling: SamplingConfig,
        references: References | None,
    ) -> None:
        _, _, t, h, w = noise.shape
        self._velocity = velocity
        self._sampling = sampling
        self._num_frames, self._tokens = t, tokens_per_frame((t, h, w), patch_size)
        nothing = torch.zeros(len(noise), t, dtype=torch.bool)
        without = pack(condition(noise, nothing), patch_size)
        empty = null_like(null, text)
        texts, conditions = [text, empty], [without, without]
        if references is not None and bool(references.masks.any()):
            given = pack(condition(references.latents.to(noise), references.masks), patch_size)
            texts, conditions = [text, empty, empty], [given, given, without]
        self._parts = len(texts)
        self._sequence = torch.cat([part.sequence for part in texts])
        self._pooled = torch.cat([part.pooled for part in texts])
        self._condition = torch.cat(conditions)

    def __call__(self, x: Tensor, now: float, step: int) -> Tensor:
        """Velocity of tokens ``[b, n, d]`` at a time, float32."""
        x = x.repeat(self._parts, 1, 1)
        t = x.new_full((x.size(0),), now)
        predicted = self._velocity(x, t, self._sequence, self._pooled, self._condition).float()
        parts = predicted.chunk(self._parts)
        # Without references u and u2 are one prediction.
        c, u, u2 = parts if self._parts == 3 else (*parts, parts[1])
        config = self._sampling.guidance
        by_frame = image_scale(config, step, self._sampling.num_steps, self._num_frames)
        by_token = by_frame.repeat_interleave(self._tokens)[:, None].to(x.device)
        return guided(c, u, u2, text_scale(config, step), by_token)


def _check(text: Text, noise: Tensor, references: References | None) -> None:
    b, _, t, _, _ = noise.shape
    if not len(text.sequence) == len(text.pooled) == b:
        raise DataError(
            f"The noise is for {b} clip(s), but there are {len(text.sequence)} text and "
            f"{len(text.pooled)} pooled embedding(s); give one caption for each clip."
        )
    if references is None:
        return
    if references.latents.shape != noise.shape or tuple(references.masks.shape) != (b, t):
        raise DataError(
            f"The references have shape {tuple(references.latents.shape)} and masks of "
            f"{tuple(references.masks.shape)}, but the clips are {tuple(noise.shape)} and need "
            f"masks of {(b, t)}; encode the references at the size of the clips."
        )
