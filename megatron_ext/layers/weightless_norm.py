"""Norms without weights, and no norm at all, for layers that normalize otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def half_dtype(config: TransformerConfig) -> torch.dtype | None:
    """Return the dtype of the layers if it has 16 bits, else None."""
    dtype: torch.dtype = config.params_dtype
    return dtype if dtype in HALF else None


class WeightlessNorm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last axis, ``[..., h]`` to ``[..., h]``, without weights.

    OLMo 1 has such norms (arXiv:2402.00838, section 2.1).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.kind = config.normalization
        self.dtype = half_dtype(config)
        self.shape = (hidden_size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of ``x``, computed in float32 at least, in the dtype of the layers."""
        wide = x.float() if x.dtype in HALF else x
        if self.kind == "RMSNorm":
            normed = F.rms_norm(wide, self.shape, None, self.eps)
        else:
            normed = F.layer_norm(wide, self.shape, None, None, self.eps)
        return normed.to(self.dtype or x.dtype)


class Unnormalized(torch.nn.Module):
    """Stands where a layer has no norm; it returns its input in the dtype of the layers."""

    def __init__(self, config: TransformerConfig, **_unused: Any) -> None:
        super().__init__()
        self.dtype = half_dtype(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``; a residual stream in float32 becomes 16-bit if the layers are."""
        return x if self.dtype is None else x.to(self.dtype)
