"""The noise table and the losses of generator and critic against sums that are written out."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_ext.losses.contract import checked
from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.loss import (
    _frozen,
    critic_loss,
    dmd_direction,
    dmd_loss,
    sid_losses,
)
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule, mixed

SHAPE = (2, 7, 2, 3, 4)
ELEMENTS = 2 * 3 * 4
OVERLAP = 3


def random(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def new_frames() -> Tensor:
    return (torch.arange(SHAPE[1]) >= OVERLAP).expand(SHAPE[:2])


def direction(x: Tensor, scale: float = 4.0) -> Tensor:
    return dmd_direction(
        x, fake=random(2), conditional=random(3), unconditional=random(4), scale=scale
    )


def test_direction_is_that_of_the_formula() -> None:
    """Add 3 to the conditional prediction, which is 4 from the unconditional one; 1 is none."""
    x, fake, c, u = (random(i) for i in (1, 2, 3, 4))
    assert StreamingConfig().guidance_scale == 4
    for sample in range(SHAPE[0]):
        real = u[sample] + 4.0 * (c[sample] - u[sample])
        z = (x[sample] - real).abs().mean()
        torch.testing.assert_close(direction(x)[sample], (fake[sample] - real) / z)
    unguided = dmd_direction(x, fake=fake, conditional=c, unconditional=c, scale=1.0)
    assert torch.equal(direction(x, scale=1.0), unguided)


@pytest.mark.parametrize("given", [False, True])
def test_gradient_is_the_direction_on_new_frames_and_0_elsewhere(given: bool) -> None:
    """Check it also for a loss whose values are given, of which some do not count."""
    x, mask = random(1).requires_grad_(), new_frames()
    d = random(2) if given else direction(x)
    values = random(3).mean(dim=(2, 3, 4))
    values[:, 0] = torch.nan
    losses = {"losses": values} if given else {}
    total, count, report = dmd_loss(x, direction=d, mask=mask, **losses)
    (total / count).backward()
    wanted = torch.zeros_like(d)
    wanted[:, OVERLAP:] = d[:, OVERLAP:] / (mask.sum() * ELEMENTS)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=1e-12)
    assert int(torch.count_nonzero(x.grad[:, :OVERLAP])) == 0
    mean = values[:, OVERLAP:].mean() if given else 0.5 * d[:, OVERLAP:].square().mean()
    torch.testing.assert_close(total.detach() / count, mean, rtol=0, atol=1e-12)
    assert report["generator loss"].tolist() == pytest.approx([float(total.detach()), 8])
    sizes = report["dmdtrain_gradient_norm"]
    assert float(sizes[0] / sizes[1]) == pytest.approx(float(d.abs().mean()), rel=1e-6)


def test_equal_scores_or_a_normaliser_of_0_give_no_loss() -> None:
    x, same = random(1).requires_grad_(), random(2)
    d = dmd_direction(x, fake=same, conditional=same, unconditional=same, scale=4.0)
    total, _, _ = dmd_loss(x, direction=d, mask=new_frames())
    total.backward()
    assert float(total.detach()) == 0 and x.grad is not None
    assert not d.any() and not x.grad.any()
    for fake in (x, same):
        assert not dmd_direction(x, fake=fake, conditional=x, unconditional=x, scale=4.0).any()
    x = random(1).requires_grad_()
    losses = sid_losses(x, fake=x * 0.5, conditional=x, unconditional=x, scale=4.0, alpha=1.0)
    losses.sum().backward()
    assert not losses.any() and x.grad is not None and not x.grad.any()


def test_masked_frames_may_be_anything_and_other_frames_hide_nothing() -> None:
    x, flow = random(1), random(6)
    for bad in (x, flow):
        bad[:, 0] = torch.inf
    flow.requires_grad_()
    total, _, _ = critic_loss(flow, latents=x, noise=random(5), mask=new_frames())
    total.backward()
    assert bool(total.isfinite()) and flow.grad is not None and bool(flow.grad.isfinite().all())
    bad = random(3)
    bad[0, 5, 0, 0, 0] = torch.nan
    d = dmd_direction(random(1), fake=random(2), conditional=bad, unconditional=random(4), scale=4)
    total, _, _ = dmd_loss(random(1), direction=d, mask=new_frames())
    assert bool(total.isnan()) and bool(d[1].isfinite().all())


def test_the_normaliser_is_that_of_the_whole_clip() -> None:
    """Give blocks of a clip its loss and gradient, by D of the clip, not of themselves."""
    mask = new_frames()
    whole, blocks = (random(1).requires_grad_() for _ in range(2))
    d = direction(whole)
    total, count, _ = dmd_loss(whole, direction=d, mask=mask)
    (total / count).backward()
    parts = []
    for part in (slice(0, 3), slice(3, 5), slice(5, 7)):
        loss, frames, _ = dmd_loss(blocks[:, part], direction=d[:, part], mask=mask[:, part])
        (loss / count).backward()
        parts.append((float(loss.detach()), int(frames)))
    assert sum(x for x, _ in parts) == pytest.approx(float(total.detach()), rel=1e-12)
    assert sum(n for _, n in parts) == int(count) == 8
    assert whole.grad is not None and blocks.grad is not None
    torch.testing.assert_close(blocks.grad, whole.grad, rtol=0, atol=1e-15)
    # The overlap is part of the normaliser, though it is no part of the loss.
    moved = random(1)
    moved[:, :OVERLAP] += 10
    ratio = (direction(moved) / d.detach())[:, OVERLAP:]
    assert bool((ratio < 0.7).all())


@pytest.mark.parametrize("kind", ["flow", "x0", "noise", "v"])
def test_the_critics_loss_compares_what_its_kind_says(kind: str) -> None:
    """Make predictions from the flow by the definition of the path, x_t = (1 - s) x0 + s n."""
    x0, noise, mask = random(1).requires_grad_(), random(5), new_frames()
    flow = random(6).requires_grad_()
    sigma = torch.tensor([0.3, 0.9], dtype=torch.float64)
    s = sigma.view(2, 1, 1, 1, 1)
    x_t = (1 - s) * x0 + s * noise
    x0_seen, noise_seen = x_t - s * flow, x_t + (1 - s) * flow
    # The path of constant variance with this ratio of signal and noise, and its v.
    signal = (1 - s) ** 2 / ((1 - s) ** 2 + s**2)

    def v(x0: Tensor, noise: Tensor) -> Tensor:
        return signal.sqrt() * noise - (1 - signal).sqrt() * x0

    pairs = {"flow": (flow, noise - x0), "x0": (x0_seen, x0), "noise": (noise_seen, noise)}
    pairs["v"] = v(x0_seen, noise_seen), v(x0, noise)
    loss = partial(critic_loss, latents=x0, noise=noise, mask=mask, kind=kind, sigma=sigma)
    total, count, report = loss(flow)
    seen, wanted = pairs[kind]
    expected = (seen - wanted).square()[:, OVERLAP:].mean()
    torch.testing.assert_close((total / count).detach(), expected.detach())
    assert report["critic loss"].tolist() == pytest.approx([float(total.detach()), 8])
    total.backward()
    assert x0.grad is None and flow.grad is not None and not flow.grad[:, :OVERLAP].any()
    assert float(loss(noise - x0)[0].detach()) == pytest.approx(0, abs=1e-20)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.2])
def test_score_identity_distillation_is_that_of_the_formula(alpha: float) -> None:
    x, fake, c, u = (random(i) for i in (1, 2, 3, 4))
    got = sid_losses(x, fake=fake, conditional=c, unconditional=u, scale=4.0, alpha=alpha)
    for sample in range(SHAPE[0]):
        real = c[sample] + 3.0 * (c[sample] - u[sample])
        z = (x[sample] - real).abs().mean()
        loss = (real - fake[sample]) * ((real - x[sample]) - alpha * (real - fake[sample])) / z
        torch.testing.assert_close(got[sample], loss.mean(dim=(1, 2, 3)))


def test_16_bits_are_summed_in_64_and_rounded_once_and_losses_keep_the_contract() -> None:
    x = random(1, torch.bfloat16).requires_grad_()
    d = direction(x.detach().double())
    total, _, _ = dmd_loss(x, direction=d, mask=new_frames())
    assert total.dtype == torch.float64
    wanted = 0.5 * d[:, OVERLAP:].square().mean()
    torch.testing.assert_close(total.detach() / 8, wanted, rtol=0, atol=1e-12)
    total.backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    x = torch.randn(1, 1, 1, 8, 8).bfloat16()
    flow, sigma = torch.randn(1, 1, 1, 8, 8), SCHEDULE.sigma(torch.tensor([700.0]))
    exact = x.double() - float(sigma) * flow.double()
    assert torch.equal(x0_from_flow(x, flow, sigma), exact.bfloat16())
    x, mask = random(1), new_frames()
    checked(lambda out: dmd_loss(out, direction=direction(x), mask=mask))(x)
    checked(lambda out: critic_loss(out, latents=x, noise=random(5), mask=mask))(x)


SCHEDULE = NoiseSchedule(StreamingConfig())


def table() -> torch.Tensor:
    lin = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    return 5 * lin / (1 + 4 * lin)


def schedule(**changes: object) -> NoiseSchedule:
    return NoiseSchedule(StreamingConfig(**changes))


def test_the_table_its_steps_and_its_nearest_entries() -> None:
    """Compare the steps in float32, as networks are told."""
    torch.testing.assert_close(SCHEDULE.sigmas, table(), rtol=0, atol=1e-15)
    assert SCHEDULE.denoising_timesteps == pytest.approx([1000, 937.5, 833.3333, 625], abs=1e-3)
    steps = torch.tensor(SCHEDULE.denoising_timesteps, dtype=torch.float32)
    expected = torch.tensor([1, 0.9375, 2.5 / 3, 0.625], dtype=torch.float64)
    torch.testing.assert_close(SCHEDULE.sigma(steps), expected, rtol=0, atol=1e-15)
    assert float(SCHEDULE.sigma(torch.tensor(0.0))) == pytest.approx(0.004980, abs=5e-7)
    plain = schedule(warp_denoising_steps=False, denoising_steps=(1000, 500))
    assert plain.denoising_timesteps == (1000, 500)
    timesteps = torch.rand(500, generator=torch.Generator().manual_seed(0)) * 1000
    timesteps = torch.cat([timesteps, torch.tensor([0.0, 1000.0, 20.0, 980.0, 2000.0])])
    nearest = (table() * 1000 - timesteps.double()[:, None]).abs().argmin(dim=1)
    sigma = SCHEDULE.sigma(timesteps.view(5, 101))
    torch.testing.assert_close(sigma.view(-1), table()[nearest], rtol=0, atol=1e-15)
    assert sigma.shape == (5, 101)


def test_timesteps_of_scores_are_clamped() -> None:
    uniforms = torch.arange(1000, dtype=torch.float64) / 1000
    timesteps = SCHEDULE.score_timesteps(uniforms)
    assert timesteps.dtype == torch.float32
    assert float(timesteps.min()) == 20 and float(timesteps.max()) == 980
    # u = 5 to 905 lie between the bounds; those are the table's entries 1000 - u.
    inside = timesteps[5:905].double() / 1000
    torch.testing.assert_close(inside, table().flip(0)[4:904], rtol=0, atol=1e-7)
    assert torch.equal(SCHEDULE.score_timesteps(uniforms + 0.0005), timesteps)


def nearest_step(timestep: float) -> int:
    """Count as Self-Forcing does: 1000 less the index of the nearest entry of the falling table."""
    return 1000 - int((table() * 1000 - timestep).abs().argmin())


@pytest.mark.parametrize("warp", [True, False])
@pytest.mark.parametrize("exit_step", [0, 1, 2, 3])
def test_exit_steps_bound_the_timesteps_of_scores(warp: bool, exit_step: int) -> None:
    """Count steps before the shift, from the step after the exit step to the exit step itself."""
    own = schedule(warp_denoising_steps=warp, min_timestep=1e-3, max_timestep=1000.0)
    steps = own.denoising_timesteps
    low = nearest_step(steps[exit_step + 1]) if exit_step < 3 else 0
    high = nearest_step(steps[exit_step])
    if warp:
        assert (low, high) == ((750, 500, 250, 0)[exit_step], 1000 - 250 * exit_step)
    uniforms = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def drawn(**options: bool) -> set[int]:
        streaming = dataclasses.replace(own.streaming, **options)
        found = NoiseSchedule(streaming).score_timesteps(uniforms, exit_step).double() / 1000
        return set((1000 * found / (5 - 4 * found)).round().int().tolist())

    for options, first, end in (
        ({"ts_schedule": True}, low, 1000),
        ({"ts_schedule_max": True}, 0, high),
        ({"ts_schedule": True, "ts_schedule_max": True}, low, high),
        ({}, 0, 1000),
    ):
        seen = drawn(**options)
        assert first <= min(seen) <= first + 10 and end - 10 <= max(seen) < end
    both = dataclasses.replace(own.streaming, ts_schedule=True, ts_schedule_max=True)
    found = NoiseSchedule(both).score_timesteps(uniforms)
    # Blocks with exit steps of their own leave all timesteps.
    assert torch.equal(found, own.score_timesteps(uniforms))


def test_denoising_steps_beside_each_other_leave_one_timestep() -> None:
    """Let two denoising steps have the same nearest entry of the table, the first."""
    own = schedule(
        warp_denoising_steps=False, denoising_steps=(1000, 4, 3), min_timestep=1e-3,
        ts_schedule=True, ts_schedule_max=True,
    )  # fmt: skip
    uniforms = torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64)
    assert own.score_timesteps(uniforms, 1).tolist() == pytest.approx([4.980] * 3, abs=1e-3)


def test_networks_are_frozen_for_a_while_and_those_that_were_stay_so() -> None:
    trained, frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="stop"), _frozen(trained, frozen, abs):
        assert not any(p.requires_grad for x in (trained, frozen) for p in x.parameters())
        raise ValueError("stop")
    assert all(p.requires_grad for p in trained.parameters())
    assert not any(p.requires_grad for p in frozen.parameters())


def test_context_noise_and_conversions_are_what_they_say() -> None:
    assert SCHEDULE.context_sigma() == SCHEDULE.context_sigma(recached=True) == 0
    noised = schedule(context_noise=100.0)
    expected = float(noised.sigma(torch.tensor(100.0)))
    assert noised.context_sigma() == noised.context_sigma(recached=True) == expected
    original = schedule(context_noise_from_table=True)
    assert original.context_sigma() == pytest.approx(0.004980, abs=5e-7)
    assert original.context_sigma(recached=True) == 0
    x0, noise = torch.randn(2, 2, 3, 4, 5, 5, dtype=torch.float64).unbind(0)
    t = torch.tensor([[20.0, 500.0, 980.0], [1000.0, 4.98, 333.0]])
    sigma = SCHEDULE.sigma(t)
    x_t, flow = SCHEDULE.add_noise(x0, noise, t), noise - x0
    for i, f in ((i, f) for i in range(2) for f in range(3)):
        s = float(sigma[i, f])
        torch.testing.assert_close(x_t[i, f], (1 - s) * x0[i, f] + s * noise[i, f])
    torch.testing.assert_close(x0_from_flow(x_t, flow, sigma), x0, rtol=0, atol=1e-12)
    one = mixed(x0, noise, torch.tensor(0.25, dtype=torch.float64))
    torch.testing.assert_close(one, 0.75 * x0 + 0.25 * noise)
    # A sample's noise is that of all its frames.
    of_frames = SCHEDULE.add_noise(x0, noise, t[:, :1].expand(2, 3))
    assert torch.equal(SCHEDULE.add_noise(x0, noise, t[:, 0]), of_frames)
