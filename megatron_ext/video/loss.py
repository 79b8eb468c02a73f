"""Flow matching on latent videos: timesteps, paths from data to noise, velocities, and the loss.

Rectified flow (arXiv:2209.03003, arXiv:2210.02747) with the logit-normal timesteps and the shift
of arXiv:2403.03206, the latter as Open-Sora 2.0 (arXiv:2503.09642) makes it grow with the size and
the length of a clip. At t = 1 there is only noise, at t = 0 (almost) only data:

    x_t = (1 - t) * x0 + (t + sigma_min * (1 - t)) * x1
    v   = d x_t / d t = (1 - sigma_min) * x1 - x0

Times, x_t and v are made in float32 even where the network runs in 16 bits, in which 1000 * t
would be known to 4 and sigma_min would vanish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.data.batch import reduced_weights
from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import Report, number_of_targets, pair
from megatron_ext.video.config.run import MODES, FlowConfig
from megatron_ext.video.model.tokens import LatentShape, tokens_per_frame

_REDUCTIONS = {"per_token": "token", "per_sample": "sample"}

QUARTERS = ("t_q1", "t_q2", "t_q3", "t_q4")
"""Names in the log of the quarters of [0, 1]; clips of all sizes share them, whatever the shift."""


def shift_factor(config: FlowConfig, shape: LatentShape, patch_size: int) -> float:
    """Return the shift a for the times of clips of a size, in training and in sampling.

    It follows the tokens of a latent frame; patches that do not fill it raise DataError.
    """
    if config.flow_shift is not None:
        return config.flow_shift
    slope = (config.shift_max - config.shift_base) / (
        config.shift_max_tokens - config.shift_base_tokens
    )
    excess = tokens_per_frame(shape, patch_size) - config.shift_base_tokens
    length = math.sqrt(shape[0]) if config.shift_by_length else 1.0
    return (config.shift_base + slope * excess) * length


def shift(times: Tensor, factor: float) -> Tensor:
    """Move times towards the noise, a * s / (1 + (a - 1) * s); 0 and 1 stay."""
    return factor * times / (1 + (factor - 1) * times)


def timesteps(config: FlowConfig, normals: Tensor, factor: float) -> Tensor:
    """Return training times t in [0, 1], float32 in the shape of standard ``normals`` u."""
    u = config.timestep_mean + config.timestep_std * normals.float()
    return shift(torch.sigmoid(u), factor)


def noised(x0: Tensor, x1: Tensor, times: Tensor, sigma_min: float) -> tuple[Tensor, Tensor]:
    """Return x_t and v for data and noise ``[b, ...]``, float32 (float64 where ``x0`` is).

    ``times`` are ``[b]``, or for the frames of ``[b, c, t, h, w]``, ``[b, t]``.
    """
    dtype = torch.promote_types(x0.dtype, torch.float32)
    x0, x1 = x0.to(dtype), x1.to(dtype)
    t = times.to(dtype)
    t = t[:, None, :, None, None] if t.dim() == 2 else t.view(-1, *[1] * (x0.dim() - 1))
    # Not 1 - (1 - sigma_min) * (1 - t), whose rounding would be of the size of sigma_min.
    return (1 - t) * x0 + (t + sigma_min * (1 - t)) * x1, (1 - sigma_min) * x1 - x0


def token_weights(mask: Tensor, normalization: str) -> Tensor:
    """Return the weights of the tokens of whole clips in the loss, ``[b, n]`` float32.

    ``mask`` is 1 where a token counts; a clip without such tokens weighs nothing.
    """
    return reduced_weights(mask, None, _REDUCTIONS[normalization])


def token_losses(prediction: Tensor, velocity: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean squared error of each token, ``[b, n]`` float32.

    Args:
        prediction: ``[b, n, d]`` in any float type.
        velocity: ``[b, n, d]`` float32.
        weights: ``[b, n]``; where they are 0 the loss is 0, and so is the gradient, whatever the
            prediction.

    Raises:
        ConfigError: the prediction has another shape.
    """
    if prediction.shape != velocity.shape:
        raise ConfigError(
            f"The model predicted {tuple(prediction.shape)}, but the velocity of its tokens is "
            f"{tuple(velocity.shape)}; return [b, n, d] for the image tokens only."
        )
    error = prediction.float() - velocity.float()
    if weights is not None:
        error = torch.where(weights[:, :, None] != 0, error, 0.0)
    return error.square().mean(dim=2)


@dataclass(frozen=True)
class FlowTargets:
    """Targets of one micro-batch for the n image tokens of one rank.

    Attributes:
        velocity: v of the tokens, ``[b, n, d]`` float32.
        weights: result of `token_weights`, ``[b, n]`` float32.
        times: t, ``[b]``, or for each token ``[b, n]``.
        modes: indices into `MODES`, ``[b]``.
        usual_weight: see `losses.contract.share_of_step`; text goes with the first of the
            context-parallel ranks, so that they hold unequal numbers of image tokens.
    """

    velocity: Tensor
    weights: Tensor
    times: Tensor
    modes: Tensor
    usual_weight: Tensor | None = None


def flow_matching_loss(
    prediction: Tensor,
    *,
    targets: FlowTargets,
    share: Tensor | float = 1.0,
    reported_modes: Sequence[str] = ("t2v",),
) -> tuple[Tensor, Tensor, Report]:
    """Return the weighted sum of the tokens' losses, the number of counted tokens, and what to log.

    Args:
        prediction: velocity of the image tokens, ``[b, n, d]``.
        share: see `losses.contract.share_of_step`.
        reported_modes: condition modes that get an entry in the log, on all ranks alike.
    """
    weights = targets.weights
    losses = token_losses(prediction, targets.velocity, weights) * weights
    total = losses.sum()
    sums = torch.stack([losses.detach().sum(dim=1), weights.sum(dim=1)], dim=1)
    quarter = (targets.times * len(QUARTERS)).long().clamp(max=len(QUARTERS) - 1)
    timed = sums
    if quarter.dim() == 2:
        timed = torch.stack([losses.detach(), weights], dim=2).flatten(0, 1)
        quarter = quarter.flatten()

    def among(sums: Tensor, groups: Tensor, number: int) -> Tensor:
        """Return sums ``[k, 2]`` of the samples or tokens of a group, added up, ``[2]``."""
        return torch.where((groups.to(sums.device) == number)[:, None], sums, 0.0).sum(dim=0)

    report = {"loss": pair(total, weights.sum())}
    report |= {f"loss {name}": among(timed, quarter, i) for i, name in enumerate(QUARTERS)}
    report |= {
        f"loss {mode}": among(sums, targets.modes, MODES.index(mode)) for mode in reported_modes
    }
    return total * share, number_of_targets(weights), report


def x0_from_flow(x_t: Tensor, flow: Tensor, sigma: Tensor) -> Tensor:
    """Return clean latents, ``x_t - sigma * v``, for the flow ``v = noise - x0`` of a Wan network.

    The path is ``x_t = (1 - sigma) * x0 + sigma * noise``, ``[b, t, c, h, w]``, with one sigma for
    each sample ``[b]`` or each frame ``[b, t]``. Computed in float64, since x0 is a difference of
    numbers of like size; the result has the type of ``x_t``.
    """
    x0 = x_t.double() - spread(sigma, x_t) * flow.double()
    return x0.to(x_t.dtype)


def spread(sigma: Tensor, x: Tensor) -> Tensor:
    """Return sigma of shape ``[]``, ``[b]`` or ``[b, t]`` in float64, to broadcast over ``x``."""
    sigma = sigma.to(x.device, torch.float64)
    return sigma.view(*sigma.shape, *[1] * (x.dim() - sigma.dim()))
