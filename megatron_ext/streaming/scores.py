"""What critic and teacher say of a chunk, and the losses that follow.

A generator step: generate a chunk, `noised_chunk`, `generator_direction`, then `generator_losses`
block by block. A critic step: generate a chunk, `noised_chunk`, `critic_chunk_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_ext.losses.contract import Report
from megatron_ext.losses.dmd import DMDConfig, critic_loss, dmd_direction, dmd_loss
from megatron_ext.losses.noise_schedule import NoiseSchedule
from megatron_ext.models.causal_video.conversions import x0_from_flow
from megatron_ext.streaming import draws
from megatron_ext.streaming.chunk import StreamChunk
from megatron_ext.streaming.network import FlowNetwork
from megatron_ext.streaming.sequence import StreamingSequence


@dataclass(frozen=True)
class NoisedChunk:
    """A chunk at the noise level at which it is looked at, the same for all its frames.

    Attributes:
        x: X_t, ``[b, t, c, h, w]``, without gradient.
        noise: in it, as ``x``.
        timesteps: ``[b]`` float32.
        sigma: ``[b]`` float64.
    """

    x: Tensor
    noise: Tensor
    timesteps: Tensor
    sigma: Tensor


def noised_chunk(
    chunk: StreamChunk, schedule: NoiseSchedule, seed: int, purpose: Literal["generator", "critic"]
) -> NoisedChunk:
    """Noise a chunk, with numbers that depend on its samples, its place and the purpose."""
    latents, name = chunk.latents.detach(), f"{purpose} chunk {chunk.number}"
    uniforms = draws.uniforms(seed, chunk.samples, f"{name} timestep")
    timesteps = schedule.score_timesteps(uniforms).to(latents.device)
    noise = draws.noise(seed, chunk.samples, latents.shape[1:], f"{name} noise", like=latents)
    return NoisedChunk(
        x=schedule.add_noise(latents, noise, timesteps),
        noise=noise,
        timesteps=timesteps,
        sigma=schedule.sigma(timesteps),
    )


@torch.no_grad()
def generator_direction(
    chunk: StreamChunk,
    noised: NoisedChunk,
    *,
    critic: FlowNetwork,
    teacher: FlowNetwork,
    negative_text: Tensor,
    config: DMDConfig,
) -> Tensor:
    """D of a chunk, see `losses.dmd`.

    Args:
        chunk: generated.
        noised: of `noised_chunk`.
        critic: knows the generator's videos.
        teacher: knows real ones; sees both prompts as one batch of 2 * b.
        negative_text: embeddings of the negative prompt, ``[b or 1, l, d]``, as long as the
            chunk's prompts; not looked at without guidance.
        config: see `DMDConfig`.

    Returns:
        ``[b, t, c, h, w]`` float64.
    """
    x, text = noised.x, chunk.text
    fake = critic(x=x, timesteps=noised.timesteps, text=text)
    if config.guidance_scale == 1:
        real = unguided = teacher(x=x, timesteps=noised.timesteps, text=text)
    else:
        negative = negative_text.to(text).expand_as(text)
        both = teacher(
            x=torch.cat([x, x]),
            timesteps=noised.timesteps.repeat(2),
            text=torch.cat([text, negative]),
        )
        real, unguided = both.chunk(2)
    return dmd_direction(
        chunk.latents.detach(),
        fake=x0_from_flow(x, fake, noised.sigma),
        conditional=x0_from_flow(x, real, noised.sigma),
        unconditional=x0_from_flow(x, unguided, noised.sigma),
        scale=config.guidance_scale,
    )


def generator_losses(
    chunk: StreamChunk, direction: Tensor, sequence: StreamingSequence
) -> Iterator[tuple[Tensor, Tensor, Report]]:
    """The loss of each trained block, through the loss contract; their sum is the chunk's.

    The exit step of a block is run when its loss is asked for, so that a backward pass after each
    keeps one block's activations at a time.

    Args:
        chunk: generated for the generator, in two phases.
        direction: D of `generator_direction`.
        sequence: whose newest chunk it is.

    Raises:
        ConfigError: another chunk was generated since.
    """
    for block in chunk.blocks:
        sequence.check_newest(chunk)
        yield dmd_loss(
            sequence.generator.clean(block.step),
            direction=direction[:, block.frames],
            mask=chunk.mask[:, block.frames],
        )


def critic_chunk_loss(
    chunk: StreamChunk, noised: NoisedChunk, critic: FlowNetwork
) -> tuple[Tensor, Tensor, Report]:
    """The critic's loss on a chunk, through the loss contract; only it gets a gradient."""
    flow = critic(x=noised.x, timesteps=noised.timesteps, text=chunk.text)
    return critic_loss(flow, latents=chunk.latents, noise=noised.noise, mask=chunk.mask)
