"""Rotary positions of long videos."""

from __future__ import annotations

import torch

from megatron_ext.video.model.rotary import frame_rotary_table, rotate

AXES = (8, 4, 4)


def positions(first: int) -> torch.Tensor:
    """Of three frames of one token each, ``[3, 1, 3]``."""
    frames = torch.arange(first, first + 3)
    return torch.stack((frames, torch.full_like(frames, 2), torch.full_like(frames, 1)), -1)[
        :, None
    ]


def test_trap_14_scores_depend_on_the_distance_of_frames_at_any_length() -> None:
    """Queries times keys at frames 0, 1,000 and 100,000, where a table of 1,024 had ended."""
    q, k = torch.randn(2, 3, 1, 1, 1, sum(AXES), generator=torch.Generator().manual_seed(1))
    found = []
    for first in (0, 1000, 100_000):
        table = frame_rotary_table(positions(first), AXES, 10_000.0, torch.float32)
        turned = [rotate(x, table).flatten(1) for x in (q, k)]
        found.append(turned[0] @ turned[1].T)
    assert not torch.allclose(found[0], found[0].T)  # the distance matters at all
    for scores in found[1:]:
        torch.testing.assert_close(scores, found[0], rtol=0, atol=2e-6)
