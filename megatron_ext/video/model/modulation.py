"""LayerNorm whose scale and shift the vector embedding gives (adaLN, DiT, arXiv:2212.09748).

From latents, text and timesteps to the width of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.compiled import compiled
from megatron_ext.video.config.mmdit import EPSILON, TIMESTEP_WIDTH, MMDiTSizes
from megatron_ext.video.model.linear import mark_replicated
from megatron_ext.video.model.tokens import TokenRange


class Modulation(torch.nn.Linear):
    """``Linear(SiLU(vec))``, cut into parts of width h in the order shift, scale, gate, shift ...

    Args:
        num_parts: 6 for a stream of a double block, 3 for a single block, 2 before the last layer.
        zero: start at zero.
    """

    def __init__(self, config: TransformerConfig, num_parts: int, *, zero: bool) -> None:
        super().__init__(config.hidden_size, num_parts * config.hidden_size)
        self.num_parts = num_parts
        if zero:
            start_at_zero(self)
        mark_replicated(self, config)

    def parts(self, vec: Tensor) -> tuple[Tensor, ...]:
        """``[b, h]`` to ``num_parts`` tensors ``[b, h]``, which broadcast over ``[s, b, h]``."""
        return self(F.silu(vec)).chunk(self.num_parts, dim=-1)  # type: ignore[no-any-return]


def start_at_zero(linear: torch.nn.Linear) -> None:
    """Zero weight and bias; `initialize_by_name` leaves layers of one constant as they are."""
    torch.nn.init.zeros_(linear.weight)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)


def mark_new_branch(module: torch.nn.Module) -> None:
    """Let a branch that starts at zero be missing in a checkpoint that gives weights only."""
    for parameter in module.parameters():
        parameter.new_branch = True  # type: ignore[attr-defined]


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``(1 + scale) * LN(x) + shift``, LN without learned parameters.

    Args:
        x: ``[s, b, h]``.
        shift: ``[b, h]``.
        scale: ``[b, h]``.
    """
    return (1 + scale) * F.layer_norm(x, x.shape[-1:], eps=EPSILON) + shift


modulated_alone = compiled(modulated)


MAX_PERIOD = 10_000.0
TIME_FACTOR = 1000.0


def timestep_sinusoid(u: Tensor) -> Tensor:
    """Sinusoid of ``1000 u``: 128 cosines, then the sines of the same angles, in float32.

    The frequencies are ``exp(-ln(10000) j / 128)``. A timestep must come in float32: rounded to
    bfloat16 before, 1000 u would have steps of 4 between 512 and 1024.

    Args:
        u: ``[b]``, timesteps from 0 to 1 or guidance strengths.

    Returns:
        ``[b, 256]``.
    """
    half = TIMESTEP_WIDTH // 2
    steps = torch.arange(half, dtype=torch.float32, device=u.device)
    frequencies = torch.exp(-math.log(MAX_PERIOD) * steps / half)
    angles = (TIME_FACTOR * u.float())[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class VectorEmbedder(torch.nn.Module):
    """Linear, SiLU, Linear: ``[b, width]`` to ``[b, h]``."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_in = torch.nn.Linear(width, hidden_size)
        self.linear_out = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, width]`` to ``[b, h]``, in the dtype of the weights."""
        x = x.to(self.linear_in.weight.dtype)
        return self.linear_out(F.silu(self.linear_in(x)))  # type: ignore[no-any-return]


class Embedding(MegatronModule):  # type: ignore[misc]
    """What the first stage does with the inputs.

    The branch of the condition starts at zero, so that it changes nothing when it is added to a
    model trained without.
    """

    def __init__(
        self, config: TransformerConfig, sizes: MMDiTSizes, tp_group: ProcessGroup
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        h = sizes.hidden_size
        self.img_in = torch.nn.Linear(sizes.token_width, h)
        self.txt_in = torch.nn.Linear(sizes.text_width, h)
        self.time_in = VectorEmbedder(TIMESTEP_WIDTH, h)
        self.pooled_in = VectorEmbedder(sizes.pooled_width, h)
        self.guidance_in = VectorEmbedder(TIMESTEP_WIDTH, h) if sizes.guidance_embed else None
        self.cond_in = torch.nn.Linear(sizes.cond_width, h) if sizes.cond_embed else None
        if self.cond_in is not None:
            start_at_zero(self.cond_in)
            mark_new_branch(self.cond_in)
        mark_replicated(self, config)

    def forward(self, given: Mapping[str, Any], held: TokenRange) -> tuple[Tensor, Tensor]:
        """Embed the tokens that this rank holds, and the vector that modulates every block.

        Args:
            given: inputs of `MMDiT.forward` by name, checked.
            held: which of the tokens to embed.

        Returns:
            Text before image tokens, ``[s, b, h]``, and vec, ``[b, h]``.
        """
        dtype = self.img_in.weight.dtype
        image = self.img_in(given["img"][:, held.image].to(dtype))
        if self.cond_in is not None:
            image = image + self.cond_in(given["cond"][:, held.image].to(dtype))
        text = self.txt_in(given["txt"][:, held.text].to(dtype))
        vec = self.time_in(timestep_sinusoid(given["timesteps"])) + self.pooled_in(given["y_vec"])
        if self.guidance_in is not None:
            vec = vec + self.guidance_in(timestep_sinusoid(given["guidance"]))
        return torch.cat((text, image), dim=1).transpose(0, 1), vec
