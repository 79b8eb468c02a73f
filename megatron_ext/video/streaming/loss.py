"""The losses of distribution matching distillation, for the generator and for the critic.

A generator is trained on D, the difference between the clean latents that a critic and a teacher
predict from noised clips of its videos (arXiv:2311.18828, arXiv:2405.14867). The critic is trained
to denoise the generator's videos. X is a clip, X_t the noised clip, f and r are the clean latents
that critic and teacher predict from X_t:

    D   = (f - r) / mean|X - r|                                 (mean of each sample)
    L_G = 1/2 * mean over M of (X - stopgrad(X - D))²           dL_G / dX = D * M / |M|
    L_F = mean over M of (flow of the critic - (noise - X))²

Score identity distillation (arXiv:2404.04057) trains the generator by another loss, whose gradient
also goes through critic and teacher:

    L_S = mean over M of (r - f) * (r - X - alpha * (r - f)) / mean|X - r|

M are the frames with a loss, those that are new in the clip; in dL_G / dX, M is their mask of 0 and
1. With guidance the teacher predicts ``r = u + w * (c - u)``, where c and u are its predictions
under the prompt and the negative prompt; w = 1 is no guidance. LongLive adds ``3 * (c - u)`` to c,
which is w = 4 here. D and dL_S / dX are first computed from whole clips. The generator's loss is
then a sum over frames, so each block of frames can be a micro-batch. All model-parallel ranks of a
replica hold the whole latents and D.

A generator step generates a clip and calls `noised_clip`, `generator_direction` or `sid_direction`,
and then `generator_losses`. A critic step calls `critic_clip_loss` after `noised_clip`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.losses.contract import Report, number_of_targets, pair
from megatron_ext.video.loss import spread, x0_from_flow
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule, mixed
from megatron_ext.video.streaming.rollout import Generator, Network, StreamClip

Loss = tuple[Tensor, Tensor, Report]
"""A loss as (sum, count, report): the loss is sum / count, and the report is logged."""


@dataclass(frozen=True)
class NoisedClip:
    """A clip with noise for critic and teacher; all frames of a sample have the same noise level.

    Attributes:
        x: X_t, the noised latents ``[b, t, c, h, w]``, without gradient.
        noise: the noise in ``x``, in the same shape.
        timesteps: timestep of each sample, ``[b]`` float32.
        sigma: noise level at the timesteps, ``[b]`` float64.
    """

    x: Tensor
    noise: Tensor
    timesteps: Tensor
    sigma: Tensor


def noised_clip(
    clip: StreamClip, schedule: NoiseSchedule, seed: int, purpose: decisions.Pass
) -> NoisedClip:
    """Add noise to a clip, for critic and teacher.

    Noise and timesteps depend only on the seed, on ``purpose`` (the network that the clip trains),
    and on the clip's samples, its index in the sequence and its exit step.
    """
    latents = clip.latents.detach()
    name = f"{purpose} chunk {clip.number}"
    uniforms = decisions.uniforms(seed, clip.samples, f"{name} timestep")
    timesteps = schedule.score_timesteps(uniforms, clip.exit_step).to(latents.device)
    noise = decisions.noise(seed, clip.samples, latents.shape[1:], f"{name} noise", like=latents)
    x = schedule.add_noise(latents, noise, timesteps)
    return NoisedClip(x, noise, timesteps, schedule.sigma(timesteps))


@dataclass(frozen=True)
class Scores:
    """Critic and teacher, with the parameters by which their predictions are compared.

    Attributes:
        critic: network that models the flow of generated videos.
        teacher: network that models the flow of real videos. With guidance it gets both prompts in
            one batch of 2 * b.
        negative_text: embeddings of the negative prompt, ``[b or 1, l, d]``, as long as those of
            the clip's prompts; unused without guidance.
        guidance_scale: weight w of the guidance in this module's docstring; 1 is no guidance.
        sid_alpha: alpha in L_S, the loss of score identity distillation.
    """

    critic: Network
    teacher: Network
    negative_text: Tensor
    guidance_scale: float = 4.0
    sid_alpha: float = 1.0

    def clean(
        self, clip: StreamClip, noised: NoisedClip, x: Tensor, entering: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the clean latents that critic and teacher predict from the noised latents ``x``.

        The keys are ``fake`` for the critic, and ``conditional`` and ``unconditional`` for the
        teacher under the prompt and the negative prompt. Without guidance the last two are equal.

        Args:
            noised: gives the timesteps and noise levels of ``x``; its latents are not used.
            x: noised latents ``[b, t, c, h, w]``, which may need a gradient.
            entering: a copy of ``x`` that the networks get as their input, so that a gradient hook
                on it sees only the gradient through the networks; None gives them ``x`` itself.
        """
        given = x if entering is None else entering
        text = clip.text
        fake = self.critic(x=given, timesteps=noised.timesteps, text=text)
        if self.guidance_scale == 1:
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
    """Return D, the normalised difference between critic's and teacher's predictions, in float64.

    Its shape is that of the clip's latents; `dmd_direction` has the formula.
    """
    clean = scores.clean(clip, noised, noised.x)
    return dmd_direction(clip.latents.detach(), **clean, scale=scores.guidance_scale)


def sid_direction(
    clip: StreamClip,
    noised: NoisedClip,
    scores: Scores,
    whole_gradient: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (gradient of the score identity loss, L_S of each frame ``[b, t]``).

    The first result is the derivative of the sum of L_S over the frames with a loss by the latents,
    times the number of elements of a frame: ``[b, t, c, h, w]`` float64. The weights of critic and
    teacher get no gradients.

    ``whole_gradient`` is needed if the ranks of a replica divide the tokens. It turns this rank's
    gradient of the networks' input into the gradient over all tokens. With None the gradient is
    used as it is.
    """
    latents = clip.latents.detach().requires_grad_()
    with torch.enable_grad(), _frozen(scores.critic, scores.teacher):
        x = mixed(latents, noised.noise, noised.sigma)
        entering = x.clone()
        if whole_gradient is not None:
            entering.register_hook(whole_gradient)  # type: ignore[no-untyped-call]
        clean = scores.clean(clip, noised, x, entering)
        scale = scores.guidance_scale
        alpha = scores.sid_alpha
        losses = sid_losses(latents, **clean, scale=scale, alpha=alpha)
        # Use backward, not torch.autograd.grad, which checkpointed (recomputed) blocks may refuse.
        torch.where(clip.mask, losses, 0.0).sum().backward()  # type: ignore[no-untyped-call]
    assert latents.grad is not None
    return latents.grad.double() * latents[0, 0].numel(), losses.detach()


@contextmanager
def _frozen(*networks: Any) -> Iterator[None]:
    """Freeze the weights of networks within the ``with`` block."""
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
    clip: StreamClip, direction: Tensor, generator: Generator, losses: Tensor | None = None
) -> Iterator[Loss]:
    """Yield the generator's loss on each trained block of the clip that was generated last.

    The last denoising step of a block is run again only when the iterator reaches its loss. If the
    caller runs backward after each loss, only the activations of one block are kept at a time.

    Args:
        direction: the result of `generator_direction`, or the first result of `sid_direction`.
        losses: the second result of `sid_direction`; None for the loss L_G.
    """
    for step in clip.blocks:
        frames = clip.frames_of(step)
        latents = generator.clean(step)
        own = None if losses is None else losses[:, frames]
        given = direction[:, frames]
        mask = clip.mask[:, frames]
        yield dmd_loss(latents, direction=given, mask=mask, losses=own)


def critic_clip_loss(
    clip: StreamClip, noised: NoisedClip, critic: Network, kind: str = "flow"
) -> Loss:
    """Return (sum, count, report) of the critic's loss on a clip; only the critic gets gradients.

    ``kind`` is the quantity whose squared error is the loss: ``flow``, ``x0``, ``noise`` or ``v``.
    """
    flow = critic(x=noised.x, timesteps=noised.timesteps, text=clip.text)
    given = {"latents": clip.latents, "noise": noised.noise, "mask": clip.mask}
    return critic_loss(flow, **given, kind=kind, sigma=noised.sigma)


@torch.no_grad()
def dmd_direction(
    latents: Tensor, *, fake: Tensor, conditional: Tensor, unconditional: Tensor, scale: float
) -> Tensor:
    """Return D = (f - r) / mean|X - r|, the direction away from the teacher's distribution.

    f and r are the clean latents that critic and teacher predict from the noised clip; r includes
    the guidance. D is float64, and 0 for a sample with r = X. Values that are not finite are kept,
    so that the training step can detect them.

    Args:
        latents: X, whole clips ``[b, t, c, h, w]``; the normaliser is a mean over all frames,
            including those without a loss.
        fake: f, in the shape of X.
        conditional, unconditional: predictions of the teacher under the prompt and under the
            negative prompt, which are combined to r.
        scale: w of the guidance.
    """
    real = _guided(conditional, unconditional, scale)
    return (fake.double() - real) / _distance(latents, real)


def sid_losses(
    latents: Tensor,
    *,
    fake: Tensor,
    conditional: Tensor,
    unconditional: Tensor,
    scale: float,
    alpha: float,
) -> Tensor:
    """Return the score identity loss L_S of each frame, ``[b, t]`` float64.

    L_S is a frame's mean of (r - f) (r - X - alpha (r - f)) / mean|X - r|; it is 0 for a sample
    with r = X. The divisor mean|X - r| of a sample gets no gradient.

    Args:
        latents: X, whole clips ``[b, t, c, h, w]``.
        fake: f, the clean latents that the critic predicts.
        conditional, unconditional: the teacher's predictions under the prompt and the negative
            prompt, which are combined to r.
        scale: w of the guidance.
    """
    real = _guided(conditional, unconditional, scale)
    gap = real - fake.double()
    x = latents.double()
    return _by_frame(gap * (real - x - alpha * gap) / _distance(latents, real))


def _guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Return r, the clean latents that the teacher predicts with guidance, in float64."""
    c = conditional.double()
    u = unconditional.double()
    return c + (scale - 1) * (c - u)


@torch.no_grad()
def _distance(latents: Tensor, real: Tensor) -> Tensor:
    """Return mean|latents - real| of each sample as a divisor, ``[b, 1, 1, 1, 1]``.

    A mean of 0 is replaced by infinity, so that a quotient with it is 0.
    """
    distance = (latents.double() - real).abs().flatten(1).mean(dim=1)
    return torch.where(distance == 0, torch.inf, distance).view(-1, *[1] * (latents.dim() - 1))


def dmd_loss(
    latents: Tensor, *, direction: Tensor, mask: Tensor, losses: Tensor | None = None
) -> Loss:
    """Return sum, count and report of the generator's loss on clips, or on blocks of them.

    The loss of a frame is the mean over its elements. The float64 sum is over the frames with a
    loss, and count is their number, so sum / count is L_G. L_G does not show convergence, but
    ``dmdtrain_gradient_norm`` in the report does: the mean of |D| over all frames of ``latents``.

    Args:
        latents: generated latents X with gradient, ``[b, t, c, h, w]``.
        direction: D of `dmd_direction` for these frames, in the shape of ``latents``.
        mask: True at frames with a loss, ``[b, t]`` bool.
        losses: None for L_G. Otherwise the values of another loss at each frame, ``[b, t]``; then
            ``direction`` is the gradient of this loss times the number of elements of a frame.
            `sid_direction` returns both.
    """
    x = latents.double()
    d = direction.double()
    counts = mask[..., None, None, None]
    # This is X - stopgrad(X - D), but without rounding, so that the gradient is exactly D.
    if losses is None:
        error = torch.where(counts, x - x.detach() + d, 0.0)
        total = 0.5 * _by_frame(error.square()).sum()
    else:
        slope = torch.where(counts, (x - x.detach()) * d, 0.0)
        total = _by_frame(slope).sum() + torch.where(mask, losses, 0.0).sum()
    count = number_of_targets(mask)
    sizes = pair(_by_frame(d.abs()).sum(), torch.full((), mask.numel(), device=d.device))
    return total, count, {"generator loss": pair(total, count), "dmdtrain_gradient_norm": sizes}


def critic_loss(
    flow: Tensor,
    *,
    latents: Tensor,
    noise: Tensor,
    mask: Tensor,
    kind: str = "flow",
    sigma: Tensor | None = None,
) -> Loss:
    """Return sum, count and report of the critic's denoising loss on generated clips.

    ``kind`` is the quantity whose squared error is the loss. The error of each kind is the error
    of the flow times a factor:

    - ``flow``: 1,
    - ``x0``, the clean latents: sigma,
    - ``noise``: 1 - sigma,
    - ``v`` of the variance-preserving path with the same signal-to-noise ratio:
      sqrt((1 - sigma)² + sigma²).

    The loss of a frame is the mean over its elements. The float64 sum is over the frames with a
    loss, and count is their number.

    Args:
        flow: prediction of the critic for the noised clip, ``[b, t, c, h, w]``.
        latents, noise: generated latents, and the noise added to them; they get no gradient.
        mask: True at frames with a loss, ``[b, t]`` bool.
        sigma: noise level of the clip, ``[b]``; unused for ``flow``.
    """
    error = flow.double() - (noise.double() - latents.detach().double())
    if kind != "flow":
        assert sigma is not None
        s = sigma.double()
        shares = {"x0": s, "noise": 1 - s, "v": torch.hypot(1 - s, s)}
        error = error * spread(shares[kind], error)
    total = _by_frame(torch.where(mask[..., None, None, None], error, 0.0).square()).sum()
    count = number_of_targets(mask)
    return total, count, {"critic loss": pair(total, count)}


def _by_frame(x: Tensor) -> Tensor:
    """Return the mean over the elements of each frame: ``[b, t]``, given ``[b, t, c, h, w]``."""
    return x.flatten(2).mean(dim=2)
