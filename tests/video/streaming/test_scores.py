"""Predictions of networks about a clip, and which network gets a gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.loss import dmd_direction, dmd_loss
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import StreamClip
from megatron_ext.video.streaming.scores import (
    Scores,
    critic_clip_loss,
    generator_direction,
    generator_losses,
    noised_clip,
    sid_direction,
)
from tests.video.streaming.network import OPTIONS, PLAIN, build, network

SCHEDULE = NoiseSchedule(StreamingConfig())
NEGATIVE = torch.full((1, 3, 4), 0.5, dtype=torch.float64)


def clip_of(number: int = 0) -> StreamClip:
    sequence = build(dataclasses.replace(OPTIONS, switches=False))
    return [sequence.next_clip(trains_generator=True) for _ in range(number + 1)][-1]


def test_a_clip_has_one_noise_level_for_all_frames() -> None:
    clip = clip_of()
    noised = noised_clip(clip, SCHEDULE, 1, "generator")
    assert noised.timesteps.shape == (2,) and len(noised.timesteps.unique()) == 2
    s = noised.sigma.view(2, 1, 1, 1, 1)
    torch.testing.assert_close(noised.x, (1 - s) * clip.latents + s * noised.noise)
    torch.testing.assert_close(noised.sigma, SCHEDULE.sigma(noised.timesteps))


def test_noise_depends_on_clip_and_purpose_and_seed() -> None:
    first, second = clip_of(0), clip_of(1)
    assert torch.equal(
        noised_clip(first, SCHEDULE, 1, "critic").x, noised_clip(first, SCHEDULE, 1, "critic").x
    )
    noises = [
        noised_clip(clip, SCHEDULE, seed, purpose).noise
        for clip in (first, second)
        for seed in (1, 2)
        for purpose in ("critic", "generator")
    ]
    assert len({float(x[0, 0, 0, 0, 0]) for x in noises}) == 8


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_direction_of_networks(scale: float) -> None:
    """Check that the teacher's two predictions in one batch are those of two calls."""
    clip, critic, teacher = clip_of(), network(seed=1), network(seed=2)
    noised = noised_clip(clip, SCHEDULE, 1, "generator")

    def clean(net: object, text: Tensor) -> Tensor:
        flow = net(x=noised.x, timesteps=noised.timesteps, text=text)  # type: ignore[operator]
        return x0_from_flow(noised.x, flow, noised.sigma)

    got = generator_direction(
        clip,
        noised,
        Scores(critic, teacher, NEGATIVE, guidance_scale=scale),
    )
    assert len(teacher.calls) == 1 and not got.requires_grad
    wanted = dmd_direction(
        clip.latents,
        fake=clean(critic, clip.text),
        conditional=clean(teacher, clip.text),
        unconditional=clean(teacher, NEGATIVE.expand(2, 3, 4)),
        scale=scale,
    )
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("two_phase", [True, False])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_score_identity_distillation_is_plain_autograd(scale: float, two_phase: bool) -> None:
    """Compare with the loss written out over one graph."""
    sequence = build(dataclasses.replace(PLAIN, two_phase=two_phase))
    generator, critic, teacher = sequence.generator.network, network(seed=1), network(seed=2)
    assert isinstance(generator, torch.nn.Module)
    sequence.next_clip(trains_generator=False)
    clip = sequence.next_clip(trains_generator=True)
    noised, alpha = noised_clip(clip, SCHEDULE, 1, "generator"), 1.2
    scores = Scores(critic, teacher, NEGATIVE, guidance_scale=scale, sid_alpha=alpha)
    direction, losses = sid_direction(clip, noised, scores)
    assert all(
        p.grad is None and p.requires_grad for n in (critic, teacher) for p in n.parameters()
    )

    count = int(clip.mask.sum())
    if two_phase:
        for total, _, _ in generator_losses(clip, direction, sequence, losses):
            (total / count).backward()
    else:
        total, _, _ = dmd_loss(clip.latents, direction=direction, mask=clip.mask, losses=losses)
        (total / count).backward(retain_graph=True)
    found = [p.grad.clone() for p in generator.parameters() if p.grad is not None]
    generator.zero_grad()

    x = clip.latents.detach().clone()
    if two_phase:
        for block in clip.blocks:
            x[:, block.frames] = sequence.generator.clean(block.step)
    else:
        x = clip.latents
    s = noised.sigma.view(-1, 1, 1, 1, 1)
    x_t = (1 - s) * x + s * noised.noise

    def clean(net: torch.nn.Module, text: Tensor) -> Tensor:
        return x_t - s * net(x=x_t, timesteps=noised.timesteps, text=text)

    fake, real = clean(critic, clip.text), clean(teacher, clip.text)
    real = real + (scale - 1) * (real - clean(teacher, NEGATIVE.expand(2, 3, 4)))
    z = (x - real).detach().abs().mean(dim=(1, 2, 3, 4), keepdim=True)
    elements = clip.mask.view(*clip.mask.shape, 1, 1, 1).expand_as(x)
    loss = ((real - fake) * (real - x - alpha * (real - fake)) / z)[elements].mean()
    torch.testing.assert_close(losses[clip.mask].mean(), loss.detach())
    loss.backward()
    wanted = [p.grad for p in generator.parameters() if p.grad is not None]
    assert len(found) == len(wanted) > 10
    for gradient, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-12)


def test_who_is_trained_by_what() -> None:
    sequence = build()
    generator = sequence.generator.network
    assert isinstance(generator, torch.nn.Module)
    critic, teacher = network(seed=1), network(seed=2)
    before = [p.detach().clone() for p in teacher.parameters()]
    clip = sequence.next_clip(trains_generator=True)
    noised = noised_clip(clip, SCHEDULE, 1, "generator")
    direction = generator_direction(clip, noised, Scores(critic, teacher, NEGATIVE))
    for total, _, _ in generator_losses(clip, direction, sequence):
        total.backward()
    assert all(p.grad is not None for p in generator.parameters())
    assert all(p.grad is None for net in (critic, teacher) for p in net.parameters())
    generator.zero_grad()

    clip = sequence.next_clip(trains_generator=False)
    total, count, _ = critic_clip_loss(clip, noised_clip(clip, SCHEDULE, 1, "critic"), critic)
    (total / count).backward()
    assert all(p.grad is not None for p in critic.parameters())
    assert all(p.grad is None for net in (generator, teacher) for p in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))


def test_the_critic_knows_the_current_prompt() -> None:
    told = []

    def critic(*, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        told.append(text)
        return torch.zeros_like(x)

    clip = clip_of()
    critic_clip_loss(clip, noised_clip(clip, SCHEDULE, 1, "critic"), critic)
    assert torch.equal(told[0], clip.text)
