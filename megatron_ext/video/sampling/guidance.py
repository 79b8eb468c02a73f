"""Guides the velocity of sampled clips by caption and references (classifier-free guidance).

Captions and reference images guide the flow (arXiv:2207.12598 and 2211.09800). Let c be the
prediction for caption and references, u the prediction for the empty caption and references, and u2
the prediction for the empty caption without references. Open-Sora 2.0 uses

    v = u2 + image_scale * (u - u2) + text_scale * (c - u).

Without references u and u2 are the same, and this is the usual guidance by text. Where a scale is
1, its predictions are not needed, so that no time is spent on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.video.config.run import SampleConfig

OSCILLATION_START = 10
"""The step, counted from 0, from which on ``--sample-oscillation`` switches guidance off in every
odd step, by setting both scales to 1."""


@dataclass(frozen=True)
class Guidance:
    """The scales of guidance in each step, by the flags of sampling.

    Steps are counted from 0; times are those of the flow, from 1 (noise) to 0 (data).

    Attributes:
        boundary: time below which ``--sample-low-noise-text-scale`` applies; None for one network.
    """

    sampling: SampleConfig
    boundary: float | None = None

    def _rests(self, step: int, time: float) -> bool:
        """Return whether a step is taken without guidance."""
        low, high = self.sampling.sample_guidance_range or (0.0, 1.0)
        oscillates = self.sampling.sample_oscillation and step >= OSCILLATION_START
        return not low <= time <= high or (oscillates and step % 2 == 1)

    def text_scale(self, step: int, time: float) -> float:
        """Return the scale of the caption in a step."""
        if self._rests(step, time):
            return 1.0
        low_noise = self.sampling.sample_low_noise_text_scale
        if low_noise is not None and self.boundary is not None and time < self.boundary:
            return low_noise
        return self.sampling.sample_text_scale

    def image_scale(self, step: int, time: float, num_frames: int) -> Tensor:
        """Return the scale of the references for each latent frame, ``[t]`` float32.

        With ``--sample-scale-by-frame`` the scale rises over the frames, from 1 at the first to a
        maximum at the last, and this maximum falls from step to step, from
        ``--sample-image-scale`` towards 1.
        """
        scale = 1.0 if self._rests(step, time) else self.sampling.sample_image_scale
        # A scale of 1 or less does not amplify the references, so it is the same for all frames.
        if not self.sampling.sample_scale_by_frame or scale <= 1:
            return torch.full((num_frames,), scale)
        end = scale + (1 - scale) * step / self.sampling.sample_steps
        return torch.linspace(1, end, num_frames)


def has_guidance(sampling: SampleConfig) -> bool:
    """Return whether the caption guides any clip, so that a negative prompt has an effect."""
    return {sampling.sample_text_scale, sampling.sample_low_noise_text_scale or 1.0} != {1.0}


def guided(c: Tensor, u: Tensor, u2: Tensor, text: float, image: Tensor | float) -> Tensor:
    """Return the velocity v of the module's formula, guided by caption and references.

    The predictions are ``[b, n, d]`` for n tokens: ``c`` with caption and references, ``u`` with
    references only, ``u2`` with neither. ``text`` is the scale of the caption; ``image``, a number
    or ``[n, 1]``, is the scale of the references. If both scales are 1, the result is exactly
    ``c``.
    """
    return c + (text - 1) * (c - u) + (image - 1) * (u - u2)
