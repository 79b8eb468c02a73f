"""A teacher whose score is known, to prove that training converges, and a distance to measure it.

Each latent frame is drawn by itself from a mixture of Gaussians with independent features.
"""

import math

import torch
from torch import Tensor, nn

from megatron_ext.video.loss import spread
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule


class MixtureTeacher(nn.Module):
    """A flow network for latents of a known distribution; it has no parameters.

    With x_t = (1 - s) x0 + s noise and x0 from component k, of mean m and variance v in every
    feature, x_t has the mean (1 - s) m and the variance (1 - s)² v + s², and

        E[x0 | x_t, k] = m + (1 - s) v / ((1 - s)² v + s²) * (x_t - (1 - s) m).

    Clean latents are the mean of these, by the components' probabilities given x_t. The ``means``
    are ``[k, c, h, w]``, and ``deviation`` is that of every feature in a component.
    """

    means: Tensor

    def __init__(self, means: Tensor, deviation: float, schedule: NoiseSchedule) -> None:
        super().__init__()
        self.register_buffer("means", means.double(), persistent=False)
        self.variance, self.schedule = deviation**2, schedule

    def forward(self, *, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """Return the flow of ``x`` ``[b, t, c, h, w]`` at timesteps ``[b]`` or ``[b, t]``."""
        sigma = self.schedule.sigma(timesteps)
        x0 = self.clean(x.double(), sigma)
        return ((x.double() - x0) / spread(sigma, x)).to(x.dtype)

    def clean(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the expected clean latents given noised ones, both ``[b, t, c, h, w]`` float64."""
        s = sigma.view(*sigma.shape, *[1] * (6 - sigma.dim()))  # [b, t, k, c, h, w]
        variance = (1 - s) ** 2 * self.variance + s**2
        offset = x.unsqueeze(2) - (1 - s) * self.means
        energy = (offset.square() / (2 * variance)).flatten(3).sum(dim=3)
        share = torch.softmax(-energy, dim=2).view(*energy.shape, 1, 1, 1)
        x0 = self.means + (1 - s) * self.variance / variance * offset
        return (share * x0).sum(dim=2)

    def sample(self, num_frames: int, generator: torch.Generator) -> Tensor:
        """Draw frames of the distribution, ``[num_frames, c, h, w]`` float64."""
        device = self.means.device
        which = torch.randint(len(self.means), (num_frames,), generator=generator, device=device)
        size = (num_frames, *self.means.shape[1:])
        normals = torch.randn(size, generator=generator, dtype=torch.float64, device=device)
        return self.means[which] + math.sqrt(self.variance) * normals


def sliced_wasserstein(
    a: Tensor, b: Tensor, generator: torch.Generator, *, projections: int = 128
) -> float:
    """Return the sliced Wasserstein distance of order 2 of two sets of samples (arXiv:1902.00434).

    Over random directions, it is the root mean square of the distances of the sorted projections.
    """
    a, b = a.double().flatten(1), b.double().flatten(1)
    size = (a.size(1), projections)
    directions = torch.randn(size, generator=generator, dtype=torch.float64, device=a.device)
    directions /= directions.norm(dim=0, keepdim=True)
    difference = (a @ directions).sort(dim=0).values - (b @ directions).sort(dim=0).values
    return float(difference.square().mean().sqrt())
