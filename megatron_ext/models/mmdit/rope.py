"""Rotary positions over three axes: latent frame, row and column (RoFormer, arXiv:2104.09864).

Pair layout: adjacent features (2j, 2j + 1) of a head form the pair that frequency j rotates, as in
FLUX. Weights of implementations that rotate the pairs (j, d / 2 + j) fit after a permutation of
the output channels of the query and key projections, of head feature d / 2 + j to 2j + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError


def rotary_table(
    ids: Tensor, axes_dim: Sequence[int], head_dim: int, theta: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which `rotate` turns queries and keys, in float32.

    The angle of pair j of axis i is ``ids[..., i] * theta ** (-2j / axes_dim[i])``; the axes follow
    one another. Text tokens have ids 0, which turn nothing.

    Args:
        ids: positions, ``[b, s, 3]``.
        axes_dim: features for each axis, even.
        head_dim: d.
        theta: base of the frequencies.

    Returns:
        Two tensors ``[s, b, 1, d / 2]``.

    Raises:
        ConfigError: axes whose widths do not sum to ``head_dim``.
    """
    if sum(axes_dim) != head_dim or len(axes_dim) != ids.size(-1):
        raise ConfigError(
            f"`axes_dim` {tuple(axes_dim)} must be {ids.size(-1)} widths whose sum is the size of "
            f"a head ({head_dim})."
        )
    angles = []
    for axis, width in enumerate(axes_dim):
        exponents = torch.arange(0, width, 2, device=ids.device, dtype=torch.float32) / width
        angles.append(ids[..., axis].float().unsqueeze(-1) * theta**-exponents)
    angle = torch.cat(angles, dim=-1).transpose(0, 1).unsqueeze(2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs of queries or keys in float32.

    Args:
        x: ``[s, b, n, d]``.
        table: see `rotary_table`.

    Returns:
        ``[s, b, n, d]`` in the dtype of ``x``.
    """
    cos, sin = table
    first, second = x.float().view(*x.shape[:-1], x.size(-1) // 2, 2).unbind(-1)
    turned = torch.stack((cos * first - sin * second, sin * first + cos * second), dim=-1)
    return turned.flatten(-2).to(x.dtype)
