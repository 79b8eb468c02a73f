"""Guidance by text and by reference images (classifier-free, arXiv:2207.12598 and 2211.09800).

With c the prediction for caption and references, u for the empty caption and references, and u2
for neither, Open-Sora 2.0 takes

    v = u2 + image_scale * (u - u2) + text_scale * (c - u).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError


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
