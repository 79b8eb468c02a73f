"""Two phases against one graph, counts of passes, and what gradients reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.loss import dmd_loss
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import WRITE_BACK, Generator
from megatron_ext.video.streaming.scores import generator_losses
from megatron_ext.video.streaming.sequence import StreamingSequence
from tests.video.streaming.network import OPTIONS, PLAIN, Cache, TinyDiT, Window, build, network

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
        exit_step = decisions.exit_steps(
            PLAIN, 1, clip.sequence, clip.number, blocks=blocks, steps=STEPS
        )[0]
        assert len(net.calls) == blocks * (exit_step + 2), number
        assert not any(with_graph for _, with_graph in net.calls)
        assert len(clip.blocks) == blocks and not clip.latents.requires_grad
        assert all(not b.step.x.requires_grad for b in clip.blocks)
        counts.add(exit_step)
        net.calls.clear()
    assert counts == set(range(STEPS))


def test_one_graph_has_it_in_exit_steps_only() -> None:
    sequence = build(dataclasses.replace(PLAIN, two_phase=False, last_step_only=True))
    net = tiny(sequence)
    clip = sequence.next_clip(trains_generator=True)
    assert [g for _, g in net.calls] == [False, False, False, True, False] * 3
    assert clip.latents.requires_grad and not clip.blocks
    net.calls.clear()
    clip = sequence.next_clip(trains_generator=False)
    assert not any(g for _, g in net.calls)
    assert not clip.latents.requires_grad and not clip.blocks


def block_by_block(net: TinyDiT, noises: dict[tuple[int, int], Tensor], exit_step: int) -> Tensor:
    """Return a clip of three blocks in one graph."""
    cache = Cache(Window(), 12, len(net.layers))
    generator = Generator(net, cache, NoiseSchedule(StreamingConfig()))
    text = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    made = [
        generator.generate(frame, text, lambda f, s: noises[f, s], exit_step=exit_step, graph=True)[
            0
        ]
        for frame in (0, 3, 6)
    ]
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
            for total, _, _ in reversed(list(generator_losses(clip, d, sequence))):
                (total / count).backward()
        else:
            (dmd_loss(clip.latents, direction=d, mask=clip.mask)[0] / count).backward()
    assert not any(x.requires_grad for x in cached(sequence))
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("same_exit", [True, False])
def test_two_phases_have_the_gradients_of_one_graph(same_exit: bool) -> None:
    """Compare over a sequence with a full cache, and a switch inside a clip."""
    base = dataclasses.replace(OPTIONS, switch_frames=(12,), same_exit_across_blocks=same_exit)
    two = losses_of(build(base), 4)
    one = losses_of(build(dataclasses.replace(base, two_phase=False)), 4)
    assert len(two) == len(one) == len(list(network(Window()).parameters()))
    for a, b in zip(two, one, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_capacity_that_is_needed() -> None:
    """Check that every block finds its past with W + clip - block frames, and not with fewer."""
    losses_of(build(PLAIN, capacity=6 + 9 - 3), 4)
    for less in (6 + 9 - 6, 6 + 9 - 4):
        with pytest.raises(ConfigError, match=r"must be 12 or more to train chunks of 9 new"):
            build(PLAIN, capacity=less)


def test_blocks_of_an_older_clip_are_not_run_again() -> None:
    sequence = build(PLAIN)
    old = sequence.next_clip(trains_generator=True)
    losses = generator_losses(old, torch.zeros_like(old.latents), sequence)
    next(losses)
    sequence.next_clip(trains_generator=False)
    with pytest.raises(ConfigError, match="chunk 0 of sequence 0 cannot be run again"):
        next(losses)


def test_text_projections_are_trained() -> None:
    sequence = build(PLAIN)
    losses_of(sequence, 1)
    for layer in tiny(sequence).layers:
        gradient = layer.text_kv.weight.grad
        assert gradient is not None and bool(gradient.abs().sum() > 0)


def test_frames_before_a_switch_get_no_gradient() -> None:
    options = dataclasses.replace(OPTIONS, switch_frames=(12,), two_phase=False)
    sequence = build(options)
    sequence.next_clip(trains_generator=True)
    clip = sequence.next_clip(trains_generator=True)
    clip.latents.retain_grad()
    d = torch.ones_like(clip.latents).detach()
    dmd_loss(clip.latents, direction=d, mask=clip.mask)[0].backward()
    assert clip.latents.grad is not None
    assert (
        clip.latents.grad.flatten(2).abs().sum(dim=2)[0].bool().tolist() == [False] * 6 + [True] * 3
    )


def test_each_step_has_noise_of_its_own() -> None:
    asked: list[tuple[int, int]] = []
    net = network(Window())
    schedule = NoiseSchedule(StreamingConfig(context_noise=50.0))
    generator = Generator(net, Cache(Window(), 12, 2), schedule)

    def noise(frame: int, step: int) -> Tensor:
        asked.append((frame, step))
        return torch.randn(1, 3, 2, 2, 2).double()

    text = torch.zeros(1, 3, 4).double()
    for frame in (0, 3):
        generator.generate(frame, text, noise, exit_step=3, graph=False)
    assert asked == [(f, s) for f in (0, 3) for s in (0, 1, 2, 3, WRITE_BACK)]


def test_a_perfect_network_gives_back_the_latents() -> None:
    """Check that every exit step predicts the same clean latents."""
    truth = torch.linspace(-1, 1, 24).view(1, 3, 2, 2, 2).double()
    schedule = NoiseSchedule(StreamingConfig())
    told = []

    def net(*, x: Tensor, timesteps: Tensor, **_: object) -> Tensor:
        told.append(float(timesteps[0, 0]))
        sigma = schedule.sigma(timesteps)[:, :, None, None, None]
        return (x - truth) / sigma

    generator = Generator(net, Cache(Window(), 12, 2), schedule)
    text = torch.zeros(1, 3, 4)
    for exit_step in range(4):
        told.clear()
        x0, step = generator.generate(
            0, text, lambda *_: torch.randn(1, 3, 2, 2, 2).double(), exit_step=exit_step, graph=True
        )
        torch.testing.assert_close(x0, truth, rtol=0, atol=1e-12)
        expected = [1000, 937.5, 833.3333, 625][: exit_step + 1]
        assert told == pytest.approx([*expected, 0], abs=1e-3)
        assert step.timestep == pytest.approx(expected[-1], abs=1e-3)
