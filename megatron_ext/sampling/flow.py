"""Sampling of latent videos: Euler's method along the learned flow, from noise to data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ext.config.flow import FlowConfig
from megatron_ext.data.video.conditions import condition
from megatron_ext.data.video.draws import draw_noise
from megatron_ext.data.video.text_dropout import Text, null_like
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.losses.flow_matching import shift, shift_factor
from megatron_ext.models.mmdit.tokens import LatentShape, pack, tokens_per_frame, unpack
from megatron_ext.sampling.guidance import GuidanceConfig, guided, image_scale, text_scale

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
        masks: True at references, of `data.video.conditions.frame_masks`, ``[b, t]`` bool.
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
