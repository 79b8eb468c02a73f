"""Sizes of the networks, their parameters, blocks dealt to stages, and windows of frames."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.window import FrameBlocks
from megatron_ext.video.model.chunk import stage_blocks as wan_stage_blocks
from megatron_ext.video.model.joint_blocks import JointOptions, stage_blocks
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.mmdit.config import SIZES as MMDIT
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.config import SIZES as WAN
from tests.video.networks.mmdit.plain import PlainMMDiT
from tests.video.networks.wan.plain import frame_mask, num_parameters


def test_11b_is_open_sora_2_and_1_3b_and_14b_are_wan() -> None:
    sizes = MMDIT["11b"]
    with torch.device("meta"):
        model = PlainMMDiT(sizes)
    assert num_parameters(sizes) / 1e9 == pytest.approx(11.89, abs=0.005)
    for blocks, want in ((model.double_blocks, 6.46), (model.single_blocks, 5.38)):
        found = sum(p.numel() for p in blocks.parameters()) / 1e9
        assert found == pytest.approx(want, abs=0.005)
    assert sizes.cond_width == 68 and sizes.token_width == 64
    small, large = WAN["1.3b"], WAN["14b"]
    assert (small.hidden_size, small.num_heads, small.num_blocks) == (1536, 12, 30)
    assert (large.hidden_size, large.num_heads, large.num_blocks) == (5120, 40, 40)
    assert small.axes_dim == large.axes_dim == (44, 42, 42)
    assert small.token_width == 64
    assert num_parameters(small) == 1_418_996_800
    assert num_parameters(large) == 14_288_491_584


NAMED = {
    # Hidden size, heads, rotary axes, double and single blocks, channels, text and pooled width.
    "tiny": (64, 4, (4, 6, 6), 2, 2, 4, 32, 16),
    "small": (384, 6, (16, 24, 24), 4, 8, 16, 512, 768),
    "base": (768, 12, (16, 24, 24), 6, 12, 16, 4096, 768),
    "large": (1536, 16, (16, 40, 40), 8, 16, 16, 4096, 768),
    "3b": (2048, 16, (16, 56, 56), 12, 24, 16, 4096, 768),
    "11b": (3072, 24, (16, 56, 56), 19, 38, 16, 4096, 768),
}
NAMED_WAN = {
    # Hidden size, heads, width of feed-forward layers, blocks, channels, text width.
    "tiny": (64, 4, 128, 2, 4, 32),
    "mini": (128, 4, 512, 4, 16, 64),
    "small": (384, 6, 1536, 8, 16, 512),
    "base": (768, 12, 3072, 16, 16, 4096),
    "1.3b": (1536, 12, 8960, 30, 16, 4096),
    "5b": (3072, 24, 14336, 30, 48, 4096),
    "14b": (5120, 40, 13824, 40, 16, 4096),
}


def test_a_name_always_means_the_same_network() -> None:
    """Checkpoints hold the name of a size and the weights, of which heads and axes tell nothing."""
    names = "hidden_size num_heads axes_dim num_double_blocks num_single_blocks channels text_width"
    mmdit = [*names.split(), "pooled_width"]
    assert {k: tuple(getattr(x, n) for n in mmdit) for k, x in MMDIT.items()} == NAMED
    wan = "hidden_size num_heads ffn_size num_blocks channels text_width".split()
    assert {k: tuple(getattr(x, n) for n in wan) for k, x in WAN.items()} == NAMED_WAN
    for sizes in (*MMDIT.values(), *WAN.values()):
        assert (sizes.patch_size, sizes.rope_theta) == (2, 10_000.0)


def test_the_smallest_head_rotates_a_pair_for_each_axis() -> None:
    assert dataclasses.replace(WAN["tiny"], hidden_size=24).axes_dim == (2, 2, 2)
    assert dataclasses.replace(WAN["tiny"], hidden_size=64).axes_dim == (8, 4, 4)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (MMDIT, {"hidden_size": 66}, r"`hidden_size` \(66\) must be divisible by `num_heads` \(4\)"),
    (MMDIT, {"axes_dim": (4, 6, 8)}, r"sum is the size of a head, hidden_size / num_heads \(16\)"),
    (MMDIT, {"axes_dim": (5, 5, 6)}, r"`axes_dim` \(5, 5, 6\) must be even"),
    (MMDIT, {"axes_dim": (8, 8)}, "must be three widths"),
    (MMDIT, {"num_double_blocks": 0, "num_single_blocks": 0}, "must be 1 or more; give blocks"),
    (WAN, {"hidden_size": 66}, r"`hidden_size` \(66\) must be divisible by `num_heads` \(4\)"),
    (WAN, {"hidden_size": 20}, r"hidden_size / num_heads \(5\), must be even and 6 or more"),
    (WAN, {"hidden_size": 16}, r"hidden_size / num_heads \(4\), must be even and 6 or more"),
    (WAN, {"num_blocks": 0}, r"`num_blocks` \(0\) must be 1 or more"),
]


@pytest.mark.parametrize(("sizes", "change", "message"), REFUSED)
def test_refused_sizes(sizes: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(sizes["tiny"], **change)


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (JointOptions, {"recompute_single_blocks": -2}, r"\(-2\) must be 0 or more"),
        (JointOptions, {"double_block_cost": 0.0}, r"`double_block_cost` \(0.0\) must be a posit"),
        (VideoDiTOptions, {"recompute_blocks": -2}, r"`recompute_blocks` \(-2\) must be 0 or mor"),
        *(
            (kind, {"cp_comm_type": "ring"}, r"\(ring\) must be p2p, all_gather or a2a")
            for kind in (JointOptions, VideoDiTOptions)
        ),
    ],
)
def test_wrong_options_are_refused(options: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**change)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("double_cost", [0.7, 1.0, 2.4])
@pytest.mark.parametrize(("double", "single"), [(2, 2), (3, 5), (0, 6), (5, 0)])
def test_no_deal_is_better(double: int, single: int, double_cost: float, num_stages: int) -> None:
    sizes = dataclasses.replace(MMDIT["tiny"], num_double_blocks=double, num_single_blocks=single)
    costs = [double_cost] * double + [1.0] * single
    got = stage_blocks(sizes, num_stages, double_cost)
    assert [number for stage in got for number in stage] == list(range(len(costs)))
    every = [
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
    ]
    assert len(got) == num_stages and all(got)
    assert max(sum(costs[i] for i in stage) for stage in got) == pytest.approx(min(every))


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(40, 8), (30, 4), (2, 2), (5, 3)])
def test_stages_of_wan_hold_about_equal_numbers_of_blocks(num_blocks: int, num_stages: int) -> None:
    stages = wan_stage_blocks(num_blocks, num_stages)
    assert [number for stage in stages for number in stage] == list(range(num_blocks))
    counts = [len(stage) for stage in stages]
    assert max(counts) - min(counts) <= 1


def test_11b_on_four_and_eight_stages_and_more_stages_than_blocks() -> None:
    sizes = MMDIT["11b"]
    assert [len(s) for s in stage_blocks(sizes, 8, 1.0)] == [7, 7, 7, 7, 7, 7, 7, 8]
    assert [len(s) for s in stage_blocks(sizes, 4, 2.4)] == [9, 9, 19, 20]
    with pytest.raises(ConfigError, match=r"5 stages, but the model only 4 blocks \(2 double"):
        stage_blocks(MMDIT["tiny"], 5, 1.0)
    with pytest.raises(ConfigError, match="3 stages, but the model only 2 blocks; use a smaller"):
        wan_stage_blocks(2, 3)


def seen(window: FrameWindow, start: int) -> list[int]:
    return [frame for part in window.visible(start) for frame in part]


def test_the_window_of_the_original() -> None:
    """See three sinks and nine local frames: six past ones and the block."""
    window = FrameWindow(block=3, window=12, sink=3)
    assert [window.capacity_for(n) for n in (3, 18, 21)] == [12, 27, 30]
    assert seen(window, 0) == [0, 1, 2]
    assert seen(window, 9) == list(range(12))
    assert seen(window, 12) == [0, 1, 2, *range(6, 15)]
    assert seen(window, 237) == [0, 1, 2, *range(231, 240)]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "sizes", [(3, 12, 3), (3, 6, 3), (3, 6, 0), (3, 12, 0), (1, 4, 2), (2, 9, 3), (3, 14, 7)]
)
def test_every_block_sees_what_the_formula_says(sizes: tuple[int, int, int], alone: bool) -> None:
    window = FrameWindow(*sizes, first_alone=alone)
    mask = frame_mask(range(42 + alone), (*sizes, int(alone)))
    for start in window.blocks(0, 42 + alone):
        assert seen(window, start) == mask[start].nonzero().flatten().tolist()
        assert len(seen(window, start)) <= window.window


@pytest.mark.parametrize(
    ("alone", "starts"), [(False, [0, 3, 6, 9, 12]), (True, [0, 1, 4, 7, 10, 13])]
)
def test_blocks_begin_where_they_are_counted_to(alone: bool, starts: list[int]) -> None:
    blocks = FrameBlocks(3, first_alone=alone)
    end = starts[-1]
    assert [*blocks.blocks(0, end)] == starts[:-1] and blocks.count(end) == len(starts) - 1
    assert [*blocks.blocks(starts[2], end - starts[2])] == starts[2:-1]
    assert [*blocks.blocks(0, 0)] == [*blocks.blocks(end, 0)] == []
    for start, after in itertools.pairwise(starts):
        assert blocks.size_of(start) == after - start
    for frame in range(end):
        assert blocks.begins(frame) == (frame in starts)
        assert blocks.at_or_before(frame) == max(x for x in starts if x <= frame)
        assert blocks.at_or_after(frame) == min(x for x in starts if x >= frame)
    assert not blocks.begins(-3)


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
    with pytest.raises(DataError, match=r"`first_frame` \(-3\) must be a multiple"):
        FrameWindow().blocks(-3, 3)
