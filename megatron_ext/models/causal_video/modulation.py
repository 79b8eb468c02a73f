"""Shift, scale and gate of each frame: what its timestep gives, plus a learned table."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.models.compiled import compiled
from megatron_ext.models.mmdit.linear import mark_replicated
from megatron_ext.models.mmdit.modulation import modulated


class ModulationTable(torch.nn.Module):
    """A learned ``[num_parts, h]``, added to the modulation that the timesteps give.

    Args:
        config: of the run.
        num_parts: 6 for a block (shift, scale, gate of the attention, then of the feed-forward
            layers), 2 for the head.
    """

    def __init__(self, config: TransformerConfig, num_parts: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_parts, config.hidden_size))
        self.reset_parameters()
        mark_replicated(self, config)

    def reset_parameters(self) -> None:
        """Normal with the standard deviation ``1 / sqrt(h)``."""
        torch.nn.init.normal_(self.weight, std=self.weight.size(-1) ** -0.5)

    def forward(self, time: Tensor) -> tuple[Tensor, ...]:
        """``[f, b, num_parts, h]`` or ``[f, b, 1, h]`` to ``num_parts`` tensors ``[f, 1, b, h]``.

        f is 1 if all frames have one timestep, else the number of frames.
        """
        return (self.weight + time).unsqueeze(1).unbind(3)


def modulated_frames(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``(1 + scale) * LN(x) + shift`` of ``[s, b, h]``, s the tokens of frame after frame.

    Args:
        x: ``[s, b, h]``.
        shift: ``[f, 1, b, h]``.
        scale: ``[f, 1, b, h]``.
    """
    return modulated(_frames(x, shift), shift, scale).flatten(0, 1)


modulated_frames_alone = compiled(modulated_frames)


def add_gated(x: Tensor, output: Tensor, gate: Tensor) -> Tensor:
    """``x + gate * output``, both ``[s, b, h]``, the gate ``[f, 1, b, h]``."""
    return x + (gate * _frames(output, gate)).flatten(0, 1)


def _frames(x: Tensor, part: Tensor) -> Tensor:
    """``[s, b, h]`` as ``[f, s / f, b, h]``."""
    return torch.unflatten(x, 0, (part.size(0), -1))
