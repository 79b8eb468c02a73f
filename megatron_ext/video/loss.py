"""Flow matching on latent videos: timesteps, paths from data to noise, velocities, and the loss.

The method is rectified flow (arXiv:2209.03003, arXiv:2210.02747) with the logit-normal timesteps
and the shift of arXiv:2403.03206. The shift grows with the size and the length of a clip, as in
Open-Sora 2.0 (arXiv:2503.09642). x_t lies between data x0 and noise x1: it is x1 at t = 1, and x0 +
sigma_min * x1 at t = 0:

    x_t = (1 - t) * x0 + (t + sigma_min * (1 - t)) * x1
    v   = d x_t / d t = (1 - sigma_min) * x1 - x0

Times, x_t and v are computed in float32 even where the network runs in 16 bits: bfloat16 would
round timesteps 1000 * t near 1000 to multiples of 4 and lose sigma_min.
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
"""Names in the log of the losses at times [0, 1/4), [1/4, 1/2), [1/2, 3/4) and [3/4, 1]."""


def shift_factor(config: FlowConfig, shape: LatentShape, patch_size: int) -> float:
    """Return the factor of `shift` for clips of latent ``shape``, in training and in sampling.

    `--flow-shift` gives the factor. Without it, the factor is linear in the number of tokens of a
    latent frame: ``shift_base`` at ``shift_base_tokens``, ``shift_max`` at ``shift_max_tokens``.
    With ``shift_by_length`` this is multiplied by the square root of the number of latent frames.

    Raises:
        DataError: the patch size does not divide the latent frame.
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
    """Map times s to ``a * s / (1 + (a - 1) * s)`` with a = ``factor``.

    A factor above 1 moves times towards noise.
    """
    return factor * times / (1 + (factor - 1) * times)


def timesteps(config: FlowConfig, normals: Tensor, factor: float) -> Tensor:
    """Return a training time in [0, 1] for each of the standard normal ``normals``, in float32.

    The times are shifted by `shift` with ``factor``. With ``--timestep-range`` they are those that
    the range contains, with the density that they have without it, made to integrate to 1.
    """
    if config.timestep_range is not None:
        return _timesteps_within(config.timestep_range, config, normals, factor)
    u = config.timestep_mean + config.timestep_std * normals.float()
    return shift(torch.sigmoid(u), factor)


def _timesteps_within(
    bounds: tuple[float, float], config: FlowConfig, normals: Tensor, factor: float
) -> Tensor:
    """Return the times of `timesteps` within ``bounds``, by the inverse of their distribution.

    A time rises with its normal number. So times within ``bounds`` come from the numbers between
    two limits; the quantile that ``normals`` has among all numbers is taken among these.
    """
    times = torch.tensor(bounds, dtype=torch.float64, device=normals.device)
    # A shift adds the logarithm of its factor to the logit of a time.
    limits = (torch.logit(times) - math.log(factor) - config.timestep_mean) / config.timestep_std
    # Far above 0 the distribution function is 1 but for its last digits, far below 0 it is exact.
    side = -1.0 if limits[0] > 0 else 1.0
    low, high = _share_below((side * limits).sort().values)
    quantile = low + _share_below(side * normals.double()) * (high - low)
    u = config.timestep_mean + config.timestep_std * side * torch.special.ndtri(quantile)
    return shift(torch.sigmoid(u), factor).clamp(*times.tolist()).float()


def _share_below(numbers: Tensor) -> Tensor:
    """Return the probability that a standard normal number is below each of ``numbers``.

    torch's ``ndtr`` is 0 from -9 down; this is exact to the smallest float64.
    """
    share: Tensor = 0.5 * torch.special.erfc(-numbers / math.sqrt(2))
    return share


def noised(x0: Tensor, x1: Tensor, times: Tensor, sigma_min: float) -> tuple[Tensor, Tensor]:
    """Return the noisy x_t and the velocity v for data ``x0`` and noise ``x1``, ``[b, ...]``.

    ``times`` are ``[b]``, or ``[b, t]`` with one per frame of data ``[b, c, t, h, w]``. The results
    are float32, or float64 if the data is.
    """
    dtype = torch.promote_types(x0.dtype, torch.float32)
    x0 = x0.to(dtype)
    x1 = x1.to(dtype)
    t = times.to(dtype)
    t = t[:, None, :, None, None] if t.dim() == 2 else t.view(-1, *[1] * (x0.dim() - 1))
    # Not 1 - (1 - sigma_min) * (1 - t), whose rounding would be of the size of sigma_min.
    return (1 - t) * x0 + (t + sigma_min * (1 - t)) * x1, (1 - sigma_min) * x1 - x0


def token_weights(mask: Tensor, normalization: str) -> Tensor:
    """Return the weight of each token in the loss, ``[b, n]`` float32.

    Args:
        mask: 1 for tokens with a loss, else 0, ``[b, n]``, for all n image tokens of each clip, not
            only those of one context-parallel rank.
        normalization: with "per_token" the weights are the mask; with "per_sample" the weights of
            each clip sum to 1, or to 0 if no token of the clip has a loss.
    """
    return reduced_weights(mask, None, _REDUCTIONS[normalization])


def token_losses(prediction: Tensor, velocity: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean squared error of each of n tokens with d numbers, ``[b, n]`` float32.

    Args:
        prediction: ``[b, n, d]`` in any float type.
        velocity: ``[b, n, d]`` float32.
        weights: ``[b, n]``; tokens of weight 0 get loss 0 and gradient 0, even where the prediction
            is not finite.

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
    """Targets of one micro-batch for the n image tokens of one rank, with d numbers each.

    Attributes:
        velocity: v of the tokens, ``[b, n, d]`` float32.
        weights: weights of the tokens in the loss from `token_weights`, ``[b, n]`` float32.
        times: t, ``[b]`` for each clip or ``[b, n]`` for each token.
        modes: condition mode of each clip, as an index into `config.run.MODES`, ``[b]``.
        usual_weight: the mean, over the context-parallel ranks, of the sum of a rank's ``weights``;
            needed if these ranks hold unequal numbers of image tokens. `share_of_step` may divide
            the loss by it; None means by this rank's own sum.
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
    """Return (weighted sum of the tokens' losses, number of tokens with a loss, report).

    The report maps the name of each logged loss to ``[weighted sum, sum of weights]``. There is one
    loss of all tokens, one for each of `QUARTERS`, and one for each of ``reported_modes``.

    Args:
        prediction: predicted velocity of the n image tokens, ``[b, n, d]``.
        share: factor on the returned sum, but not on the logged losses; from `share_of_step`.
        reported_modes: condition modes to report, the same on all ranks.
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
        """Return the sum, ``[2]``, of the rows i of ``sums`` with ``groups[i] == number``."""
        return torch.where((groups.to(sums.device) == number)[:, None], sums, 0.0).sum(dim=0)

    report = {"loss": pair(total, weights.sum())}
    report |= {f"loss {name}": among(timed, quarter, i) for i, name in enumerate(QUARTERS)}
    report |= {
        f"loss {mode}": among(sums, targets.modes, MODES.index(mode)) for mode in reported_modes
    }
    return total * share, number_of_targets(weights), report


def x0_from_flow(x_t: Tensor, flow: Tensor, sigma: Tensor) -> Tensor:
    """Return clean latents x0, ``x_t - sigma * flow``; a Wan network predicts the flow, noise - x0.

    The path is ``x_t = (1 - sigma) * x0 + sigma * noise``, ``[b, t, c, h, w]``, with one sigma for
    each sample ``[b]`` or each frame ``[b, t]``. The result has the dtype of ``x_t``. It is
    computed in float64, since x0 is a difference of numbers of similar size.
    """
    x0 = x_t.double() - spread(sigma, x_t) * flow.double()
    return x0.to(x_t.dtype)


def spread(sigma: Tensor, x: Tensor) -> Tensor:
    """Return ``sigma`` in float64, with axes of size 1 appended so that it broadcasts with ``x``.

    ``sigma`` is ``[]``, ``[b]`` or ``[b, t]``; ``x`` is ``[b, t, ...]``.
    """
    sigma = sigma.to(x.device, torch.float64)
    return sigma.view(*sigma.shape, *[1] * (x.dim() - sigma.dim()))
