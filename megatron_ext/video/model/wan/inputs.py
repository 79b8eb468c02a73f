"""The inputs of a Wan network: what they must be, and how the first stage embeds them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import DataError
from megatron_ext.video.config.mmdit import TIMESTEP_WIDTH
from megatron_ext.video.config.wan import VideoDiTSizes
from megatron_ext.video.model.linear import mark_replicated
from megatron_ext.video.model.modulation import VectorEmbedder
from megatron_ext.video.model.tokens import FrameTokens, pack


def check_inputs(sizes: VideoDiTSizes, x: Tensor, timesteps: Tensor, text: Tensor) -> None:
    """Check the inputs of a forward pass against the sizes and each other.

    Raises:
        DataError: the shape or type of an input does not fit.
    """
    if x.dim() != 5 or x.size(2) != sizes.channels or 0 in x.shape:
        raise DataError(
            f"`x` has the shape {list(x.shape)}, but the model takes [b, t, {sizes.channels}, h, "
            "w], latent frames before channels."
        )
    b, t = x.shape[:2]
    if timesteps.shape not in ((b,), (b, t)):
        raise DataError(
            f"`timesteps` has the shape {list(timesteps.shape)}, but must be [{b}] for one of each "
            f"sample or [{b}, {t}] for one of each frame."
        )
    if timesteps.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"`timesteps` has the type {timesteps.dtype}, but must be float32: in 16 bits "
            "timesteps near 1000 have steps of 4."
        )
    if text.dim() != 3 or text.size(0) != b or text.size(2) != sizes.text_width or 0 in text.shape:
        raise DataError(
            f"`text` has the shape {list(text.shape)}, but must be [{b}, l, {sizes.text_width}]."
        )


MAX_PERIOD = 10_000.0


def timestep_sinusoid(timesteps: Tensor) -> Tensor:
    """Return 128 cosines of ``t * 10000 ** (-j / 128)``, then the sines, in float64 as in Wan.

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
    """Timesteps and text as every block gets them.

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
        """Return them as rows of width h, ``[7 f + l, b, h]``, to travel with the hidden states."""
        modulation = torch.unflatten(self.modulation, -1, (6, -1)).permute(0, 2, 1, 3).flatten(0, 1)
        return torch.cat((self.time, modulation, self.text))

    @classmethod
    def from_rows(cls, rows: Tensor, num_times: int) -> Conditioning:
        """Invert `rows`."""
        time, modulation, text = rows.tensor_split((num_times, 7 * num_times))
        parts = torch.unflatten(modulation, 0, (num_times, 6)).permute(0, 2, 1, 3).flatten(2)
        return cls(time, parts, text)


class Embedder(MegatronModule):  # type: ignore[misc]
    """The layers by which the first stage embeds latents, timesteps and text."""

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
        """Embed the tokens that this rank holds as ``[s, b, h]``, frame after frame.

        Args:
            x: whole latents, ``[b, t, c, h, w]``.
            tokens: which of their tokens to embed.
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
