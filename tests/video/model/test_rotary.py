"""Rotary positions over three axes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.model.rotary import frame_rotary_table, rotary_table, rotate
from tests.video.model.mmdit import plain

AXES, D, THETA = (4, 6, 6), 16, 10_000.0


def ids_and_heads(s: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 30, (2, s, 3), generator=generator)
    q, k = (torch.randn(s, 2, 4, D, generator=generator) for _ in range(2))
    return ids, q, k


def test_text_rows_stay() -> None:
    """Ids of zero turn nothing, to the bit."""
    ids, q, _ = ids_and_heads()
    ids[:, :5] = 0
    turned = rotate(q, rotary_table(ids, AXES, D, THETA))
    assert torch.equal(turned[:5], q[:5])
    assert not torch.isclose(turned[5:], q[5:]).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scores_depend_on_distances(axis: int) -> None:
    """q.k stays when all ids of an axis shift alike, and changes when one side's do."""
    ids, q, k = ids_and_heads()
    shifted = ids.clone()
    shifted[..., axis] += 17

    def scores(of_q: Tensor, of_k: Tensor) -> Tensor:
        turned = rotate(q, rotary_table(of_q, AXES, D, THETA))
        others = rotate(k, rotary_table(of_k, AXES, D, THETA))
        return torch.einsum("sbnd,tbnd->bnst", turned, others)

    torch.testing.assert_close(scores(shifted, shifted), scores(ids, ids), rtol=1e-4, atol=1e-4)
    assert (scores(shifted, ids) - scores(ids, ids)).abs().max() > 0.1


def test_axes_sum_to_the_head() -> None:
    ids, *_ = ids_and_heads()
    with pytest.raises(ConfigError, match=r"`axes_dim` \(4, 6, 8\) must be 3 widths"):
        rotary_table(ids, (4, 6, 8), D, THETA)


def test_adjacent_pairs_turn_as_complex_numbers() -> None:
    ids, q, _ = ids_and_heads()
    want = plain.turn(q.double().permute(1, 2, 0, 3), ids, AXES, THETA).permute(2, 0, 1, 3)
    got = rotate(q, rotary_table(ids, AXES, D, THETA))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_half_split_weights_fit_after_the_documented_permutation() -> None:
    """Feature j of the half-split layout is 2j here, and d/2 + j is 2j + 1."""
    ids, q, _ = ids_and_heads()
    cos, sin = rotary_table(ids, AXES, D, THETA)
    first, second = q.chunk(2, dim=-1)
    half_split = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    order = torch.stack((torch.arange(D // 2), torch.arange(D // 2) + D // 2), dim=1).flatten()
    torch.testing.assert_close(rotate(q[..., order], (cos, sin)), half_split[..., order])


def test_rotation_is_in_float32_and_gives_the_dtype_back() -> None:
    ids, q, _ = ids_and_heads()
    table = rotary_table(ids, AXES, D, THETA)
    assert table[0].dtype == torch.float32
    low = q.bfloat16()
    got = rotate(low, table)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(low.float(), table).bfloat16())


def test_scores_depend_on_the_distance_of_frames_at_any_length() -> None:
    """Queries times keys at frames 0, 1,000 and 100,000, where a table of 1,024 had ended."""
    axes = (8, 4, 4)
    q, k = torch.randn(2, 3, 1, 1, 1, sum(axes), generator=torch.Generator().manual_seed(1))
    found = []
    for first in (0, 1000, 100_000):
        positions = torch.tensor([[[first + i, 2, 1]] for i in range(3)])
        table = frame_rotary_table(positions, axes, THETA, torch.float32)
        turned = [rotate(x, table).flatten(1) for x in (q, k)]
        found.append(turned[0] @ turned[1].T)
    assert not torch.allclose(found[0], found[0].T)  # the distance matters at all
    for scores in found[1:]:
        torch.testing.assert_close(scores, found[0], rtol=0, atol=2e-6)
