"""Which frames a block sees, against the formula of the specification and by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.model.wan.attention import FrameWindow
from tests.video.model.wan.plain import frame_mask


def seen(window: FrameWindow, start: int) -> list[int]:
    return [frame for part in window.visible(start) for frame in part]


def test_the_window_of_the_original() -> None:
    """Three sinks and nine local frames: six past ones and the block."""
    window = FrameWindow(block=3, window=12, sink=3)
    assert seen(window, 0) == [0, 1, 2]
    assert seen(window, 9) == list(range(12))
    assert seen(window, 12) == [0, 1, 2, *range(6, 15)]
    assert seen(window, 237) == [0, 1, 2, *range(231, 240)]


@pytest.mark.parametrize(
    "sizes", [(3, 12, 3), (3, 6, 3), (3, 6, 0), (3, 12, 0), (1, 4, 2), (2, 9, 3), (3, 14, 7)]
)
def test_every_block_sees_what_the_formula_says(sizes: tuple[int, int, int]) -> None:
    window = FrameWindow(*sizes)
    mask = frame_mask(range(42), sizes)
    for start in window.blocks(0, 42):
        assert seen(window, start) == mask[start].nonzero().flatten().tolist()
        assert len(seen(window, start)) <= window.window


def test_capacity_is_window_and_chunk_without_a_block() -> None:
    window = FrameWindow()
    assert [window.capacity_for(n) for n in (3, 18, 21)] == [12, 27, 30]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block": 0}, r"`block` \(0\) must be 1 frame or more"),
        ({"sink": -1}, r"`sink` \(-1\) must be 0 frames or more"),
        ({"window": 5}, r"`window` \(5\) must be at least `sink` \+ `block` \(3 \+ 3 = 6\)"),
    ],
)
def test_windows_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrameWindow(**settings)


def test_frames_before_the_first_are_refused() -> None:
    with pytest.raises(DataError, match=r"`first_frame` \(-3\) must be a multiple"):
        FrameWindow().blocks(-3, 3)
