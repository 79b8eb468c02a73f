"""Score identity distillation and the critic's denoising losses against plain formulas."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.video.streaming.loss import DMDConfig, critic_loss, dmd_loss, sid_losses
from tests.video.streaming.test_loss import ELEMENTS, OVERLAP, SHAPE, new_frames, random


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.2])
def test_the_loss_of_frames_is_that_of_the_formula(alpha: float) -> None:
    x, fake, c, u = (random(i) for i in (1, 2, 3, 4))
    got = sid_losses(x, fake=fake, conditional=c, unconditional=u, scale=4.0, alpha=alpha)
    for sample in range(SHAPE[0]):
        real = c[sample] + 3.0 * (c[sample] - u[sample])
        z = (x[sample] - real).abs().mean()
        loss = (real - fake[sample]) * ((real - x[sample]) - alpha * (real - fake[sample])) / z
        torch.testing.assert_close(got[sample], loss.mean(dim=(1, 2, 3)))


def test_the_normaliser_is_a_constant_and_may_be_0() -> None:
    x = random(1).requires_grad_()
    losses = sid_losses(x, fake=x * 0.5, conditional=x, unconditional=x, scale=4.0, alpha=1.0)
    losses.sum().backward()
    assert int(torch.count_nonzero(losses)) == 0
    assert x.grad is not None and int(torch.count_nonzero(x.grad)) == 0


def test_a_loss_with_given_values_has_the_given_gradient() -> None:
    x, slope, mask = random(1).requires_grad_(), random(2), new_frames()
    values = random(3).mean(dim=(2, 3, 4))
    values[:, 0] = torch.nan  # of frames that do not count
    total, count, report = dmd_loss(x, direction=slope, mask=mask, losses=values)
    (total / count).backward()
    wanted = torch.zeros_like(slope)
    wanted[:, OVERLAP:] = slope[:, OVERLAP:] / (mask.sum() * ELEMENTS)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(total.detach() / count, values[:, OVERLAP:].mean())
    assert report["generator loss"].tolist() == pytest.approx([float(total.detach()), 8])


@pytest.mark.parametrize("kind", ["flow", "x0", "noise", "v"])
def test_the_critics_loss_compares_what_its_kind_says(kind: str) -> None:
    """Predictions are made of the flow by the definition of the path, x_t = (1 - s) x0 + s n."""
    x0, noise, flow, mask = random(1), random(5), random(6), new_frames()
    sigma = torch.tensor([0.3, 0.9], dtype=torch.float64)
    s = sigma.view(2, 1, 1, 1, 1)
    x_t = (1 - s) * x0 + s * noise
    x0_seen, noise_seen = x_t - s * flow, x_t + (1 - s) * flow
    # The path of constant variance with this ratio of signal and noise, and its v.
    signal = (1 - s) ** 2 / ((1 - s) ** 2 + s**2)
    pairs = {
        "flow": (flow, noise - x0),
        "x0": (x0_seen, x0),
        "noise": (noise_seen, noise),
        "v": (
            signal.sqrt() * noise_seen - (1 - signal).sqrt() * x0_seen,
            signal.sqrt() * noise - (1 - signal).sqrt() * x0,
        ),
    }
    total, count, _ = critic_loss(flow, latents=x0, noise=noise, mask=mask, kind=kind, sigma=sigma)
    seen, wanted = pairs[kind]
    expected = (seen - wanted).square()[:, OVERLAP:].mean()
    torch.testing.assert_close(total / count, expected)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`sid_alpha` \(nan\) must be finite; 1 is usual"):
        DMDConfig(sid_alpha=float("nan"))
    with pytest.raises(ConfigError, match=r"`distribution_loss` \(kl\) must be one of dmd, sid"):
        DMDConfig(distribution_loss="kl")
    with pytest.raises(ConfigError, match=r"`denoising_loss` \(x\) must be one of flow, x0"):
        DMDConfig(denoising_loss="x")
