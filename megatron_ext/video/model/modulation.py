"""Modulation by the embedded timestep: adaptive LayerNorm (adaLN, DiT, arXiv:2212.09748)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.layers.compiled import compiled
from megatron_ext.video.config.mmdit import EPSILON
from megatron_ext.video.model.linear import mark_replicated


class VectorEmbedder(torch.nn.Module):
    """Linear, SiLU, Linear: ``[b, width]`` to ``[b, h]``."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_in = torch.nn.Linear(width, hidden_size)
        self.linear_out = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[b, h]`` for ``[b, width]``, in the type of the weights."""
        x = x.to(self.linear_in.weight.dtype)
        return self.linear_out(F.silu(self.linear_in(x)))  # type: ignore[no-any-return]


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
        """Return ``num_parts`` tensors ``[b, h]`` for vec ``[b, h]``."""
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
    """Return ``(1 + scale) * LN(x) + shift``, with an LN that has no learned parameters.

    Args:
        x: ``[s, b, h]``.
        shift, scale: ``[b, h]``.
    """
    return (1 + scale) * F.layer_norm(x, x.shape[-1:], eps=EPSILON) + shift


modulated_alone = compiled(modulated)
