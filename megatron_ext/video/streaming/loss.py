"""The losses of distribution matching distillation, for the generator and for the critic.

A generator is trained on D, the difference between the clean latents that a critic and a teacher
predict from noised clips of its videos (arXiv:2311.18828, arXiv:2405.14867); the critic is trained
to know the generator's videos. With X a clip, X_t the noised clip, f and r the clean latents that
critic and teacher predict from X_t:

    D   = (f - r) / mean|X - r|                                 (mean of each sample)
    L_G = 1/2 * mean over M of (X - stopgrad(X - D))²           dL_G / dX = D * M / |M|
    L_F = mean over M of (flow of the critic - (noise - X))²

Score identity distillation (arXiv:2404.04057) trains the generator by another loss, whose gradient
also goes through critic and teacher:

    L_S = mean over M of (r - f) * (r - X - alpha * (r - f)) / mean|X - r|

M are the frames that count: those that are new in the clip. The teacher is guided, r = u + w * (c -
u) with c and u its predictions under the prompt and under the negative prompt; w = 1 is the plain
prediction. LongLive adds ``3 * (c - u)`` to c, which is w = 4 here. D is a function of whole clips,
but given D, or dL_S / dX, losses are sums over frames, so that blocks of frames can be
micro-batches. Latents and D are whole and equal on all model-parallel ranks of a replica; nothing
here communicates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import Report, number_of_targets, pair
from megatron_ext.video.loss import spread


@torch.no_grad()
def dmd_direction(
    latents: Tensor, *, fake: Tensor, conditional: Tensor, unconditional: Tensor, scale: float
) -> Tensor:
    """Return D, along which generated clips leave the teacher's distribution.

    A sample that the teacher leaves as it is (its normaliser is 0) has no direction. Numbers that
    are not finite are passed on, for the training step to see.

    Args:
        latents: X, whole clips ``[b, t, c, h, w]``; the normaliser is their mean over all frames,
            also those that do not count.
        fake: clean latents that the critic predicts from the noised clip, as ``latents``.
        conditional: clean latents that the teacher predicts under the prompt.
        unconditional: the same under the negative prompt.
        scale: w of the guidance.

    Returns:
        ``[b, t, c, h, w]`` float64.

    Raises:
        ConfigError: predictions of another shape.
    """
    _check_shape("fake", fake, latents)
    real = _guided(latents, conditional, unconditional, scale)
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
    """Return L_S of each frame, with gradient; the other arguments are those of `dmd_direction`.

    The normaliser is a constant, and a sample that the teacher leaves as it is has no loss.

    Args:
        alpha: weight of the squared difference that is taken off.

    Returns:
        ``[b, t]`` float64.

    Raises:
        ConfigError: predictions of another shape.
    """
    _check_shape("fake", fake, latents)
    real = _guided(latents, conditional, unconditional, scale)
    gap, x = real - fake.double(), latents.double()
    return _by_frame(gap * (real - x - alpha * gap) / _distance(latents, real))


def _guided(latents: Tensor, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Return r, the teacher's prediction with guidance."""
    _check_shape("conditional", conditional, latents)
    _check_shape("unconditional", unconditional, latents)
    c, u = conditional.double(), unconditional.double()
    return c + (scale - 1) * (c - u)


@torch.no_grad()
def _distance(latents: Tensor, real: Tensor) -> Tensor:
    """Return mean|X - r| of each sample, ``[b, 1, 1, 1, 1]``; infinite where it is 0."""
    distance = (latents.double() - real).abs().flatten(1).mean(dim=1)
    distance = torch.where(distance == 0, torch.inf, distance)
    return distance.view(-1, *[1] * (latents.dim() - 1))


def dmd_loss(
    latents: Tensor, *, direction: Tensor, mask: Tensor, losses: Tensor | None = None
) -> tuple[Tensor, Tensor, Report]:
    """Return the generator's loss of clips, or of blocks of them, by the loss contract.

    The sum runs over frames and adds the means of their elements; the count is of frames, so that
    sum / count is L_G. Its value says nothing about convergence; the mean of |D| in the report
    does.

    Args:
        latents: X with gradient, ``[b, t, c, h, w]``.
        direction: D of `dmd_direction` for these frames, in the shape of ``latents``.
        mask: frames that count, bool ``[b, t]``.
        losses: one for each frame, ``[b, t]``, where the direction is the gradient of another loss
            than L_G, times the elements of a frame; they then give the value.

    Returns:
        Sum (float64), number of frames that count, and what to log: ``generator loss``, and
        ``dmdtrain_gradient_norm``, the mean of |D| over all frames given.

    Raises:
        ConfigError: shapes that do not fit.
    """
    _check_shape("direction", direction, latents)
    _check_mask(mask, latents)
    x, d = latents.double(), direction.double()
    # X - stopgrad(X - D), without the rounding of the difference: its gradient is D to the bit.
    if losses is None:
        error = torch.where(_spread(mask, x), x - x.detach() + d, 0.0)
        total = 0.5 * _by_frame(error.square()).sum()
    else:
        slope = torch.where(_spread(mask, x), (x - x.detach()) * d, 0.0)
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
) -> tuple[Tensor, Tensor, Report]:
    """Return the denoising loss of the critic on generated clips, by the loss contract.

    Its kind says what is compared: the ``flow``, the clean latents that follow from it (``x0``,
    whose error is sigma times that of the flow), the ``noise`` (1 - sigma times), or ``v`` of the
    path with the same ratio of signal and noise whose variance stays (sqrt((1 - sigma)² + sigma²)
    times).

    Args:
        flow: prediction of the critic for the noised clip, ``[b, t, c, h, w]``.
        latents: X, in the shape of ``flow``; no gradient reaches it.
        noise: in the shape of ``flow``.
        mask: frames that count, bool ``[b, t]``; all of them for the first stage of LongLive.
        kind: see above.
        sigma: noise level of the clip, ``[b]``; unused for ``flow``.

    Returns:
        Sum over frames of the means of their elements (float64), number of frames that count, and
        what to log: ``critic loss``.

    Raises:
        ConfigError: shapes that do not fit.
    """
    _check_shape("flow", flow, latents)
    _check_shape("noise", noise, latents)
    _check_mask(mask, latents)
    error = flow.double() - (noise.double() - latents.detach().double())
    if kind != "flow":
        assert sigma is not None
        error = error * spread(_share_of_flow(kind, sigma.double()), error)
    total = _by_frame(torch.where(_spread(mask, error), error, 0.0).square()).sum()
    count = number_of_targets(mask)
    return total, count, {"critic loss": pair(total, count)}


def _share_of_flow(kind: str, sigma: Tensor) -> Tensor:
    """Return the error of a prediction over the error of the flow that it follows from, ``[b]``."""
    if kind == "x0":
        return sigma
    return 1 - sigma if kind == "noise" else torch.hypot(1 - sigma, sigma)


def _by_frame(x: Tensor) -> Tensor:
    """Return the means of frames, ``[b, t]`` from ``[b, t, c, h, w]``."""
    return x.flatten(2).mean(dim=2)


def _spread(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


def _check_shape(name: str, x: Tensor, latents: Tensor) -> None:
    if x.shape != latents.shape:
        raise ConfigError(
            f"`{name}` has the shape {list(x.shape)}, but must be as the latents "
            f"({list(latents.shape)}); give the same frames of both."
        )


def _check_mask(mask: Tensor, latents: Tensor) -> None:
    if mask.shape != latents.shape[:2] or mask.dtype != torch.bool:
        raise ConfigError(
            f"`mask` is {mask.dtype} {list(mask.shape)}, but must be bool "
            f"{list(latents.shape[:2])}, one for each frame."
        )
