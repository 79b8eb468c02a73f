"""Computes a large picture or video tile by tile, and blends the tiles where they overlap.

A VAE needs memory for its features in proportion to the pixels that it computes together. Tiles
bound it, at the price of seams: at the edges of a tile the VAE does not see its surroundings.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

TileFunction = Callable[[Tensor, int], Tensor]
"""A function of a tile and of its number, counted from 0 in the order in which tiles are given."""


def starts(size: int, tile: int, overlap: int) -> list[int]:
    """Return where tiles begin that cover ``size`` cells and overlap by at least ``overlap``.

    All tiles have ``tile`` cells: the last one ends at ``size``, and may overlap further.
    """
    if size <= tile:
        return [0]
    return [*range(0, size - tile, tile - overlap), size - tile]


def _ramp(count: int, overlap: int, device: torch.device) -> Tensor:
    """Return the weights of ``count`` cells in a row, ``[count]``: they rise within the overlap."""
    ends = torch.arange(1, count + 1, device=device, dtype=torch.float32)
    rise: Tensor = torch.minimum(ends, ends.flip(0)) / (overlap + 1)
    return rise.clamp(max=1.0)


class _Blend:
    """Adds tiles, weighted, and returns their weighted mean.

    ``dims`` are the dimensions in which the tensor of ``shape`` is divided.
    """

    def __init__(self, dims: tuple[int, ...]) -> None:
        self._dims = dims
        self._sum: Tensor | None = None
        self._weight = torch.zeros(0)

    def add(
        self,
        part: Tensor,
        begins: tuple[int, ...],
        sizes: tuple[int, ...],
        overlaps: tuple[int, ...],
    ) -> None:
        """Add a tile that begins at ``begins`` of a tensor that has ``sizes`` in these dimensions.

        Its weights rise over ``overlaps`` cells from its edges.
        """
        if self._sum is None:
            shape = list(part.shape)
            ones = [1] * part.dim()
            for dim, size in zip(self._dims, sizes, strict=True):
                shape[dim] = size
                ones[dim] = size
            self._sum = part.new_zeros(shape, dtype=torch.float32)
            self._weight = part.new_zeros(ones, dtype=torch.float32)
        weight = torch.ones([1] * part.dim(), device=part.device)
        total = self._sum
        norm = self._weight
        for dim, begin, overlap in zip(self._dims, begins, overlaps, strict=True):
            count = part.size(dim)
            ramp = _ramp(count, overlap, part.device)
            weight = weight * ramp.reshape([-1] + [1] * (part.dim() - 1 - dim % part.dim()))
            total = total.narrow(dim, begin, count)
            norm = norm.narrow(dim, begin, count)
        total += part.float() * weight
        norm += weight

    def mean(self) -> Tensor:
        assert self._sum is not None
        return self._sum / self._weight


def in_tiles(
    compute: TileFunction, tensor: Tensor, *, tile: int, overlap: int, ratio: Fraction
) -> Tensor:
    """Return ``compute`` of a tensor ``[..., h, w]``, computed on square tiles.

    ``compute`` must return ``ratio`` rows and columns for each one that it is given. A tile has
    ``tile`` rows and columns; tiles overlap by at least ``overlap``. A tensor that is no larger
    than a tile is computed as a whole.
    """
    height, width = tensor.shape[-2:]
    if height <= tile and width <= tile:
        return compute(tensor, 0)
    sizes = (int(height * ratio), int(width * ratio))
    reach = int(overlap * ratio)
    blend = _Blend((-2, -1))
    number = 0
    for top in starts(height, tile, overlap):
        for left in starts(width, tile, overlap):
            part = compute(tensor[..., top : top + tile, left : left + tile], number)
            blend.add(part, (int(top * ratio), int(left * ratio)), sizes, (reach, reach))
            number += 1
    return blend.mean()


def frames_in_tiles(
    compute: Callable[[Tensor], Tensor],
    tensor: Tensor,
    *,
    tile: int,
    overlap: int,
    temporal: int,
    decodes: bool,
) -> Tensor:
    """Return ``compute`` of frames ``[b, c, frames, h, w]`` by a causal codec, on parts in time.

    The first latent frame stands for one pixel frame, each further one for ``temporal``. A part of
    which this is not the first latent frame is computed with one before, which is dropped.

    Args:
        tile, overlap: latent frames of a part, and by how many parts overlap at least.
        decodes: whether ``compute`` makes pixels of latents, not latents of pixels.
    """
    frames = tensor.size(2)
    latents = frames if decodes else (frames - 1) // temporal + 1
    if latents <= tile:
        return compute(tensor)
    pixels = (latents - 1) * temporal + 1
    blend = _Blend((2,))
    for begin in starts(latents, tile, overlap):
        before = 1 if begin else 0
        first = begin - before
        stop = begin + tile
        if decodes:
            part = compute(tensor[:, :, first:stop])[:, :, before:]
            place = first * temporal + before
            blend.add(part, (place,), (pixels,), (overlap * temporal,))
        else:
            part = compute(tensor[:, :, first * temporal : (stop - 1) * temporal + 1])
            blend.add(part[:, :, before:], (begin,), (latents,), (overlap,))
    return blend.mean()
