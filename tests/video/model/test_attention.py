"""The attention of video networks feeds no copies to a kernel."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.attention import _attend as joint_attention
from megatron_ext.video.model.wan.attention import AttentionPlan, FrameAttention
from tests.layers.test_sdpa import B, Copies, D, N, S, through
from tests.ranks import ranks


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_joint_attention_makes_no_mask_and_no_copy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of a single-stream block are a view of its fused projection."""
    through(name, monkeypatch)
    query, key, value = torch.empty(S, B, N, 3, D, device="meta", dtype=torch.bfloat16).unbind(3)
    query, key = query.contiguous(), key.contiguous()
    with Copies() as copies:
        out = joint_attention(query, key, value).flatten(2)
    assert out.is_contiguous() and copies.found == []


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@ranks()
def test_bidirectional_frames_are_attended_without_copies(
    context: ParallelContext, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    through(name, monkeypatch)
    frames = torch.empty(3, S, B, N, D, device="meta", dtype=torch.bfloat16)
    attention = FrameAttention(context.pgs.cp, trades_heads=False)
    with Copies() as copies:
        out = attention(frames, (frames, frames), (), AttentionPlan.bidirectional(3))
    assert out.is_contiguous() and copies.found == []
