"""Losses of generator and critic against sums that are written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import checked
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.loss import critic_loss, dmd_direction, dmd_loss, sid_losses

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
    x, fake, c, u = (random(i) for i in (1, 2, 3, 4))
    for sample in range(SHAPE[0]):
        real = c[sample] + 3.0 * (c[sample] - u[sample])
        z = (x[sample] - real).abs().mean()
        torch.testing.assert_close(direction(x)[sample], (fake[sample] - real) / z)


def test_gradient_is_the_direction_on_new_frames_and_0_elsewhere() -> None:
    x = random(1).requires_grad_()
    d, mask = direction(x), new_frames()
    total, count, report = dmd_loss(x, direction=d, mask=mask)
    (total / count).backward()
    wanted = torch.zeros_like(d)
    wanted[:, OVERLAP:] = d[:, OVERLAP:] / (mask.sum() * ELEMENTS)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=1e-12)
    assert int(torch.count_nonzero(x.grad[:, :OVERLAP])) == 0
    expected = 0.5 * d[:, OVERLAP:].square().mean()
    torch.testing.assert_close(total.detach() / count, expected, rtol=0, atol=1e-12)
    assert report["generator loss"].tolist() == pytest.approx([float(total.detach()), 8])
    sizes = report["dmdtrain_gradient_norm"]
    assert float(sizes[0] / sizes[1]) == pytest.approx(float(d.abs().mean()), rel=1e-6)


def test_equal_scores_give_no_loss() -> None:
    x, same = random(1).requires_grad_(), random(2)
    d = dmd_direction(x, fake=same, conditional=same, unconditional=same, scale=4.0)
    assert int(torch.count_nonzero(d)) == 0
    total, _, _ = dmd_loss(x, direction=d, mask=new_frames())
    total.backward()
    assert float(total.detach()) == 0 and x.grad is not None
    assert int(torch.count_nonzero(x.grad)) == 0


def test_a_normaliser_of_0_gives_no_nan_and_nothing_huge() -> None:
    x = random(1)
    for fake in (x, random(2)):
        d = dmd_direction(x, fake=fake, conditional=x, unconditional=x, scale=4.0)
        assert int(torch.count_nonzero(d)) == 0


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    bad = random(3)
    bad[0, 5, 0, 0, 0] = torch.nan
    d = dmd_direction(random(1), fake=random(2), conditional=bad, unconditional=random(4), scale=4)
    total, _, _ = dmd_loss(random(1), direction=d, mask=new_frames())
    assert bool(total.isnan()) and bool(d[1].isfinite().all())


def test_guidance_is_in_the_usual_convention() -> None:
    """Add 3 to the conditional prediction, which is 4 from the unconditional one; 1 is none."""
    x, fake, c, u = (random(i) for i in (1, 2, 3, 4))
    assert StreamingConfig().guidance_scale == 4

    def by(real: Tensor) -> Tensor:
        return dmd_direction(x, fake=fake, conditional=real, unconditional=real, scale=1.0)

    torch.testing.assert_close(direction(x), by(u + 4 * (c - u)), rtol=0, atol=1e-12)
    torch.testing.assert_close(direction(x), by(c + 3 * (c - u)), rtol=0, atol=1e-12)
    assert torch.equal(direction(x, scale=1.0), by(c))


def test_the_normaliser_is_that_of_the_whole_clip() -> None:
    """Give blocks of a clip its loss and its gradient, by D of the clip, not of themselves."""
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


def test_critic_loss_of_the_true_flow_is_0() -> None:
    x, noise = random(1), random(5)
    total, count, _ = critic_loss(noise - x, latents=x, noise=noise, mask=new_frames())
    assert float(total) == 0 and int(count) == 8


def test_critic_loss_is_the_mean_over_masked_elements() -> None:
    x, noise = random(1).requires_grad_(), random(5)
    flow, mask = random(6).requires_grad_(), new_frames()
    total, count, report = critic_loss(flow, latents=x, noise=noise, mask=mask)
    loss = total / count
    elements = mask.view(*mask.shape, 1, 1, 1).expand(SHAPE)
    expected = (flow - (noise - x))[elements].square().mean()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    loss.backward()
    assert x.grad is None
    assert flow.grad is not None and int(torch.count_nonzero(flow.grad[:, :OVERLAP])) == 0
    assert report["critic loss"].tolist() == pytest.approx([float(total.detach()), 8])


def test_masked_frames_may_be_anything() -> None:
    x, flow = random(1), random(6)
    for bad in (x, flow):
        bad[:, 0] = torch.inf
    flow.requires_grad_()
    total, _, _ = critic_loss(flow, latents=x, noise=random(5), mask=new_frames())
    total.backward()
    assert bool(total.isfinite()) and flow.grad is not None and bool(flow.grad.isfinite().all())


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.2])
def test_score_identity_distillation_is_that_of_the_formula(alpha: float) -> None:
    x, fake, c, u = (random(i) for i in (1, 2, 3, 4))
    got = sid_losses(x, fake=fake, conditional=c, unconditional=u, scale=4.0, alpha=alpha)
    for sample in range(SHAPE[0]):
        real = c[sample] + 3.0 * (c[sample] - u[sample])
        z = (x[sample] - real).abs().mean()
        loss = (real - fake[sample]) * ((real - x[sample]) - alpha * (real - fake[sample])) / z
        torch.testing.assert_close(got[sample], loss.mean(dim=(1, 2, 3)))


def test_the_normaliser_of_score_identity_distillation_is_a_constant_and_may_be_0() -> None:
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
    """Make predictions from the flow by the definition of the path, x_t = (1 - s) x0 + s n."""
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


def test_losses_of_16_bits_are_summed_in_64() -> None:
    x = random(1, torch.bfloat16).requires_grad_()
    d = direction(x.detach().double())
    total, _, _ = dmd_loss(x, direction=d, mask=new_frames())
    assert total.dtype == torch.float64
    torch.testing.assert_close(
        total.detach() / 8, 0.5 * d[:, OVERLAP:].square().mean(), rtol=0, atol=1e-12
    )
    total.backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_losses_keep_the_contract() -> None:
    x, mask = random(1), new_frames()
    checked(lambda out: dmd_loss(out, direction=direction(x), mask=mask))(x)
    checked(lambda out: critic_loss(out, latents=x, noise=random(5), mask=mask))(x)


def test_inputs_that_do_not_fit_are_refused() -> None:
    x, mask = random(1), new_frames()
    with pytest.raises(ConfigError, match=r"`direction` has the shape \[2, 6, 2, 3, 4\]"):
        dmd_loss(x, direction=x[:, 1:], mask=mask)
    with pytest.raises(ConfigError, match=r"`mask` is torch.int64 \[2, 7\], but must be bool"):
        dmd_loss(x, direction=x, mask=mask.long())
    with pytest.raises(ConfigError, match=r"`mask` is torch.bool \[2, 6\]"):
        critic_loss(x, latents=x, noise=x, mask=mask[:, 1:])
    with pytest.raises(ConfigError, match="`noise` has the shape"):
        critic_loss(x, latents=x, noise=x[:1], mask=mask)
    with pytest.raises(ConfigError, match="`fake` has the shape"):
        dmd_direction(x, fake=x[:1], conditional=x, unconditional=x, scale=1)
