"""What critic and teacher say of a chunk, and the losses that follow.

A generator step: generate a chunk, `noised_chunk`, `generator_direction` or `sid_direction`, then
`generator_losses` block by block. A critic step: generate a chunk, `noised_chunk`,
`critic_chunk_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_ext.losses.contract import Report
from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.streaming import options as draws
from megatron_ext.video.streaming.loss import (
    DMDConfig,
    critic_loss,
    dmd_direction,
    dmd_loss,
    sid_losses,
)
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule, mixed
from megatron_ext.video.streaming.rollout import FlowNetwork, StreamChunk
from megatron_ext.video.streaming.sequence import StreamingSequence


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
    timesteps = schedule.score_timesteps(uniforms, chunk.exit_step).to(latents.device)
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
    """D of a chunk, see `video.streaming.loss`.

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
    x = noised.x
    fake, real, unguided = _flows(chunk, noised, x, critic, teacher, negative_text, config)
    return dmd_direction(
        chunk.latents.detach(),
        fake=x0_from_flow(x, fake, noised.sigma),
        conditional=x0_from_flow(x, real, noised.sigma),
        unconditional=x0_from_flow(x, unguided, noised.sigma),
        scale=config.guidance_scale,
    )


def sid_direction(
    chunk: StreamChunk,
    noised: NoisedChunk,
    *,
    critic: FlowNetwork,
    teacher: FlowNetwork,
    negative_text: Tensor,
    config: DMDConfig,
    whole_gradient: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of score identity distillation with regard to a chunk; see `video.streaming.loss`.

    It goes through critic and teacher, whose weights get none; the other arguments are those of
    `generator_direction`.

    Args:
        whole_gradient: makes of the gradient of the networks' input on this rank that of the whole
            loss, where ranks share the tokens out.

    Returns:
        The gradient, times the elements of a frame, ``[b, t, c, h, w]`` float64, and the frames'
        losses, ``[b, t]``; `generator_losses` takes both.
    """
    latents = chunk.latents.detach().requires_grad_()
    with torch.enable_grad(), _frozen(critic, teacher):
        x = mixed(latents, noised.noise, noised.sigma)
        entering = x.clone()
        if whole_gradient is not None:
            entering.register_hook(whole_gradient)  # type: ignore[no-untyped-call]
        flows = _flows(chunk, noised, entering, critic, teacher, negative_text, config)
        fake, real, unguided = (x0_from_flow(x, flow, noised.sigma) for flow in flows)
        losses = sid_losses(
            latents,
            fake=fake,
            conditional=real,
            unconditional=unguided,
            scale=config.guidance_scale,
            alpha=config.sid_alpha,
        )
        # Not torch.autograd.grad: recomputed blocks may refuse to be asked for one input.
        torch.where(chunk.mask, losses, 0.0).sum().backward()  # type: ignore[no-untyped-call]
    assert latents.grad is not None
    return latents.grad.double() * latents[0, 0].numel(), losses.detach()


@contextmanager
def _frozen(*networks: Any) -> Iterator[None]:
    """Let no weight of networks get a gradient inside of the block."""
    modules = [network for network in networks if isinstance(network, torch.nn.Module)]
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _flows(
    chunk: StreamChunk,
    noised: NoisedChunk,
    x: Tensor,
    critic: FlowNetwork,
    teacher: FlowNetwork,
    negative_text: Tensor,
    config: DMDConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Flow of a noised chunk by the critic, and by the teacher under both prompts."""
    text = chunk.text
    fake = critic(x=x, timesteps=noised.timesteps, text=text)
    if config.guidance_scale == 1:
        real = teacher(x=x, timesteps=noised.timesteps, text=text)
        return fake, real, real
    negative = negative_text.to(text).expand_as(text)
    both = teacher(
        x=torch.cat([x, x]),
        timesteps=noised.timesteps.repeat(2),
        text=torch.cat([text, negative]),
    )
    real, unguided = both.chunk(2)
    return fake, real, unguided


def generator_losses(
    chunk: StreamChunk,
    direction: Tensor,
    sequence: StreamingSequence,
    losses: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Report]]:
    """The loss of each trained block, through the loss contract; their sum is the chunk's.

    The exit step of a block is run when its loss is asked for, so that a backward pass after each
    keeps one block's activations at a time.

    Args:
        chunk: generated for the generator, in two phases.
        direction: D of `generator_direction`, or the gradient of `sid_direction`.
        sequence: whose newest chunk it is.
        losses: of `sid_direction`.

    Raises:
        ConfigError: another chunk was generated since.
    """
    for block in chunk.blocks:
        sequence.check_newest(chunk)
        yield dmd_loss(
            sequence.generator.clean(block.step),
            direction=direction[:, block.frames],
            mask=chunk.mask[:, block.frames],
            losses=None if losses is None else losses[:, block.frames],
        )


def critic_chunk_loss(
    chunk: StreamChunk, noised: NoisedChunk, critic: FlowNetwork, kind: str = "flow"
) -> tuple[Tensor, Tensor, Report]:
    """The critic's loss on a chunk, through the loss contract; only it gets a gradient.

    Args:
        chunk: generated.
        noised: of `noised_chunk`.
        critic: is trained.
        kind: see `video.streaming.loss.critic_loss`.
    """
    flow = critic(x=noised.x, timesteps=noised.timesteps, text=chunk.text)
    return critic_loss(
        flow,
        latents=chunk.latents,
        noise=noised.noise,
        mask=chunk.mask,
        kind=kind,
        sigma=noised.sigma,
    )
