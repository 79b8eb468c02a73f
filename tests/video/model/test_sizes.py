"""Sizes of the networks that fit together, their parameters, and blocks dealt to stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.mmdit import SIZES as MMDIT
from megatron_ext.video.config.wan import SIZES as WAN
from megatron_ext.video.model.mmdit.options import MMDiTOptions, stage_blocks
from megatron_ext.video.model.wan.options import VideoDiTOptions
from megatron_ext.video.model.wan.options import stage_blocks as wan_stage_blocks
from tests.video.model.mmdit.plain import PlainMMDiT
from tests.video.model.wan.plain import PlainVideoDiT


def counted(model: Callable[[Any], torch.nn.Module], sizes: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model(sizes).parameters())


@pytest.mark.parametrize("name", MMDIT)
@pytest.mark.parametrize("switches", [{}, {"cond_embed": True, "guidance_embed": True}])
def test_the_formula_counts_every_parameter_of_an_mmdit(
    name: str, switches: dict[str, bool]
) -> None:
    sizes = dataclasses.replace(MMDIT[name], qkv_bias=not switches, **switches)
    # The plain model's fused W1 always has a bias, also for queries, keys and values.
    spare = 0 if sizes.qkv_bias else 3 * sizes.hidden_size * sizes.num_single_blocks
    assert sizes.num_parameters == counted(PlainMMDiT, sizes) - spare


@pytest.mark.parametrize("name", WAN)
def test_the_formula_counts_every_parameter_of_wan(name: str) -> None:
    assert WAN[name].num_parameters == counted(PlainVideoDiT, WAN[name])


def test_11b_is_open_sora_2() -> None:
    """19 double blocks of 6.46 B in all, 38 single ones of 5.38 B, 11.89 B together."""
    sizes = MMDIT["11b"]
    with torch.device("meta"):
        model = PlainMMDiT(sizes)
    assert sizes.num_parameters / 1e9 == pytest.approx(11.89, abs=0.005)
    for blocks, want in ((model.double_blocks, 6.46), (model.single_blocks, 5.38)):
        found = sum(p.numel() for p in blocks.parameters()) / 1e9
        assert found == pytest.approx(want, abs=0.005)
    assert sizes.cond_width == 68 and sizes.token_width == 64


def test_1_3b_and_14b_are_wan() -> None:
    """Widths as published; 1,418,996,800 and 14,288,491,584 parameters."""
    small, large = WAN["1.3b"], WAN["14b"]
    assert (small.hidden_size, small.num_heads, small.num_blocks) == (1536, 12, 30)
    assert (large.hidden_size, large.num_heads, large.num_blocks) == (5120, 40, 40)
    assert small.axes_dim == large.axes_dim == (44, 42, 42)
    assert small.token_width == 64
    assert small.num_parameters == 1_418_996_800
    assert large.num_parameters == 14_288_491_584


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (MMDIT, {"hidden_size": 66}, r"`hidden_size` \(66\) must be divisible by `num_heads` \(4\)"),
    (MMDIT, {"axes_dim": (4, 6, 8)}, r"sum is the size of a head, hidden_size / num_heads \(16\)"),
    (MMDIT, {"axes_dim": (5, 5, 6)}, r"`axes_dim` \(5, 5, 6\) must be even"),
    (MMDIT, {"axes_dim": (8, 8)}, "must be three widths"),
    (MMDIT, {"num_heads": 0}, r"`num_heads` \(0\) must be 1 or more"),
    (MMDIT, {"num_double_blocks": -1}, r"`num_double_blocks` \(-1\) must be 0 or more"),
    (MMDIT, {"num_double_blocks": 0, "num_single_blocks": 0}, "must be 1 or more; give blocks"),
    (MMDIT, {"rope_theta": 0.5}, r"`rope_theta` \(0.5\) must exceed 1"),
    (WAN, {"hidden_size": 66}, r"`hidden_size` \(66\) must be divisible by `num_heads` \(4\)"),
    (WAN, {"hidden_size": 20}, r"hidden_size / num_heads \(5\), must be even and 6 or more"),
    (WAN, {"hidden_size": 16}, r"hidden_size / num_heads \(4\), must be even and 6 or more"),
    (WAN, {"num_blocks": 0}, r"`num_blocks` \(0\) must be 1 or more"),
    (WAN, {"rope_theta": 0.5}, r"`rope_theta` \(0.5\) must exceed 1"),
]


@pytest.mark.parametrize(("sizes", "change", "message"), REFUSED)
def test_sizes_that_do_not_fit_are_refused(
    sizes: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(sizes["tiny"], **change)


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (MMDiTOptions, {"recompute_single_blocks": -2}, r"\(-2\) must be 0 or more"),
        (MMDiTOptions, {"double_block_cost": 0.0}, r"`double_block_cost` \(0.0\) must be a posit"),
        (VideoDiTOptions, {"recompute_blocks": -2}, r"`recompute_blocks` \(-2\) must be 0 or mor"),
        *(
            (kind, {"cp_comm_type": "ring"}, r"\(ring\) must be p2p, all_gather or a2a")
            for kind in (MMDiTOptions, VideoDiTOptions)
        ),
    ],
)
def test_options_out_of_range_are_refused(
    options: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**change)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("double_cost", [0.7, 1.0, 2.4])
@pytest.mark.parametrize(("double", "single"), [(2, 2), (3, 5), (0, 6), (5, 0)])
def test_no_other_deal_of_an_mmdits_blocks_is_better(
    double: int, single: int, double_cost: float, num_stages: int
) -> None:
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


def test_11b_on_eight_stages() -> None:
    sizes = MMDIT["11b"]
    assert [len(s) for s in stage_blocks(sizes, 8, 1.0)] == [7, 7, 7, 7, 7, 7, 7, 8]
    assert [len(s) for s in stage_blocks(sizes, 4, 2.4)] == [9, 9, 19, 20]


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(40, 8), (30, 4), (2, 2), (5, 3)])
def test_stages_of_wan_hold_nearly_equal_numbers_of_blocks(
    num_blocks: int, num_stages: int
) -> None:
    stages = wan_stage_blocks(num_blocks, num_stages)
    assert [number for stage in stages for number in stage] == list(range(num_blocks))
    counts = [len(stage) for stage in stages]
    assert max(counts) - min(counts) <= 1


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 stages, but the model only 4 blocks \(2 double"):
        stage_blocks(MMDIT["tiny"], 5, 1.0)
    with pytest.raises(ConfigError, match="3 stages, but the model only 2 blocks; use a smaller"):
        wan_stage_blocks(2, 3)
