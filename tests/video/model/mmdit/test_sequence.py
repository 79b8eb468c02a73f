"""Which tokens a rank holds."""

from __future__ import annotations

import pytest

from megatron_ext.errors import DataError
from megatron_ext.video.model.tokens import TokenRange


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


def test_a_part_may_hold_text_alone() -> None:
    first = TokenRange.whole(16, 48).part(0, 4)
    assert (first.local_text, first.image) == (16, slice(0, 0))


def test_parts_of_parts() -> None:
    """Those of tensor-parallel ranks follow one another within the context-parallel rank's."""
    whole = TokenRange.whole(10, 46)
    nested = [whole.part(c, 2).part(t, 2) for c in range(2) for t in range(2)]
    assert nested == [whole.part(i, 4) for i in range(4)]


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(DataError, match="8 text and 49 image tokens gives a part of 57 tokens"):
        TokenRange.whole(8, 49).part(0, 2)
