"""Rotary positions over three axes: latent frame, row and column (RoFormer, arXiv:2104.09864).

Adjacent features (2j, 2j + 1) of a head form the pair that frequency j of an axis rotates, as in
FLUX and in Wan. Weights of implementations that rotate the pairs (j, d / 2 + j) fit after a
permutation of the output channels of the query and key projections, from head feature d / 2 + j
to 2j + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError

Table = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which `rotate` turns pairs."""


def rotary_table(ids: Tensor, axes_dim: Sequence[int], head_dim: int, theta: float) -> Table:
    """Return the table for a joint sequence of text and image tokens, in float32.

    Text tokens have ids 0, which turn nothing.

    Args:
        ids: positions, ``[b, s, 3]``.
        axes_dim: number of features for each axis, even.
        head_dim: d.
        theta: base of the frequencies.

    Returns:
        Two tensors ``[s, b, 1, d / 2]``.

    Raises:
        ConfigError: the widths of the axes do not sum to ``head_dim``.
    """
    if sum(axes_dim) != head_dim or len(axes_dim) != ids.size(-1):
        raise ConfigError(
            f"`axes_dim` {tuple(axes_dim)} must be {ids.size(-1)} widths whose sum is the size of "
            f"a head ({head_dim})."
        )
    angle = _angles(ids, axes_dim, theta, torch.float32).transpose(0, 1).unsqueeze(2)
    return angle.cos(), angle.sin()


def frame_rotary_table(
    positions: Tensor, axes_dim: Sequence[int], theta: float, dtype: torch.dtype
) -> Table:
    """Return the table for the tokens of frames, whose number has no bound.

    Angles are computed in float64 for the positions that occur, so that frame 1000 is as exact as
    frame 0.

    Args:
        positions: ``[t, n, 3]``.
        axes_dim: number of features for each axis, even.
        theta: base of the frequencies.
        dtype: type of the model; the table has at least float32.

    Returns:
        Two tensors ``[t, n, 1, 1, d / 2]``, which broadcast over batch and heads.
    """
    angle = _angles(positions, axes_dim, theta, torch.float64)[:, :, None, None]
    exact = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(exact), angle.sin().to(exact)


def _angles(positions: Tensor, axes_dim: Sequence[int], theta: float, dtype: torch.dtype) -> Tensor:
    """Return ``positions[..., i] * theta ** (-2j / axes_dim[i])`` for pair j of axis i.

    Returns:
        ``[..., d / 2]``; the axes follow one another.
    """
    angles = []
    for axis, width in enumerate(axes_dim):
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
        angles.append(positions[..., axis].to(dtype).unsqueeze(-1) * theta**-exponents)
    return torch.cat(angles, dim=-1)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Turn the pairs of queries or keys, in the type of the table.

    Args:
        x: ``[..., d]``.
        table: cosines and sines, which broadcast with ``[..., d / 2]``.

    Returns:
        ``[..., d]`` in the type of ``x``.
    """
    cos, sin = table
    first, second = torch.unflatten(x.to(cos.dtype), -1, (x.size(-1) // 2, 2)).unbind(-1)
    turned = torch.stack((cos * first - sin * second, sin * first + cos * second), dim=-1)
    return turned.flatten(-2).to(x.dtype)
