"""Core attention by torch's SDPA."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import rope
from transformer_engine.record import options_of, record

__all__ = ["DotProductAttention", "rope"]


class DotProductAttention(torch.nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        layer = options_of("DotProductAttention", given)["layer_number"]
        record("DotProductAttention", layer=layer)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
    ) -> Tensor:
        assert attn_mask_type == "causal"
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)
