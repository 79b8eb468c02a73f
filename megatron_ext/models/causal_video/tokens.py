"""Which tokens of every frame a rank holds.

Every token of a frame block has the same key set, so contiguous parts of each frame cost all ranks
the same. Context-parallel ranks share out the tokens of every frame; under sequence parallelism the
tensor-parallel ranks share out each frame's part once more, so that the modulation of a frame
broadcasts over what a rank holds of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import DataError


@dataclass(frozen=True)
class FrameTokens:
    """The tokens of a stretch of frames, and this rank's part of each.

    Attributes:
        first_frame: absolute number of the first frame.
        num_frames: t.
        rows, columns: of the tokens of a frame.
        cp_rank, cp_size: context parallelism.
        tp_rank, tp_size: tensor parallelism where it shares out the sequence, else 0 and 1.

    Raises:
        DataError: tokens of a frame that cannot be shared out equally.
    """

    first_frame: int
    num_frames: int
    rows: int
    columns: int
    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.per_frame % (self.cp_size * self.tp_size):
            raise DataError(
                f"a frame of {self.rows} x {self.columns} = {self.per_frame} tokens must be "
                f"divisible by the context-parallel size ({self.cp_size}), times the "
                f"tensor-parallel size with sequence parallelism ({self.tp_size}); use fewer ranks "
                "or another resolution."
            )

    @property
    def per_frame(self) -> int:
        """Tokens of a frame, N."""
        return self.rows * self.columns

    @property
    def chunk(self) -> slice:
        """This context-parallel rank's tokens of every frame."""
        size = self.per_frame // self.cp_size
        return slice(self.cp_rank * size, (self.cp_rank + 1) * size)

    @property
    def held(self) -> slice:
        """The tokens of every frame that this rank keeps between the parallel layers."""
        size = self.per_frame // self.cp_size // self.tp_size
        start = self.chunk.start + self.tp_rank * size
        return slice(start, start + size)


def frames_first(x: Tensor, num_parts: int, num_frames: int) -> Tensor:
    """Parts of ranks, one behind the other, as frames.

    Args:
        x: ``[parts * t * n, ...]``, n tokens of each frame on each of the ranks.
        num_parts: ranks.
        num_frames: t.

    Returns:
        ``[t, parts * n, ...]``, each frame's tokens in the order of the ranks.
    """
    parts = x.reshape(num_parts, num_frames, -1, *x.shape[1:])
    return parts.transpose(0, 1).flatten(1, 2)


def parts_first(x: Tensor, num_parts: int) -> Tensor:
    """The inverse of `frames_first`: ``[t, parts * n, ...]`` to ``[parts * t * n, ...]``."""
    parts = torch.unflatten(x, 1, (num_parts, -1)).transpose(0, 1)
    return parts.flatten(0, 2)


def positions(tokens: FrameTokens, device: torch.device) -> Tensor:
    """Absolute frame, row and column of the chunk's tokens, ``[t, n, 3]`` int64."""
    sizes = (tokens.num_frames, tokens.rows, tokens.columns)
    frames, rows, columns = (torch.arange(size, device=device) for size in sizes)
    grid = torch.cartesian_prod(frames + tokens.first_frame, rows, columns)
    return grid.view(tokens.num_frames, tokens.per_frame, 3)[:, tokens.chunk]
