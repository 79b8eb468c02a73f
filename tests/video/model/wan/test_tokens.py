"""Which tokens of a frame a rank holds, and the orders in which they come."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.errors import DataError
from megatron_ext.video.model.tokens import FrameTokens, frames_first, parts_first, positions


def test_ranks_hold_every_token_of_every_frame_once() -> None:
    held = [
        token
        for cp in range(2)
        for tp in range(3)
        for token in range(24)[FrameTokens(6, 2, 4, 6, cp, 2, tp, 3).held]
    ]
    assert held == list(range(24))
    assert FrameTokens(6, 2, 4, 6, 1, 2, 2, 3).cp_slice == slice(12, 24)


def test_frames_of_parts_and_back() -> None:
    """Two ranks hold half of the four tokens of each of three frames."""
    video = torch.arange(3 * 4 * 2).view(3, 4, 2)
    parts = torch.cat([video[:, :2].flatten(0, 1), video[:, 2:].flatten(0, 1)])
    assert torch.equal(frames_first(parts, 2, 3), video)
    assert torch.equal(parts_first(video, 2), parts)


def test_positions_are_absolute_and_those_of_the_chunk() -> None:
    tokens = FrameTokens(first_frame=6, num_frames=2, rows=2, columns=3, cp_rank=1, cp_size=2)
    want = [[[f, 1, c] for c in range(3)] for f in (6, 7)]
    assert positions(tokens, torch.device("cpu")).tolist() == want


def test_frames_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(DataError, match=r"a frame of 2 x 3 = 6 tokens must be divisible by the"):
        FrameTokens(0, 1, 2, 3, 0, 2, 0, 2)
