"""Sizes that fit together, and how many parameters they make."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.wan import SIZES
from megatron_ext.video.model.wan.options import VideoDiTOptions, stage_blocks
from tests.video.model.wan.plain import PlainVideoDiT


@pytest.mark.parametrize("name", SIZES)
def test_the_formula_counts_every_parameter(name: str) -> None:
    with torch.device("meta"):
        model = PlainVideoDiT(SIZES[name])
    assert SIZES[name].num_parameters == sum(p.numel() for p in model.parameters())


def test_1_3b_and_14b_are_wan() -> None:
    """Widths as published; 1,418,996,800 and 14,288,491,584 parameters."""
    small, large = SIZES["1.3b"], SIZES["14b"]
    assert (small.hidden_size, small.num_heads, small.num_blocks) == (1536, 12, 30)
    assert (large.hidden_size, large.num_heads, large.num_blocks) == (5120, 40, 40)
    assert small.axes_dim == large.axes_dim == (44, 42, 42)
    assert small.token_width == 64
    assert small.num_parameters == 1_418_996_800
    assert large.num_parameters == 14_288_491_584


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 66}, r"`hidden_size` \(66\) must be divisible by `num_heads` \(4\)"),
        ({"hidden_size": 20}, r"hidden_size / num_heads \(5\), must be even and 6 or more"),
        ({"hidden_size": 16}, r"hidden_size / num_heads \(4\), must be even and 6 or more"),
        ({"num_blocks": 0}, r"`num_blocks` \(0\) must be 1 or more"),
        ({"rope_theta": 0.5}, r"`rope_theta` \(0.5\) must exceed 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SIZES["tiny"], **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recompute_blocks": -2}, r"`recompute_blocks` \(-2\) must be 0 or more"),
        ({"cp_comm_type": "ring"}, r"`cp_comm_type` \(ring\) must be p2p, all_gather or a2a"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VideoDiTOptions(**change)


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(40, 8), (30, 4), (2, 2), (5, 3)])
def test_stages_hold_nearly_equal_numbers_of_blocks(num_blocks: int, num_stages: int) -> None:
    stages = stage_blocks(num_blocks, num_stages)
    assert [number for stage in stages for number in stage] == list(range(num_blocks))
    counts = [len(stage) for stage in stages]
    assert max(counts) - min(counts) <= 1


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 stages, but the model only 2 blocks; use a smaller"):
        stage_blocks(2, 3)
