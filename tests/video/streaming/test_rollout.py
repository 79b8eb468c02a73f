"""Two phases against one graph, predictions about clips, and what gradients reach."""

import dataclasses
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.loss import (
    Scores,
    critic_clip_loss,
    dmd_direction,
    dmd_loss,
    generator_direction,
    generator_losses,
    noised_clip,
    sid_direction,
)
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import WRITE_BACK, Generator, StreamClip
from megatron_ext.video.streaming.sequence import StreamingSequence
from tests.video.streaming.network import (
    ALONE,
    OPTIONS,
    PLAIN,
    Cache,
    TinyDiT,
    Window,
    build,
    network,
)

STEPS = len(NoiseSchedule(StreamingConfig()).denoising_timesteps)


def tiny(sequence: StreamingSequence) -> TinyDiT:
    net = sequence.generator.network
    assert isinstance(net, TinyDiT)
    return net


def cached(sequence: StreamingSequence) -> Iterator[Tensor]:
    cache = sequence.generator.cache
    assert isinstance(cache, Cache)
    return (x for layers in cache.held.values() for kv in layers for x in kv)


def test_forward_passes_and_graphs_of_a_clip() -> None:
    counts = set()
    sequence = build(PLAIN)
    net = tiny(sequence)
    for number in range(8):
        clip = sequence.next_clip(trains_generator=True)
        blocks = (clip.end - clip.first_new) // 3
        asked = PLAIN, 1, clip.sequence, clip.number
        exit_step = decisions.exit_steps(*asked, blocks=blocks, steps=STEPS)[0]
        assert len(net.calls) == blocks * (exit_step + 2), number
        assert not any(with_graph for _, with_graph in net.calls)
        assert len(clip.blocks) == blocks and not clip.latents.requires_grad
        assert all(not b.x.requires_grad for b in clip.blocks)
        counts.add(exit_step)
        net.calls.clear()
    assert counts == set(range(STEPS))
    sequence = build(dataclasses.replace(PLAIN, two_phase=False, last_step_only=True))
    net = tiny(sequence)
    clip = sequence.next_clip(trains_generator=True)
    assert [g for _, g in net.calls] == [False, False, False, True, False] * 3
    assert clip.latents.requires_grad and not clip.blocks
    net.calls.clear()
    clip = sequence.next_clip(trains_generator=False)
    assert not any(g for _, g in net.calls)
    assert not clip.latents.requires_grad and not clip.blocks
    # Every block finds its past with W + clip - block frames.
    losses_of(build(PLAIN, capacity=6 + 9 - 3), 4)


def block_by_block(net: TinyDiT, noises: dict[tuple[int, int], Tensor], exit_step: int) -> Tensor:
    cache = Cache(Window(), 12, len(net.layers))
    generator = Generator(net, cache, NoiseSchedule(StreamingConfig()))
    text = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    how = {"noise": lambda f, s: noises[f, s], "exit_step": exit_step, "graph": True}
    made = [generator.generate(frame, text, **how)[0] for frame in (0, 3, 6)]
    assert not any(x.requires_grad for layers in cache.held.values() for kv in layers for x in kv)
    return torch.stack(made)


def test_a_block_is_a_constant_to_the_others() -> None:
    net = network(Window())
    noises = {(f, 0): torch.randn(1, 3, 2, 2, 2).double().requires_grad_() for f in (0, 3, 6)}
    for j in range(3):
        blocks = block_by_block(net, noises, exit_step=0)
        leaves = [noises[f, 0] for f in (0, 3, 6)]
        gradients = torch.autograd.grad(blocks[j].square().sum(), leaves, allow_unused=True)
        for i, gradient in enumerate(gradients):
            reached = gradient is not None and bool(gradient.count_nonzero())
            assert reached == (i == j)


def losses_of(sequence: StreamingSequence, clips: int) -> list[Tensor]:
    """Return the gradients of the generator after a generator loss on each of some clips."""
    net = tiny(sequence)
    for _ in range(clips):
        clip = sequence.next_clip(trains_generator=True)
        source = torch.Generator().manual_seed(clip.number)
        d = torch.randn(clip.latents.shape, generator=source, dtype=torch.float64)
        count = clip.mask.sum()
        if sequence.streaming.two_phase:
            # In any order, since blocks are independent.
            for total, _, _ in reversed(list(generator_losses(clip, d, sequence.generator))):
                (total / count).backward()
        else:
            (dmd_loss(clip.latents, direction=d, mask=clip.mask)[0] / count).backward()
    assert not any(x.requires_grad for x in cached(sequence))
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("options", "same_exit"), [(OPTIONS, True), (OPTIONS, False), (ALONE, True)]
)
def test_two_phases_have_the_gradients_of_one_graph(
    options: StreamingConfig, same_exit: bool
) -> None:
    """Compare over a sequence with a full cache, and a switch inside a clip."""
    base = dataclasses.replace(options, switch_frames=(12,), same_exit_across_blocks=same_exit)
    two = losses_of(build(base), 4)
    one = losses_of(build(dataclasses.replace(base, two_phase=False)), 4)
    assert len(two) == len(one) == len(list(network(Window()).parameters()))
    for a, b in zip(two, one, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_each_step_has_noise_of_its_own_and_predicts_the_same_clean_latents() -> None:
    truth = torch.linspace(-1, 1, 24).view(1, 3, 2, 2, 2).double()
    schedule = NoiseSchedule(StreamingConfig(context_noise=50.0))
    told: list[float] = []
    asked: list[tuple[int, int]] = []

    def net(*, x: Tensor, timesteps: Tensor, **_: object) -> Tensor:
        told.append(float(timesteps[0, 0]))
        return (x - truth) / schedule.sigma(timesteps)[:, :, None, None, None]

    def noise(frame: int, step: int) -> Tensor:
        asked.append((frame, step))
        return torch.randn(1, 3, 2, 2, 2).double()

    generator = Generator(net, Cache(Window(), 12, 2), schedule)
    for exit_step in range(4):
        told.clear()
        asked.clear()
        how = {"exit_step": exit_step, "graph": True}
        x0, step = generator.generate(0, torch.zeros(1, 3, 4), noise, **how)
        torch.testing.assert_close(x0, truth, rtol=0, atol=1e-12)
        expected = [1000, 937.5, 833.3333, 625][: exit_step + 1]
        assert told == pytest.approx([*expected, 50], abs=1e-3)
        assert step.timestep == pytest.approx(expected[-1], abs=1e-3)
        assert asked == [(0, s) for s in (*range(exit_step + 1), WRITE_BACK)]


SCHEDULE = NoiseSchedule(StreamingConfig())
NEGATIVE = torch.full((1, 3, 4), 0.5, dtype=torch.float64)


def clip_of(number: int = 0) -> StreamClip:
    sequence = build(dataclasses.replace(OPTIONS, switches=False))
    return [sequence.next_clip(trains_generator=True) for _ in range(number + 1)][-1]


def test_a_clip_has_one_noise_level_and_noise_of_its_own() -> None:
    clip = clip_of()
    noised = noised_clip(clip, SCHEDULE, 1, "generator")
    assert noised.timesteps.shape == (2,) and len(noised.timesteps.unique()) == 2
    s = noised.sigma.view(2, 1, 1, 1, 1)
    torch.testing.assert_close(noised.x, (1 - s) * clip.latents + s * noised.noise)
    torch.testing.assert_close(noised.sigma, SCHEDULE.sigma(noised.timesteps))
    uses = list(product((1, 2), ("critic", "generator")))
    clips = (clip_of(0), clip_of(1), clip_of(1))
    drawn = [[noised_clip(clip, SCHEDULE, *use).noise for use in uses] for clip in clips]
    torch.testing.assert_close(drawn[1], drawn[2], rtol=0, atol=0)
    assert len({float(x[0, 0, 0, 0, 0]) for x in (*drawn[0], *drawn[1])}) == 8


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_direction_of_networks(scale: float) -> None:
    """Check that the teacher's two predictions in one batch are those of two calls."""
    clip, critic, teacher = clip_of(), network(seed=1), network(seed=2)
    noised = noised_clip(clip, SCHEDULE, 1, "generator")

    def clean(net: object, text: Tensor) -> Tensor:
        flow = net(x=noised.x, timesteps=noised.timesteps, text=text)  # type: ignore[operator]
        return x0_from_flow(noised.x, flow, noised.sigma)

    got = generator_direction(clip, noised, Scores(critic, teacher, NEGATIVE, guidance_scale=scale))
    assert len(teacher.calls) == 1 and not got.requires_grad
    own, negative = clean(teacher, clip.text), clean(teacher, NEGATIVE.expand(2, 3, 4))
    given = {"fake": clean(critic, clip.text), "conditional": own, "unconditional": negative}
    wanted = dmd_direction(clip.latents, **given, scale=scale)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("two_phase", [True, False])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_score_identity_distillation_is_plain_autograd(scale: float, two_phase: bool) -> None:
    sequence = build(dataclasses.replace(PLAIN, two_phase=two_phase))
    generator, critic, teacher = sequence.generator.network, network(seed=1), network(seed=2)
    assert isinstance(generator, torch.nn.Module)
    sequence.next_clip(trains_generator=False)
    clip = sequence.next_clip(trains_generator=True)
    noised, alpha = noised_clip(clip, SCHEDULE, 1, "generator"), 1.2
    scores = Scores(critic, teacher, NEGATIVE, guidance_scale=scale, sid_alpha=alpha)
    direction, losses = sid_direction(clip, noised, scores)
    frozen = [*critic.parameters(), *teacher.parameters()]
    assert all(p.grad is None and p.requires_grad for p in frozen)
    count = int(clip.mask.sum())
    if two_phase:
        for total, _, _ in generator_losses(clip, direction, sequence.generator, losses):
            (total / count).backward()
    else:
        total, _, _ = dmd_loss(clip.latents, direction=direction, mask=clip.mask, losses=losses)
        (total / count).backward(retain_graph=True)
    found = [p.grad.clone() for p in generator.parameters() if p.grad is not None]
    generator.zero_grad()

    x = clip.latents.detach().clone()
    if two_phase:
        for block in clip.blocks:
            x[:, clip.frames_of(block)] = sequence.generator.clean(block)
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


def test_who_is_trained_by_what_and_told_the_current_prompt() -> None:
    sequence = build()
    generator = sequence.generator.network
    assert isinstance(generator, torch.nn.Module)
    critic, teacher = network(seed=1), network(seed=2)
    before = [p.detach().clone() for p in teacher.parameters()]
    clip = sequence.next_clip(trains_generator=True)
    noised = noised_clip(clip, SCHEDULE, 1, "generator")
    direction = generator_direction(clip, noised, Scores(critic, teacher, NEGATIVE))
    for total, _, _ in generator_losses(clip, direction, sequence.generator):
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
    told = []

    def critic(*, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        told.append(text)
        return torch.zeros_like(x)

    clip = clip_of()
    critic_clip_loss(clip, noised_clip(clip, SCHEDULE, 1, "critic"), critic)
    assert torch.equal(told[0], clip.text)
