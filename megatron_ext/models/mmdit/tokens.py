"""Latent videos as sequences of tokens, and back (Open-Sora 2.0, arXiv:2503.09642).

A token is a patch of p x p latent pixels of one latent frame. Tokens go through the frames first,
then the rows, then the columns of the patches; the features of a token go through the channels
first, then the rows, then the columns of its patch: feature = c * p * p + row * p + column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.errors import DataError

LatentShape = tuple[int, int, int]
"""Frames t, height h and width w of a latent video."""


def grid(shape: LatentShape, patch_size: int) -> LatentShape:
    """Frames, rows and columns of the tokens of a latent video.

    Raises:
        DataError: a height or width that patches do not fill.
    """
    frames, height, width = shape
    if patch_size < 1 or height % patch_size or width % patch_size:
        raise DataError(
            f"Latents of {height} x {width} must be divisible by the patch size ({patch_size}); "
            f"encode videos whose height and width are multiples of patch size x VAE stride."
        )
    return frames, height // patch_size, width // patch_size


def tokens_per_frame(shape: LatentShape, patch_size: int) -> int:
    """Number of tokens of one latent frame."""
    _, rows, columns = grid(shape, patch_size)
    return rows * columns


def token_width(channels: int, patch_size: int) -> int:
    """Features of a token, c * p * p."""
    return channels * patch_size**2


def condition_width(channels: int, patch_size: int) -> int:
    """Features of a token of the image condition, which has a mask before its channels."""
    return token_width(channels + 1, patch_size)


def pack(latents: Tensor, patch_size: int) -> Tensor:
    """Latents ``[b, c, t, h, w]`` as tokens ``[b, n, c*p*p]``.

    Raises:
        DataError: see `grid`.
    """
    b, c, t, h, w = latents.shape
    _, rows, columns = grid((t, h, w), patch_size)
    patches = latents.reshape(b, c, t, rows, patch_size, columns, patch_size)
    return patches.permute(0, 2, 3, 5, 1, 4, 6).reshape(b, t * rows * columns, -1)


def unpack(tokens: Tensor, shape: LatentShape, patch_size: int) -> Tensor:
    """The inverse of `pack`: tokens ``[b, n, c*p*p]`` as latents ``[b, c, t, h, w]``.

    Args:
        tokens: of the whole video.
        shape: (t, h, w) of the latents.
        patch_size: p.

    Raises:
        DataError: tokens that are not those of such latents.
    """
    t, rows, columns = grid(shape, patch_size)
    b, n, width = tokens.shape
    if n != t * rows * columns or width % patch_size**2:
        raise DataError(
            f"Tokens of shape {tuple(tokens.shape)} must be [b, {t * rows * columns}, c * "
            f"{patch_size**2}] to make latents of {t} x {shape[1]} x {shape[2]}; give the shape "
            "that they were packed from."
        )
    patches = tokens.reshape(b, t, rows, columns, -1, patch_size, patch_size)
    return patches.permute(0, 4, 1, 2, 5, 3, 6).reshape(b, -1, *shape)


def position_ids(shape: LatentShape, patch_size: int, device: torch.device | None = None) -> Tensor:
    """Frame, row and column of each token, ``[n, 3]`` int64, in the order of `pack`.

    Raises:
        DataError: see `grid`.
    """
    axes = [torch.arange(size, device=device) for size in grid(shape, patch_size)]
    return torch.cartesian_prod(*axes)
