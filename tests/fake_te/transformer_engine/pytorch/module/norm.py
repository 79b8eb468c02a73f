"""Norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, kind: str, zero_centered: bool
) -> Tensor:
    """Normalize over the last dimension, in fp32."""
    gain = weight.float() + 1 if zero_centered else weight.float()
    full = x.float()
    if kind == "RMSNorm":
        return torch.nn.functional.rms_norm(full, gain.shape, gain, eps).to(x.dtype)
    offset = None if bias is None else bias.float()
    return torch.nn.functional.layer_norm(full, gain.shape, gain, offset, eps).to(x.dtype)


class LayerNorm(torch.nn.Module):
    """Layer norm, and what an RMS norm shares with it."""

    kind = "LayerNorm"

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        size, self.eps, self.zero_centered = hidden_size, eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(size, dtype=params_dtype))
        self.bias: Any = None
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(size, dtype=params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[s, b, h]``."""
        return normalize(
            x, self.weight, self.bias, self.eps, kind=self.kind, zero_centered=self.zero_centered
        )


class RMSNorm(LayerNorm):
    """RMS norm."""

    kind = "RMSNorm"
