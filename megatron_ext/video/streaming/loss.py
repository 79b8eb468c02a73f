"""Distribution matching distillation: the generator's loss and the critic's.

A generator is trained on D, the difference between what a critic and a teacher take noised chunks
of its videos for (arXiv:2311.18828, arXiv:2405.14867); the critic is trained to know the
generator's videos. With X a chunk, X_t the chunk noised, f and r the clean latents that critic and
teacher see in X_t:

    D   = (f - r) / mean|X - r|                                 (mean of each sample)
    L_G = 1/2 * mean over M of (X - stopgrad(X - D))²           dL_G / dX = D * M / |M|
    L_F = mean over M of (flow of the critic - (noise - X))²

Score identity distillation (arXiv:2404.04057) trains the generator by another loss, whose gradient
goes through critic and teacher, too:

    L_S = mean over M of (r - f) * (r - X - alpha * (r - f)) / mean|X - r|

M are the frames that count, those that are new in the chunk. D is a function of whole chunks, but
given D, or dL_S / dX, losses are sums over frames, so that blocks of frames can be micro-batches.
Latents and D are whole and equal on all model-parallel ranks of a replica; nothing here speaks to
other ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import Report, number_of_targets, pair
from megatron_ext.video.loss import spread
from megatron_ext.video.streaming.config import DENOISING_LOSSES, DISTRIBUTION_LOSSES


@dataclass(frozen=True)
class DMDConfig:
    """Options of distribution matching.

    Attributes:
        guidance_scale: w of the teacher, ``u + w * (c - u)``; 1 is the plain prediction. LongLive
            adds ``3 * (c - u)`` to c, which is 4 here.
        distribution_loss: ``dmd`` (L_G) or ``sid`` (L_S).
        sid_alpha: alpha of L_S.
        denoising_loss: what the critic is to predict, see `critic_loss`.

    Raises:
        ConfigError: a number that is not finite, or an unknown loss.
    """

    guidance_scale: float = 4.0
    distribution_loss: str = "dmd"
    sid_alpha: float = 1.0
    denoising_loss: str = "flow"

    def __post_init__(self) -> None:
        if not math.isfinite(self.guidance_scale):
            raise ConfigError(
                f"`guidance_scale` ({self.guidance_scale}) must be finite; 1 turns guidance off."
            )
        if not math.isfinite(self.sid_alpha):
            raise ConfigError(f"`sid_alpha` ({self.sid_alpha}) must be finite; 1 is usual.")
        for name, known in (
            ("distribution_loss", DISTRIBUTION_LOSSES),
            ("denoising_loss", DENOISING_LOSSES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be one of {', '.join(known)}."
                )


@torch.no_grad()
def dmd_direction(
    latents: Tensor, *, fake: Tensor, conditional: Tensor, unconditional: Tensor, scale: float
) -> Tensor:
    """D, along which generated chunks leave the teacher's distribution.

    A sample that the teacher leaves as it is (its normaliser is 0) has no direction. Numbers that
    are not finite are passed on, for the training step to see.

    Args:
        latents: X, whole chunks ``[b, t, c, h, w]``; the normaliser is their mean over all of it,
            frames that do not count included.
        fake: clean latents that the critic sees in the noised chunk, as ``latents``.
        conditional: those that the teacher sees under the prompt.
        unconditional: those under the negative prompt.
        scale: see `DMDConfig.guidance_scale`.

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
    """L_S of each frame, with gradient; arguments as of `dmd_direction`.

    The normaliser is a constant, and a sample that the teacher leaves as it is has no loss.

    Args:
        alpha: see `DMDConfig.sid_alpha`.

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
    """What the teacher sees with guidance, r."""
    _check_shape("conditional", conditional, latents)
    _check_shape("unconditional", unconditional, latents)
    c, u = conditional.double(), unconditional.double()
    return c + (scale - 1) * (c - u)


@torch.no_grad()
def _distance(latents: Tensor, real: Tensor) -> Tensor:
    """mean|X - r| of each sample, ``[b, 1, 1, 1, 1]``; infinite where it is 0."""
    distance = (latents.double() - real).abs().flatten(1).mean(dim=1)
    distance = torch.where(distance == 0, torch.inf, distance)
    return distance.view(-1, *[1] * (latents.dim() - 1))


def dmd_loss(
    latents: Tensor, *, direction: Tensor, mask: Tensor, losses: Tensor | None = None
) -> tuple[Tensor, Tensor, Report]:
    """Generator loss of chunks, or of blocks of them, through the loss contract.

    The sum is over frames, of the means of their elements, and the count is of frames; sum / count
    is L_G. Its value says nothing about convergence; the mean of |D| in the report does.

    Args:
        latents: X with gradient, ``[b, t, c, h, w]``.
        direction: D of `dmd_direction` for these frames, as ``latents``.
        mask: frames that count, bool ``[b, t]``.
        losses: of the frames, ``[b, t]``, where the direction is the gradient of another loss than
            L_G, times the elements of a frame; the value is then theirs.

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
    """Denoising loss of the critic on generated chunks, through the loss contract.

    Its kind says what is compared: the ``flow``, the clean latents that follow from it (``x0``,
    whose error is sigma times that of the flow), the ``noise`` (1 - sigma times), or ``v`` of the
    path with the same ratio of signal and noise whose variance stays (sqrt((1 - sigma)² + sigma²)
    times).

    Args:
        flow: of the critic for the noised chunk, ``[b, t, c, h, w]``.
        latents: X, as ``flow``; no gradient reaches it.
        noise: as ``flow``.
        mask: frames that count, bool ``[b, t]``; all, where the original's first stage is wanted.
        kind: see above.
        sigma: noise of the chunk, ``[b]``; not looked at for ``flow``.

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
    """Error of a prediction over that of the flow that it follows from, ``[b]``."""
    if kind == "x0":
        return sigma
    return 1 - sigma if kind == "noise" else torch.hypot(1 - sigma, sigma)


def _by_frame(x: Tensor) -> Tensor:
    """Means of frames, ``[b, t]`` of ``[b, t, c, h, w]``."""
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
