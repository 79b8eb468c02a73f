"""Rotary positions over absolute latent frame, row and column (RoFormer, arXiv:2104.09864).

Adjacent features (2j, 2j + 1) form the pair that frequency j of an axis rotates, as in `mmdit.rope`
and in Wan. Angles are made in float64 for the positions that occur, so that no table bounds the
length of a video, and frame 1000 is as exact as frame 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Table = tuple[Tensor, Tensor]
"""Cosines and sines."""


def rotary_table(
    positions: Tensor, axes_dim: Sequence[int], theta: float, dtype: torch.dtype
) -> Table:
    """Cosines and sines by which `rotate` turns queries and keys.

    The angle of pair j of axis i is ``positions[..., i] * theta ** (-2j / axes_dim[i])``; the axes
    follow one another.

    Args:
        positions: ``[t, n, 3]``.
        axes_dim: features of a head for each axis, even.
        theta: base of the frequencies.
        dtype: of the model; the table has at least float32.

    Returns:
        Two tensors ``[t, n, 1, 1, d / 2]``, which broadcast over batch and heads.
    """
    angles = []
    for axis, width in enumerate(axes_dim):
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
        angles.append(positions[..., axis].double().unsqueeze(-1) * theta**-exponents)
    angle = torch.cat(angles, dim=-1)[:, :, None, None]
    exact = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(exact), angle.sin().to(exact)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Turn the pairs of queries or keys in at least float32.

    Args:
        x: ``[t, n, b, heads, d]``.
        table: see `rotary_table`.

    Returns:
        As ``x``, in its dtype.
    """
    cos, sin = table
    first, second = torch.unflatten(x.to(cos.dtype), -1, (-1, 2)).unbind(-1)
    turned = torch.stack((cos * first - sin * second, sin * first + cos * second), dim=-1)
    return turned.flatten(-2).to(x.dtype)
