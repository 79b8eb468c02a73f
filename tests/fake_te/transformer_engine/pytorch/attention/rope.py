"""Rotary positions."""

import torch
from torch import Tensor

from transformer_engine.record import record


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    record("apply_rotary_pos_emb", fused=fused, interleaved=interleaved)
    first, second = t.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (t * freqs.cos() + turned * freqs.sin()).to(t.dtype)
