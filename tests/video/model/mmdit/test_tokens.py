"""Packing against indices written out by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.errors import DataError
from megatron_ext.video.model.tokens import (
    condition_width,
    pack,
    position_ids,
    token_width,
    tokens_per_frame,
    unpack,
)


@pytest.mark.parametrize(
    ("shape", "patch_size"), [((2, 16, 3, 4, 6), 2), ((1, 4, 5, 8, 8), 2), ((2, 8, 2, 3, 5), 1)]
)
def test_criterion_1_unpacking_is_the_exact_inverse(
    shape: tuple[int, ...], patch_size: int
) -> None:
    x = torch.randn(shape)
    assert torch.equal(unpack(pack(x, patch_size), shape[2:], patch_size), x)  # type: ignore[arg-type]


def test_criterion_1_order_of_tokens_and_features() -> None:
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


def test_criterion_1_widths() -> None:
    assert token_width(16, 2) == pack(torch.zeros(1, 16, 1, 2, 2), 2).size(2) == 64
    assert condition_width(16, 2) == 68
    assert token_width(128, 1) == 128 and condition_width(128, 1) == 129


@pytest.mark.parametrize(
    ("pixels", "tokens"), [((192, 336), 252), ((256, 256), 256), ((576, 1024), 2304)]
)
def test_tokens_of_a_frame(pixels: tuple[int, int], tokens: int) -> None:
    assert tokens_per_frame((33, pixels[0] // 8, pixels[1] // 8), 2) == tokens


def test_sizes_that_patches_do_not_fill_are_refused() -> None:
    with pytest.raises(DataError, match=r"Latents of 7 x 8 must be divisible by the patch size"):
        pack(torch.zeros(1, 4, 1, 7, 8), 2)
    with pytest.raises(DataError, match=r"\(1, 7, 16\) must be \[b, 8, c \* 4\]"):
        unpack(torch.zeros(1, 7, 16), (2, 4, 4), 2)
    with pytest.raises(DataError, match=r"\(1, 8, 18\) must be \[b, 8, c \* 4\]"):
        unpack(torch.zeros(1, 8, 18), (2, 4, 4), 2)
