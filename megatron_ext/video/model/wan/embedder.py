"""From latents, text and timesteps to the width of the model.

Rotary positions over absolute latent frame, row and column (RoFormer, arXiv:2104.09864).

Adjacent features (2j, 2j + 1) form the pair that frequency j of an axis rotates, as in `mmdit.rope`
and in Wan. Angles are made in float64 for the positions that occur, so that no table bounds the
length of a video, and frame 1000 is as exact as frame 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.video.config.mmdit import TIMESTEP_WIDTH
from megatron_ext.video.config.wan import VideoDiTSizes
from megatron_ext.video.model.linear import mark_replicated
from megatron_ext.video.model.modulation import VectorEmbedder
from megatron_ext.video.model.tokens import FrameTokens, pack

MAX_PERIOD = 10_000.0


def timestep_sinusoid(timesteps: Tensor) -> Tensor:
    """128 cosines of ``t * 10000 ** (-j / 128)``, then the sines, in float64 as in Wan.

    Args:
        timesteps: ``[n]``, 0 to 1000.

    Returns:
        ``[n, 256]`` float64.
    """
    half = TIMESTEP_WIDTH // 2
    exponents = torch.arange(half, dtype=torch.float64, device=timesteps.device) / half
    angles = timesteps.double()[:, None] * MAX_PERIOD**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Conditioning(NamedTuple):
    """What every block is told of timesteps and text.

    Attributes:
        time: embedded timesteps, ``[f, b, h]``; f is 1 if all frames have one timestep.
        modulation: projection of them, ``[f, b, 6h]``.
        text: embedded text, ``[l, b, h]``; without tokens where the cache holds what the blocks
            make of it.
    """

    time: Tensor
    modulation: Tensor
    text: Tensor

    def rows(self) -> Tensor:
        """As rows of width h, ``[7 f + l, b, h]``, to travel with the hidden states."""
        modulation = torch.unflatten(self.modulation, -1, (6, -1)).permute(0, 2, 1, 3).flatten(0, 1)
        return torch.cat((self.time, modulation, self.text))

    @classmethod
    def from_rows(cls, rows: Tensor, num_times: int) -> Conditioning:
        """The inverse of `rows`."""
        time, modulation, text = rows.tensor_split((num_times, 7 * num_times))
        parts = torch.unflatten(modulation, 0, (num_times, 6)).permute(0, 2, 1, 3).flatten(2)
        return cls(time, parts, text)


class Embedder(MegatronModule):  # type: ignore[misc]
    """What the first stage does with the inputs."""

    def __init__(
        self, config: TransformerConfig, sizes: VideoDiTSizes, tp_group: ProcessGroup
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        h = sizes.hidden_size
        self.patch_size = sizes.patch_size
        self.patch_in = torch.nn.Linear(sizes.token_width, h)
        self.text_in = torch.nn.Linear(sizes.text_width, h)
        self.text_out = torch.nn.Linear(h, h)
        self.time_in = VectorEmbedder(TIMESTEP_WIDTH, h)
        self.time_projection = torch.nn.Linear(h, 6 * h)
        for module in (self.patch_in, self.time_in, self.time_projection):
            mark_replicated(module, config)

    def tokens(self, x: Tensor, tokens: FrameTokens) -> Tensor:
        """Embed the tokens that this rank holds.

        Args:
            x: whole latents, ``[b, t, c, h, w]``.
            tokens: which of their tokens to embed.

        Returns:
            ``[s, b, h]``, the tokens of frame after frame.
        """
        packed = pack(x.transpose(1, 2), self.patch_size)
        held = torch.unflatten(packed, 1, (tokens.num_frames, -1))[:, :, tokens.held].flatten(1, 2)
        embedded: Tensor = self.patch_in(held.to(self.patch_in.weight.dtype))
        return embedded.transpose(0, 1)

    def conditioning(self, timesteps: Tensor, text: Tensor) -> Conditioning:
        """Embed timesteps ``[b, f]`` and text ``[b, l, text_width]``, l possibly 0.

        Every rank embeds the whole text and the timesteps. Under sequence parallelism the timesteps
        get the gradient of the rank's tokens, the text that of all.
        """
        b, f = timesteps.shape
        time: Tensor = (
            self.time_in(timestep_sinusoid(timesteps.flatten())).view(b, f, -1).transpose(0, 1)
        )
        words = F.gelu(self.text_in(text.to(self.text_in.weight.dtype)), approximate="tanh")
        return Conditioning(
            time, self.time_projection(F.silu(time)), self.text_out(words).transpose(0, 1)
        )


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
