"""Samples latent videos by Euler's method along the learned flow, from noise to data.

Captions and reference images guide the flow (classifier-free guidance, arXiv:2207.12598 and
2211.09800). Let c be the prediction for caption and references, u the prediction for the empty
caption and references, and u2 the prediction for the empty caption without references. Open-Sora
2.0 uses

    v = u2 + image_scale * (u - u2) + text_scale * (c - u).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.video.config.run import FlowConfig, SampleConfig
from megatron_ext.video.data.conditions import Text, condition, null_like
from megatron_ext.video.loss import shift, shift_factor
from megatron_ext.video.model.tokens import LatentShape, pack, tokens_per_frame, unpack

OSCILLATION_START = 10
"""The step, counted from 0, from which on ``--sample-oscillation`` switches guidance off in every
odd step, by setting both scales to 1."""


def _has_unit_scales(sampling: SampleConfig, step: int) -> bool:
    return sampling.sample_oscillation and step >= OSCILLATION_START and step % 2 == 1


def text_scale(sampling: SampleConfig, step: int) -> float:
    """Return the guidance scale of the caption (``text_scale``) at a step, counted from 0."""
    return 1.0 if _has_unit_scales(sampling, step) else sampling.sample_text_scale


def image_scale(sampling: SampleConfig, step: int, num_frames: int) -> Tensor:
    """Return the guidance scale of the references for each latent frame, ``[t]`` float32.

    Steps are counted from 0. With ``--sample-scale-by-frame`` the scale rises over the frames, from
    1 at the first to a maximum at the last, and this maximum falls from step to step, from
    ``--sample-image-scale`` towards 1.
    """
    scale = 1.0 if _has_unit_scales(sampling, step) else sampling.sample_image_scale
    # A scale of 1 or less does not amplify the references, so it is the same for all frames.
    if not sampling.sample_scale_by_frame or scale <= 1:
        return torch.full((num_frames,), scale)
    end = scale + (1 - scale) * step / sampling.sample_steps
    return torch.linspace(1, end, num_frames)


def guided(c: Tensor, u: Tensor, u2: Tensor, text: float, image: Tensor | float) -> Tensor:
    """Return the velocity v of the module's formula, guided by caption and references.

    The predictions are ``[b, n, d]`` for n tokens: ``c`` with caption and references, ``u`` with
    references only, ``u2`` with neither. ``text`` is the scale of the caption; ``image``, a number
    or ``[n, 1]``, is the scale of the references. If both scales are 1, the result is exactly
    ``c``.
    """
    return c + (text - 1) * (c - u) + (image - 1) * (u - u2)


Velocity = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function ``velocity(x, t, text, pooled, cond)`` that returns velocities in the shape of ``x``.

``x`` are noised tokens ``[b, n, c*p*p]`` and ``t`` their flow times ``[b]``, both float32. ``text``
has the caption's token embeddings ``[b, l, d]``, ``pooled`` one embedding of the whole caption
``[b, e]``. ``cond`` has the reference frames with their mask, as tokens ``[b, n, (1+c)*p*p]``."""


@dataclass(frozen=True)
class References:
    """Reference frames of sampled clips.

    Attributes:
        latents: ``[b, c, t, h, w]``; values of frames without a reference are ignored.
        masks: True at reference frames, ``[b, t]`` bool.
    """

    latents: Tensor
    masks: Tensor


def times(config: FlowConfig, num_steps: int, shape: LatentShape, patch_size: int) -> Tensor:
    """Return flow times from 1 (noise) to 0 (data), ``[num_steps + 1]`` float32.

    `shift` moves them, as in training, by a factor that may depend on the latent ``shape``.
    """
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
    sampling: SampleConfig,
    references: References | None = None,
) -> Tensor:
    """Sample clips as latents ``[b, c, t, h, w]`` float32, with the reference frames as given.

    Args:
        velocity: the model, which is called once per step. For the guidance it gets 3 * b samples
            if there are references, else 2 * b.
        text: encoded captions: tokens ``[b, l, d]`` and pooled vectors ``[b, e]``.
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]`` with k <= l, or the encoded
            negative prompt of each clip, ``[b, l, d]`` and ``[b, e]``.
        noise: start of sampling, ``[b, c, t, h, w]`` on the device of the model.
        references: reference frames, with latents in the shape of the noise; None for no frames.
    """
    noise = noise.float()
    _, _, t, h, w = noise.shape
    nothing = torch.zeros(len(noise), t, dtype=torch.bool)
    without = pack(condition(noise, nothing), patch_size)
    empty = null_like(null, text)
    texts = [text, empty]
    conditions = [without, without]
    if references is not None and bool(references.masks.any()):
        given = pack(condition(references.latents.to(noise), references.masks), patch_size)
        texts = [text, empty, empty]
        conditions = [given, given, without]
    sequence = torch.cat([part.sequence for part in texts])
    pooled = torch.cat([part.pooled for part in texts])
    tokens = tokens_per_frame((t, h, w), patch_size)
    condition_tokens = torch.cat(conditions)

    def guide(x: Tensor, now: float, step: int) -> Tensor:
        """Return the guided velocity of tokens ``x``, ``[b, n, d]``, at time ``now``, in float32.

        ``step`` counts from 0.
        """
        x = x.repeat(len(texts), 1, 1)
        predicted = velocity(x, x.new_full((x.size(0),), now), sequence, pooled, condition_tokens)
        parts = predicted.float().chunk(len(texts))
        # Without references u and u2 are the same prediction.
        c, u, u2 = parts if len(parts) == 3 else (*parts, parts[1])
        by_token = image_scale(sampling, step, t).repeat_interleave(tokens)[:, None].to(x.device)
        return guided(c, u, u2, text_scale(sampling, step), by_token)

    steps = times(flow, sampling.sample_steps, (t, h, w), patch_size).tolist()
    x = pack(noise, patch_size)
    for step, (now, after) in enumerate(zip(steps, steps[1:], strict=False)):
        x = x + (after - now) * guide(x, now, step)
    latents = unpack(x, (t, h, w), patch_size)
    if references is None:
        return latents
    is_given = references.masks.to(x.device)[:, None, :, None, None]
    return torch.where(is_given, references.latents.to(latents), latents)
