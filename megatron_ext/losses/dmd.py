"""Distribution matching distillation: the generator's loss and the critic's.

A generator is trained on D, the difference between what a critic and a teacher take noised chunks
of its videos for (arXiv:2311.18828, arXiv:2405.14867); the critic is trained to know the
generator's videos. With X a chunk, X_t the chunk noised, f and r the clean latents that critic and
teacher see in X_t:

    D   = (f - r) / mean|X - r|                                 (mean of each sample)
    L_G = 1/2 * mean over M of (X - stopgrad(X - D))²           dL_G / dX = D * M / |M|
    L_F = mean over M of (flow of the critic - (noise - X))²

M are the frames that count, those that are new in the chunk. D is a function of whole chunks, but
given D both losses are sums over frames, so that blocks of frames can be micro-batches. Latents and
D are whole and equal on all model-parallel ranks of a replica; nothing here speaks to other ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import Report, pair
from megatron_ext.losses.cross_entropy import number_of_targets


@dataclass(frozen=True)
class DMDConfig:
    """Options of distribution matching.

    Attributes:
        guidance_scale: w of the teacher, ``u + w * (c - u)``; 1 is the plain prediction. LongLive
            adds ``3 * (c - u)`` to c, which is 4 here.

    Raises:
        ConfigError: a scale that is not finite.
    """

    guidance_scale: float = 4.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.guidance_scale):
            raise ConfigError(
                f"`guidance_scale` ({self.guidance_scale}) must be finite; 1 turns guidance off."
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
    for name, x in (("fake", fake), ("conditional", conditional), ("unconditional", unconditional)):
        _check_shape(name, x, latents)
    c, u = conditional.double(), unconditional.double()
    real = c + (scale - 1) * (c - u)
    difference = fake.double() - real
    distance = (latents.double() - real).abs().flatten(1).mean(dim=1)
    distance = distance.view(-1, *[1] * (latents.dim() - 1))
    return torch.where(distance == 0, 0.0, difference / distance)


def dmd_loss(latents: Tensor, *, direction: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Report]:
    """Generator loss of chunks, or of blocks of them, through the loss contract.

    The sum is over frames, of the means of their elements, and the count is of frames; sum / count
    is L_G. Its value says nothing about convergence; the mean of |D| in the report does.

    Args:
        latents: X with gradient, ``[b, t, c, h, w]``.
        direction: D of `dmd_direction` for these frames, as ``latents``.
        mask: frames that count, bool ``[b, t]``.

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
    error = torch.where(_spread(mask, x), x - x.detach() + d, 0.0)
    total = 0.5 * _by_frame(error.square()).sum()
    count = number_of_targets(mask)
    sizes = pair(_by_frame(d.abs()).sum(), torch.full((), mask.numel(), device=d.device))
    return total, count, {"generator loss": pair(total, count), "dmdtrain_gradient_norm": sizes}


def critic_loss(
    flow: Tensor, *, latents: Tensor, noise: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Report]:
    """Flow-matching loss of the critic on generated chunks, through the loss contract.

    Args:
        flow: of the critic for the noised chunk, ``[b, t, c, h, w]``.
        latents: X, as ``flow``; no gradient reaches it.
        noise: as ``flow``.
        mask: frames that count, bool ``[b, t]``; all, where the original's first stage is wanted.

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
    total = _by_frame(torch.where(_spread(mask, error), error, 0.0).square()).sum()
    count = number_of_targets(mask)
    return total, count, {"critic loss": pair(total, count)}


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
