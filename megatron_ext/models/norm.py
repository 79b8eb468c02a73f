"""Torch norms that work under sequence parallelism and with a zero-centred gain.

megatron-core's wrapped torch norms refuse both; these mark their parameters instead, so that
core sums their gradients over the tensor-parallel ranks that each saw a part of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.errors import ConfigError


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm over the last axis, ``[..., h]`` to ``[..., h]`` (Ba et al., arXiv:1607.06450).

    With ``zero_centered`` the stored weight is the gain minus one (``--apply-layernorm-1p``).
    """

    def __init__(self, hidden_size: int, eps: float, *, zero_centered: bool) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        _finish(self, zero_centered)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        return F.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last axis, ``[..., h]`` to ``[..., h]`` (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float, *, zero_centered: bool) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        _finish(self, zero_centered)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def _finish(norm: torch.nn.Module, zero_centered: bool) -> None:
    if zero_centered:
        torch.nn.init.zeros_(norm.weight)  # type: ignore[arg-type]


NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class Norm:
    """Builds the norm that a TransformerConfig names; takes megatron-core's arguments.

    Raises:
        ConfigError: a normalization other than LayerNorm and RMSNorm.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> torch.nn.Module:
        if config.normalization not in NORMS:
            raise ConfigError(
                f"`--normalization` ({config.normalization}) must be LayerNorm or RMSNorm with "
                "the torch layers."
            )
        norm = NORMS[config.normalization](
            hidden_size, eps, zero_centered=config.layernorm_zero_centered_gamma
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
