"""The predictions of critic and teacher about a clip, and the losses that follow from them.

A generator step: generate a clip, `noised_clip`, `generator_direction` or `sid_direction`, then
`generator_losses` block by block. A critic step: generate a clip, `noised_clip`,
`critic_clip_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.losses.contract import Report
from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.loss import critic_loss, dmd_direction, dmd_loss, sid_losses
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule, mixed
from megatron_ext.video.streaming.rollout import FlowNetwork, StreamClip
from megatron_ext.video.streaming.sequence import StreamingSequence

Loss = tuple[Tensor, Tensor, Report]
"""Sum, count and report of the loss contract."""


@dataclass(frozen=True)
class NoisedClip:
    """A clip at the noise level at which it is looked at, the same for all its frames.

    Attributes:
        x: X_t, ``[b, t, c, h, w]``, without gradient.
        noise: the noise in it, in the same shape.
        timesteps: ``[b]`` float32.
        sigma: ``[b]`` float64.
    """

    x: Tensor
    noise: Tensor
    timesteps: Tensor
    sigma: Tensor


def noised_clip(
    clip: StreamClip, schedule: NoiseSchedule, seed: int, purpose: decisions.Pass
) -> NoisedClip:
    """Noise a clip, with numbers that depend on its samples, its place and the purpose."""
    latents, name = clip.latents.detach(), f"{purpose} chunk {clip.number}"
    uniforms = decisions.uniforms(seed, clip.samples, f"{name} timestep")
    timesteps = schedule.score_timesteps(uniforms, clip.exit_step).to(latents.device)
    noise = decisions.noise(seed, clip.samples, latents.shape[1:], f"{name} noise", like=latents)
    return NoisedClip(
        x=schedule.add_noise(latents, noise, timesteps),
        noise=noise,
        timesteps=timesteps,
        sigma=schedule.sigma(timesteps),
    )


@dataclass(frozen=True)
class Scores:
    """The networks that judge clips, and how their predictions are compared.

    Attributes:
        critic: knows the generator's videos.
        teacher: knows real ones; sees both prompts as one batch of 2 * b.
        negative_text: embeddings of the negative prompt, ``[b or 1, l, d]``, as long as the
            clip's prompts; unused without guidance.
        guidance_scale: w of `video.streaming.loss`; 1 is the plain prediction.
        sid_alpha: alpha of score identity distillation.
    """

    critic: FlowNetwork
    teacher: FlowNetwork
    negative_text: Tensor
    guidance_scale: float = 4.0
    sid_alpha: float = 1.0

    def clean(
        self, clip: StreamClip, noised: NoisedClip, x: Tensor, entering: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the clean latents that the networks predict, by arguments of `dmd_direction`.

        Args:
            clip: gives the prompts.
            noised: gives the noise level.
            x: noised latents.
            entering: ``x`` as the networks get it, whose hooks see the gradient that comes through
                them alone; None gives them ``x`` itself.
        """
        given, text, scale = x if entering is None else entering, clip.text, self.guidance_scale
        fake = self.critic(x=given, timesteps=noised.timesteps, text=text)
        if scale == 1:
            real = unguided = self.teacher(x=given, timesteps=noised.timesteps, text=text)
        else:
            negative = self.negative_text.to(text).expand_as(text)
            both = self.teacher(
                x=torch.cat([given, given]),
                timesteps=noised.timesteps.repeat(2),
                text=torch.cat([text, negative]),
            )
            real, unguided = both.chunk(2)
        flows = {"fake": fake, "conditional": real, "unconditional": unguided}
        return {name: x0_from_flow(x, flow, noised.sigma) for name, flow in flows.items()}


@torch.no_grad()
def generator_direction(clip: StreamClip, noised: NoisedClip, scores: Scores) -> Tensor:
    """Return D of a clip, ``[b, t, c, h, w]`` float64; see `video.streaming.loss`."""
    return dmd_direction(
        clip.latents.detach(),
        **scores.clean(clip, noised, noised.x),
        scale=scores.guidance_scale,
    )


def sid_direction(
    clip: StreamClip,
    noised: NoisedClip,
    scores: Scores,
    whole_gradient: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of score identity distillation with regard to a clip.

    It goes through critic and teacher, whose weights get none; see `video.streaming.loss`.

    Args:
        clip: generated.
        noised: made by `noised_clip`.
        whole_gradient: turns the gradient of the networks' input on this rank into the gradient
            of the whole loss, where ranks share the tokens.

    Returns:
        The gradient, times the elements of a frame, ``[b, t, c, h, w]`` float64, and the frames'
        losses, ``[b, t]``; `generator_losses` takes both.
    """
    latents = clip.latents.detach().requires_grad_()
    with torch.enable_grad(), _frozen(scores.critic, scores.teacher):
        x = mixed(latents, noised.noise, noised.sigma)
        entering = x.clone()
        if whole_gradient is not None:
            entering.register_hook(whole_gradient)  # type: ignore[no-untyped-call]
        losses = sid_losses(
            latents,
            **scores.clean(clip, noised, x, entering),
            scale=scores.guidance_scale,
            alpha=scores.sid_alpha,
        )
        # Not torch.autograd.grad: recomputed blocks may refuse to be asked for one input.
        torch.where(clip.mask, losses, 0.0).sum().backward()  # type: ignore[no-untyped-call]
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


def generator_losses(
    clip: StreamClip,
    direction: Tensor,
    sequence: StreamingSequence,
    losses: Tensor | None = None,
) -> Iterator[Loss]:
    """Give the loss of each trained block, by the loss contract; their sum is the clip's.

    The exit step of a block is run when its loss is asked for, so that a backward pass after each
    keeps one block's activations at a time.

    Args:
        clip: generated for the generator, in two phases.
        direction: D of `generator_direction`, or the gradient of `sid_direction`.
        sequence: the sequence whose newest clip this is.
        losses: the losses of `sid_direction`.

    Raises:
        ConfigError: another clip was generated since.
    """
    for block in clip.blocks:
        sequence.check_newest(clip)
        yield dmd_loss(
            sequence.generator.clean(block.step),
            direction=direction[:, block.frames],
            mask=clip.mask[:, block.frames],
            losses=None if losses is None else losses[:, block.frames],
        )


def critic_clip_loss(
    clip: StreamClip, noised: NoisedClip, critic: FlowNetwork, kind: str = "flow"
) -> Loss:
    """Return the critic's loss on a clip, by the loss contract; only the critic gets a gradient.

    Args:
        clip: generated.
        noised: made by `noised_clip`.
        critic: is trained.
    """
    flow = critic(x=noised.x, timesteps=noised.timesteps, text=clip.text)
    return critic_loss(
        flow,
        latents=clip.latents,
        noise=noised.noise,
        mask=clip.mask,
        kind=kind,
        sigma=noised.sigma,
    )
