"""Between the flow that the network predicts and clean latents.

The path is ``x_t = (1 - sigma) * x0 + sigma * noise``, and the flow ``v = noise - x0``, so that
``x0 = x_t - sigma * v``. Computed in float64, since x0 is a difference of numbers of like size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def x0_from_flow(x_t: Tensor, flow: Tensor, sigma: Tensor) -> Tensor:
    """Clean latents, ``x_t - sigma * v``.

    Args:
        x_t: ``[b, t, c, h, w]``.
        flow: of the network, as ``x_t``.
        sigma: noise of each sample ``[b]`` or of each frame ``[b, t]``.

    Returns:
        As ``x_t``, in its dtype.
    """
    x0 = x_t.double() - spread(sigma, x_t) * flow.double()
    return x0.to(x_t.dtype)


def flow_from_x0(x_t: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
    """Flow that leads to clean latents, ``(x_t - x0) / sigma``; arguments as of `x0_from_flow`.

    Sigma must not be 0, where there is no noise that tells the flow.
    """
    flow = (x_t.double() - x0.double()) / spread(sigma, x_t)
    return flow.to(x_t.dtype)


def spread(sigma: Tensor, x: Tensor) -> Tensor:
    """``[]``, ``[b]`` or ``[b, t]`` in float64, to broadcast over ``x``."""
    sigma = sigma.to(x.device, torch.float64)
    return sigma.view(*sigma.shape, *[1] * (x.dim() - sigma.dim()))
