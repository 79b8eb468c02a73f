"""Videos as tokens, the tokens that ranks hold, and rotary positions over three axes."""

import re

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.layers.context_parallel import heads_to_sequence, sequence_to_heads
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.attention import frame_rotary_table, rotary_table, rotate
from megatron_ext.video.model.tokens import (
    FrameTokens,
    TokenRange,
    frames_first,
    pack,
    parts_first,
    position_ids,
    positions,
    tokens_per_frame,
    unpack,
)
from tests.ranks import ranks
from tests.video.networks.mmdit import plain


@pytest.mark.parametrize(
    ("shape", "patch_size"), [((2, 16, 3, 4, 6), 2), ((1, 4, 5, 8, 8), 2), ((2, 8, 2, 3, 5), 1)]
)
def test_unpacking_is_the_exact_inverse(shape: tuple[int, ...], patch_size: int) -> None:
    x = torch.randn(shape)
    assert torch.equal(unpack(pack(x, patch_size), shape[2:], patch_size), x)  # type: ignore[arg-type]


def test_order_of_tokens_and_features() -> None:
    b, c, t, h, w, p = 2, 3, 4, 6, 8, 2
    x = torch.arange(b * c * t * h * w).view(b, c, t, h, w)
    tokens, positions = pack(x, p), position_ids((t, h, w), p)
    assert tokens.shape == (b, t * 3 * 4, c * 4) and positions.shape == (t * 3 * 4, 3)
    number = 0
    for frame in range(t):
        for row in range(h // p):
            for column in range(w // p):
                assert positions[number].tolist() == [frame, row, column]
                for feature in range(c * p * p):
                    channel, rest = divmod(feature, p * p)
                    y, z = row * p + rest // p, column * p + rest % p
                    assert torch.equal(tokens[:, number, feature], x[:, channel, frame, y, z])
                number += 1


def test_width_and_number_of_tokens() -> None:
    for height, width, number in ((192, 336, 252), (256, 256, 256), (576, 1024, 2304)):
        assert tokens_per_frame((33, height // 8, width // 8), 2) == number
    assert pack(torch.zeros(1, 16, 1, 2, 2), 2).size(2) == 64


@pytest.mark.parametrize(("num_text", "num_image", "size"), [(8, 48, 4), (20, 12, 4), (0, 6, 3)])
def test_parts_are_equal_and_make_the_whole(num_text: int, num_image: int, size: int) -> None:
    joint = [("text", i) for i in range(num_text)] + [("image", i) for i in range(num_image)]
    held = []
    for rank in range(size):
        part = TokenRange.whole(num_text, num_image).part(rank, size)
        text = joint[:num_text][part.text]
        image = joint[num_text:][part.image]
        assert len(part) == len(joint) // size == len(text) + len(image)
        assert part.local_text == len(text)
        held += text + image
    assert held == joint


def test_parts_of_text_alone_and_parts_of_parts() -> None:
    first = TokenRange.whole(16, 48).part(0, 4)
    assert (first.local_text, first.image) == (16, slice(0, 0))
    whole = TokenRange.whole(10, 46)
    nested = [whole.part(c, 2).part(t, 2) for c in range(2) for t in range(2)]
    assert nested == [whole.part(i, 4) for i in range(4)]


@ranks(cp=4)
def test_heads_are_traded_for_sequence_and_back(context: ParallelContext) -> None:
    group = context.pgs.cp
    full = torch.arange(8 * 2 * 8 * 3, dtype=torch.float32).view(8, 2, 8, 3)
    own = full.chunk(4)[group.rank()].clone().requires_grad_()
    traded = heads_to_sequence(own, group, zigzag=False)
    assert torch.equal(traded, full.chunk(4, dim=2)[group.rank()])
    back = sequence_to_heads(traded, group, zigzag=False)
    assert torch.equal(back, own)
    (back * full.chunk(4)[group.rank()]).sum().backward()
    assert torch.equal(own.grad, full.chunk(4)[group.rank()])  # type: ignore[arg-type]


def test_ranks_hold_every_token_of_every_frame_once() -> None:
    places = [FrameTokens(6, 2, 4, 6, cp, 2, tp, 3) for cp in range(2) for tp in range(3)]
    assert [token for x in places for token in range(24)[x.held]] == list(range(24))
    assert FrameTokens(6, 2, 4, 6, 1, 2, 2, 3).cp_slice == slice(12, 24)
    # Two ranks hold half of the four tokens of each of three frames.
    video = torch.arange(3 * 4 * 2).view(3, 4, 2)
    parts = torch.cat([video[:, :2].flatten(0, 1), video[:, 2:].flatten(0, 1)])
    assert torch.equal(frames_first(parts, 2, 3), video)
    assert torch.equal(parts_first(video, 2), parts)
    tokens = FrameTokens(first_frame=6, num_frames=2, rows=2, columns=3, cp_rank=1, cp_size=2)
    want = [[[f, 1, c] for c in range(3)] for f in (6, 7)]
    assert positions(tokens, torch.device("cpu")).tolist() == want


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(DataError, match=r"Latents of 7 x 8 must be divisible by the patch size"):
        pack(torch.zeros(1, 4, 1, 7, 8), 2)
    for shape in ((1, 7, 16), (1, 8, 18)):
        with pytest.raises(DataError, match=re.escape(f"{shape} must be [b, 8, c * 4]")):
            unpack(torch.zeros(shape), (2, 4, 4), 2)
    with pytest.raises(DataError, match="8 text and 49 image tokens gives a part of 57 tokens"):
        TokenRange.whole(8, 49).part(0, 2)
    with pytest.raises(DataError, match=r"a frame of 2 x 3 = 6 tokens must be divisible by the"):
        FrameTokens(0, 1, 2, 3, 0, 2, 0, 2)


AXES, D, THETA = (4, 6, 6), 16, 10_000.0


def ids_and_heads(s: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 30, (2, s, 3), generator=generator)
    q, k = (torch.randn(s, 2, 4, D, generator=generator) for _ in range(2))
    return ids, q, k


def test_rotary_pairs_turn_as_complex_numbers_in_float32() -> None:
    ids, q, _ = ids_and_heads()
    ids[:, :5] = 0
    want = plain.turn(q.double().permute(1, 2, 0, 3), ids, AXES, THETA).permute(2, 0, 1, 3)
    got = rotate(q, rotary_table(ids, AXES, D, THETA))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    # Ids of zero, those of text, turn nothing.
    assert torch.equal(got[:5], q[:5]) and not torch.isclose(got[5:], q[5:]).all()
    with pytest.raises(ConfigError, match=r"`axes_dim` \(4, 6, 8\) must be 3 widths"):
        rotary_table(ids, (4, 6, 8), D, THETA)
    ids, q, _ = ids_and_heads()
    table = rotary_table(ids, AXES, D, THETA)
    assert table[0].dtype == torch.float32
    low = q.bfloat16()
    got = rotate(low, table)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(low.float(), table).bfloat16())
    ids, q, _ = ids_and_heads()
    cos, sin = rotary_table(ids, AXES, D, THETA)
    first, second = q.chunk(2, dim=-1)
    half_split = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    order = torch.stack((torch.arange(D // 2), torch.arange(D // 2) + D // 2), dim=1).flatten()
    torch.testing.assert_close(rotate(q[..., order], (cos, sin)), half_split[..., order])


def test_scores_depend_on_the_distance_of_frames_at_any_length() -> None:
    """Multiply queries and keys at frames 0, 1,000 and 100,000, beyond a table of 1,024."""
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
