"""Latent videos as sequences of tokens, and the tokens that each rank holds.

A token is a patch of p x p latent pixels of one latent frame (Open-Sora 2.0, arXiv:2503.09642).
Tokens are ordered by frame, then row, then column. Feature c * p * p + row * p + column of a token
is channel c of the latent pixel at that row and column of its patch.

How tokens are split over ranks depends on the network. If it runs on one sequence [text; image],
whose image tokens are those of the video, each rank holds a contiguous part of that sequence
(`TokenRange`). If each frame has its own modulation (shifts, scales and gates), each rank holds a
part of every frame (`FrameTokens`), so that a frame's modulation broadcasts over its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import DataError

LatentShape = tuple[int, int, int]
"""The size of a latent video: frames t, height h and width w."""


def grid(shape: LatentShape, patch_size: int) -> LatentShape:
    """Return the numbers of frames, token rows and token columns of a latent video.

    DataError is raised if patches do not divide its height and width.
    """
    frames, height, width = shape
    if patch_size < 1 or height % patch_size or width % patch_size:
        raise DataError(
            f"Latents of {height} x {width} must be divisible by the patch size ({patch_size}); "
            f"encode videos whose height and width are multiples of patch size x VAE stride."
        )
    return frames, height // patch_size, width // patch_size


def tokens_per_frame(shape: LatentShape, patch_size: int) -> int:
    """Return the number of tokens of one latent frame."""
    _, rows, columns = grid(shape, patch_size)
    return rows * columns


def pack(latents: Tensor, patch_size: int) -> Tensor:
    """Return latents ``[b, c, t, h, w]`` as N tokens ``[b, N, c*p*p]``, p = ``patch_size``."""
    b, c, t, h, w = latents.shape
    _, rows, columns = grid((t, h, w), patch_size)
    patches = latents.reshape(b, c, t, rows, patch_size, columns, patch_size)
    return patches.permute(0, 2, 3, 5, 1, 4, 6).reshape(b, t * rows * columns, -1)


def unpack(tokens: Tensor, shape: LatentShape, patch_size: int) -> Tensor:
    """Undo `pack`: return latents ``[b, c, t, h, w]``; raise DataError if the tokens do not fit."""
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
    """Return frame, row and column of N tokens, ``[N, 3]`` int64, in the order of `pack`."""
    axes = [torch.arange(size, device=device) for size in grid(shape, patch_size)]
    return torch.cartesian_prod(*axes)


@dataclass(frozen=True)
class TokenRange:
    """The tokens ``start`` to ``end - 1`` of a sequence of text tokens, then image (video) tokens.

    ``num_text`` and ``num_image`` are the numbers of text and image tokens in the whole sequence.
    """

    num_text: int
    num_image: int
    start: int
    end: int

    @classmethod
    def whole(cls, num_text: int, num_image: int) -> TokenRange:
        """Return the range of the whole sequence."""
        return cls(num_text, num_image, 0, num_text + num_image)

    def part(self, index: int, size: int) -> TokenRange:
        """Cut the range into ``size`` equal contiguous parts; return part ``index``.

        DataError is raised if the range cannot be cut equally.
        """
        length = len(self)
        if length % size:
            raise DataError(
                f"a sequence of {self.num_text} text and {self.num_image} image tokens gives a "
                f"part of {length} tokens, which must be divisible by {size} ranks; pad the text "
                "so that the sequence is divisible by the context-parallel size, times the "
                "tensor-parallel size with sequence parallelism."
            )
        start = self.start + index * (length // size)
        return TokenRange(self.num_text, self.num_image, start, start + length // size)

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def text(self) -> slice:
        """Return the range's text tokens as a slice of all text tokens; it may be empty."""
        return slice(min(self.start, self.num_text), min(self.end, self.num_text))

    @property
    def image(self) -> slice:
        """Return the range's image tokens as a slice of all image tokens; it may be empty."""
        return slice(max(self.start - self.num_text, 0), max(self.end - self.num_text, 0))

    @property
    def local_text(self) -> int:
        """Return the number of text tokens in the range; they precede its image tokens."""
        return self.text.stop - self.text.start  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LocalTokens:
    """The two ranges of tokens that a rank works on.

    Attributes:
        cp_slice: the tokens of this context-parallel rank, which attention and MLPs process.
        part: the tokens whose hidden states this rank holds between attention and MLPs: under
            sequence parallelism a part of ``cp_slice``, else all of it.
        keys: True at the tokens of the whole sequence that others attend to, ``[b, s]``; None if
            they attend to all.
    """

    cp_slice: TokenRange
    part: TokenRange
    keys: Tensor | None = None


@dataclass(frozen=True)
class FrameTokens:
    """The tokens of consecutive frames, and this rank's part of each frame.

    Each context-parallel rank holds an equal part of every frame; under sequence parallelism the
    tensor-parallel ranks split that part again. All tokens of a frame attend to the same keys, so
    contiguous parts are equal work for all ranks.

    Attributes:
        first_frame: number of the first of these frames in the whole video.
        rows, columns: tokens of a frame in height and width.
        tp_rank, tp_size: tensor-parallel rank and size under sequence parallelism, else 0 and 1.

    Raises:
        DataError: the ranks cannot hold equal numbers of a frame's tokens.
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
        """Return the number of tokens of a frame."""
        return self.rows * self.columns

    @property
    def cp_slice(self) -> slice:
        """Return the slice of every frame's tokens that this context-parallel rank holds."""
        size = self.per_frame // self.cp_size
        return slice(self.cp_rank * size, (self.cp_rank + 1) * size)

    @property
    def held(self) -> slice:
        """Return the slice of every frame's tokens that this rank holds between attention and MLP.

        Under sequence parallelism it is a part of `cp_slice`, else all of it.
        """
        size = self.per_frame // self.cp_size // self.tp_size
        start = self.cp_slice.start + self.tp_rank * size
        return slice(start, start + size)


def frames_first(x: Tensor, num_parts: int, num_frames: int) -> Tensor:
    """Regroup tokens by frame, from ``[parts * t * m, ...]`` to ``[t, parts * m, ...]``.

    ``x`` concatenates the tokens of ``num_parts`` ranks, m of each of t frames. The tokens of a
    frame stay in the order of ranks.
    """
    parts = x.reshape(num_parts, num_frames, -1, *x.shape[1:])
    return parts.transpose(0, 1).flatten(1, 2)


def parts_first(x: Tensor, num_parts: int) -> Tensor:
    """Undo `frames_first`: turn ``[t, parts * m, ...]`` into ``[parts * t * m, ...]``."""
    parts = torch.unflatten(x, 1, (num_parts, -1)).transpose(0, 1)
    return parts.flatten(0, 2)


def positions(tokens: FrameTokens, device: torch.device) -> Tensor:
    """Return the frame in the whole video, row and column of each token, ``[t, m, 3]``.

    The tokens are those of this context-parallel rank (``cp_slice``), m of each of t frames.
    """
    ids = position_ids((tokens.num_frames, tokens.rows, tokens.columns), 1, device)
    ids[:, 0] += tokens.first_frame
    return ids.view(tokens.num_frames, tokens.per_frame, 3)[:, tokens.cp_slice]
