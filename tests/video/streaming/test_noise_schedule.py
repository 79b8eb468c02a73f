"""The noise table against published figures and against plain arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.video.loss import flow_from_x0, x0_from_flow
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule, mixed

SCHEDULE = NoiseSchedule(StreamingConfig())


def table() -> torch.Tensor:
    """Return the table by the formula."""
    lin = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    return 5 * lin / (1 + 4 * lin)


def schedule(**changes: object) -> NoiseSchedule:
    return NoiseSchedule(StreamingConfig(**changes))


def test_steps_and_the_sigma_of_timestep_0() -> None:
    expected = [1000, 937.5, 833.3333, 625]
    assert SCHEDULE.denoising_timesteps == pytest.approx(expected, abs=1e-3)
    assert float(SCHEDULE.sigma(torch.tensor(0.0))) == pytest.approx(0.004980, abs=5e-7)


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
@pytest.mark.parametrize("exit_step", [0, 1, 3])
def test_exit_steps_bound_the_timesteps_of_scores(warp: bool, exit_step: int) -> None:
    """Count steps before the shift, from the step after the exit step to the exit step itself."""
    own = schedule(warp_denoising_steps=warp, min_timestep=1e-3, max_timestep=1000.0)
    steps = own.denoising_timesteps
    low = nearest_step(steps[exit_step + 1]) if exit_step < 3 else 0
    high = nearest_step(steps[exit_step])
    if warp:
        assert (low, high) == ({0: 750, 1: 500, 3: 0}[exit_step], 1000 - 250 * exit_step)
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
    assert torch.equal(
        NoiseSchedule(both).score_timesteps(uniforms), own.score_timesteps(uniforms)
    ), "blocks with exit steps of their own leave all timesteps"


def test_the_table_is_that_of_the_specification() -> None:
    torch.testing.assert_close(SCHEDULE.sigmas, table(), rtol=0, atol=1e-15)


def test_sigma_is_that_of_the_nearest_entry() -> None:
    timesteps = torch.rand(500, generator=torch.Generator().manual_seed(0)) * 1000
    timesteps = torch.cat([timesteps, torch.tensor([0.0, 1000.0, 20.0, 980.0, 2000.0])])
    nearest = (table() * 1000 - timesteps.double()[:, None]).abs().argmin(dim=1)
    sigma = SCHEDULE.sigma(timesteps.view(5, 101))
    torch.testing.assert_close(sigma.view(-1), table()[nearest], rtol=0, atol=1e-15)
    assert sigma.shape == (5, 101)


def test_every_step_of_the_generator_is_an_entry() -> None:
    """Compare in float32, as networks are told."""
    steps = torch.tensor(SCHEDULE.denoising_timesteps, dtype=torch.float32)
    expected = torch.tensor([1, 0.9375, 2.5 / 3, 0.625], dtype=torch.float64)
    torch.testing.assert_close(SCHEDULE.sigma(steps), expected, rtol=0, atol=1e-15)


def test_steps_that_are_not_warped_are_timesteps() -> None:
    plain = schedule(warp_denoising_steps=False, denoising_steps=(1000, 500))
    assert plain.denoising_timesteps == (1000, 500)


def test_context_noise_is_what_it_says() -> None:
    assert SCHEDULE.context_sigma() == SCHEDULE.context_sigma(recached=True) == 0
    noised = schedule(context_noise=100.0)
    expected = float(noised.sigma(torch.tensor(100.0)))
    assert noised.context_sigma() == noised.context_sigma(recached=True) == expected
    original = schedule(context_noise_from_table=True)
    assert original.context_sigma() == pytest.approx(0.004980, abs=5e-7)
    assert original.context_sigma(recached=True) == 0


def test_conversions_of_frames_are_inverse_to_each_other() -> None:
    x0, noise = torch.randn(2, 2, 3, 4, 5, 5, dtype=torch.float64).unbind(0)
    t = torch.tensor([[20.0, 500.0, 980.0], [1000.0, 4.98, 333.0]])
    sigma = SCHEDULE.sigma(t)
    x_t, flow = SCHEDULE.add_noise(x0, noise, t), noise - x0
    for i, f in ((i, f) for i in range(2) for f in range(3)):
        s = float(sigma[i, f])
        torch.testing.assert_close(x_t[i, f], (1 - s) * x0[i, f] + s * noise[i, f])
    torch.testing.assert_close(x0_from_flow(x_t, flow, sigma), x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(flow_from_x0(x_t, x0, sigma), flow, rtol=0, atol=1e-12)
    one = mixed(x0, noise, torch.tensor(0.25, dtype=torch.float64))
    torch.testing.assert_close(one, 0.75 * x0 + 0.25 * noise)


def test_noise_of_a_sample_is_that_of_all_its_frames() -> None:
    x0, noise = torch.randn(2, 2, 3, 2, 2, 2).unbind(0)
    t = torch.tensor([100.0, 900.0])
    of_frames = SCHEDULE.add_noise(x0, noise, t[:, None].expand(2, 3))
    assert torch.equal(SCHEDULE.add_noise(x0, noise, t), of_frames)


def test_precision_of_16_bit_latents() -> None:
    """Check that latents are rounded once, not at every step."""
    x = torch.randn(1, 1, 1, 8, 8).bfloat16()
    flow, sigma = torch.randn(1, 1, 1, 8, 8), SCHEDULE.sigma(torch.tensor([700.0]))
    exact = x.double() - float(sigma) * flow.double()
    assert torch.equal(x0_from_flow(x, flow, sigma), exact.bfloat16())
