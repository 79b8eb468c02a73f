"""The orthogonal transform of the patch codec: cosines over a patch, then a fixed rotation.

A patch is flattened as colour, frame, row, column, ``3 * p * q * q`` values.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_ROTATION_SEED = 20250312
_COLOURS = ((1, 1, 1), (1, 0, -1), (1, -2, 1))
"""Brightness and two differences, orthogonal to each other."""


def _cosines(n: int) -> Tensor:
    """The orthonormal DCT-II (Ahmed et al., 1974), ``[n, n]`` float64, frequency by place."""
    k, x = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    waves = torch.cos(math.pi * k.double() * (x.double() + 0.5) / n)
    return waves * torch.where(k == 0, math.sqrt(1 / n), math.sqrt(2 / n))


def cosine_basis(temporal: int, spatial: int, kept: Tensor | None = None) -> Tensor:
    """Orthonormal rows over a patch, ``[3pqq, 3pqq]`` float64, or only some of them.

    Args:
        temporal, spatial: p and q.
        kept: numbers of the rows wanted, ``[k]`` int64: all of them for large patches would take
            gigabytes.
    """
    colours = torch.tensor(_COLOURS, dtype=torch.float64)
    colours /= colours.norm(dim=1, keepdim=True)
    side = _cosines(spatial)
    sizes = (3, temporal, spatial, spatial)
    numbers = torch.arange(math.prod(sizes)) if kept is None else kept
    axes = (colours, _cosines(temporal), side, side)
    rows = [w[n] for w, n in zip(axes, torch.unravel_index(numbers, sizes), strict=True)]
    return torch.einsum("nc,nt,ny,nx->nctyx", *rows).reshape(len(numbers), -1)


def band_order(temporal: int, spatial: int) -> Tensor:
    """Rows of `cosine_basis` from low to high frequency, ``[3pqq]`` int64; ties in their order."""
    t, y, x = (torch.arange(n).double() / n for n in (temporal, spatial, spatial))
    radius = t[:, None, None] ** 2 + y[:, None] ** 2 + x**2
    return radius.expand(3, -1, -1, -1).reshape(-1).argsort(stable=True)


def rotation(size: int) -> Tensor:
    """A fixed orthogonal matrix ``[size, size]`` float64, which spreads energy over channels.

    The Q of a Gaussian matrix, with the signs that make it unique. Its bits come from numpy's
    PCG64, which no release changes.
    """
    uniforms = np.random.PCG64(_ROTATION_SEED).random_raw(2 * size * size)
    u, v = ((uniforms >> np.uint64(11)).astype(np.float64) + 0.5).reshape(2, size, size) / 2.0**53
    gaussian = torch.from_numpy(np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v))
    q, r = torch.linalg.qr(gaussian)
    fixed: Tensor = q * torch.sign(torch.diagonal(r))
    return fixed
