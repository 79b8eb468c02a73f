"""Core attention by torch's SDPA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import rope
from transformer_engine.record import record

__all__ = ["DotProductAttention", "rope"]


class DotProductAttention(torch.nn.Module):
    """Causal attention on one rank."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        super().__init__()
        groups = [cp_group] if not isinstance(cp_group, list) else cp_group
        record(
            "DotProductAttention",
            heads=num_attention_heads,
            groups=num_gqa_groups,
            mask=attn_mask_type,
            layer=layer_number,
            cp=None if cp_group is None else [group.size() for group in groups],
            cp_comm_type=cp_comm_type,
            window_size=window_size,
            softmax_type=softmax_type,
        )

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
    ) -> Tensor:
        """Attend: queries ``[s, b, n, d]``, keys and values ``[s, b, g, d]`` to ``[s, b, n d]``."""
        assert attn_mask_type == "causal"
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)
