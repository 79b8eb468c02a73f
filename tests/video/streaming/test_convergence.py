"""A teacher whose score is known, a distance of distributions, and a generator that learns them."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.streaming_convergence import Settings, follow
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from tests.ranks import ranks
from tests.video.streaming.analytic import MixtureTeacher, sliced_wasserstein

SCHEDULE = NoiseSchedule(StreamingConfig())
MEANS = torch.tensor([[2.0, 1.0], [-1.0, 0.5], [0.0, -2.0]]).view(3, 2, 1, 1)
TEXT = torch.empty(0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("t", [300.0, 700.0, 980.0])
def test_clean_latents_are_the_mean_of_samples_that_lead_there(t: float) -> None:
    """Weigh samples with the probability of x_t given each, which gives E[x0 | x_t]."""
    teacher = MixtureTeacher(MEANS, 0.5, SCHEDULE)
    x0 = teacher.sample(50_000, seeded(1)).flatten(1)
    x_t = torch.tensor([[0.5, 0.2], [1.0, -1.0]], dtype=torch.float64)
    timesteps = torch.tensor([t])
    s = float(SCHEDULE.sigma(timesteps))
    weights = torch.softmax(-(x_t[:, None] - (1 - s) * x0).square().sum(dim=2) / (2 * s**2), dim=1)
    x = x_t.view(1, 2, 2, 1, 1)
    flow = teacher(x=x, timesteps=timesteps, text=TEXT)
    got = x0_from_flow(x, flow, SCHEDULE.sigma(timesteps)).view(2, 2)
    torch.testing.assert_close(got, weights @ x0, rtol=0, atol=0.05)


def gaussian(mean: Tensor, deviation: float, seed: int, n: int = 5_000) -> Tensor:
    return mean + deviation * torch.randn(n, len(mean), generator=seeded(seed), dtype=torch.float64)


def test_distance_of_gaussians_is_that_of_the_formula() -> None:
    """Check W2² = (difference of means)² + (difference of deviations)² in each direction."""
    mean = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    a, b = gaussian(torch.zeros(3), 1.0, 1), gaussian(mean, 1.5, 2)
    want = math.sqrt(float(mean.square().sum()) / 3 + 0.25)
    got = sliced_wasserstein(a, b, seeded(0), projections=500)
    assert got == pytest.approx(want, rel=0.05)
    assert sliced_wasserstein(a, a.flip(0), seeded(0)) == pytest.approx(0, abs=1e-12)
    # The same mean and variance, but two modes.
    modes = torch.stack([a[:, 0].sign(), a[:, 1]], dim=1)
    assert sliced_wasserstein(a[:, :2], modes, seeded(0)) > 0.2


@ranks()
@pytest.mark.slow
def test_the_generator_learns_the_distribution_of_the_teacher(context: ParallelContext) -> None:
    """Train two networks of one layer, which leave the two components a little blurred."""
    course = follow(context, Settings(), steps=150, every=150)
    first, last = course.points
    assert course.fall >= 0.7, course.points
    assert last.of_means <= 0.5 * first.of_means
