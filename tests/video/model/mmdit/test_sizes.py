"""Sizes that fit together, and how many parameters they make."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.mmdit import SIZES, MMDiTSizes
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from tests.video.model.mmdit.plain import PlainMMDiT


def test_11b_is_open_sora_2() -> None:
    """19 double blocks of 6.46 B in all, 38 single ones of 5.38 B, 11.89 B together."""
    sizes = SIZES["11b"]
    with torch.device("meta"):
        model = PlainMMDiT(sizes)
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    assert sizes.num_parameters / 1e9 == pytest.approx(11.89, abs=0.005)
    double, single = (
        sum(p.numel() for p in blocks.parameters()) / 1e9
        for blocks in (model.double_blocks, model.single_blocks)
    )
    assert (double, single) == (pytest.approx(6.46, abs=0.005), pytest.approx(5.38, abs=0.005))
    assert sizes.cond_width == 68 and sizes.token_width == 64


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("switches", [{}, {"cond_embed": True, "guidance_embed": True}])
def test_the_formula_counts_every_parameter(name: str, switches: dict[str, bool]) -> None:
    sizes = dataclasses.replace(SIZES[name], qkv_bias=not switches, **switches)
    with torch.device("meta"):
        model = PlainMMDiT(sizes)
    # The plain model's fused W1 always has a bias, also for queries, keys and values.
    spare = 0 if sizes.qkv_bias else 3 * sizes.hidden_size * sizes.num_single_blocks
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters()) - spare


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 66}, r"`hidden_size` \(66\) must be divisible by `num_heads` \(4\)"),
        ({"axes_dim": (4, 6, 8)}, r"sum is the size of a head, hidden_size / num_heads \(16\)"),
        ({"axes_dim": (5, 5, 6)}, r"`axes_dim` \(5, 5, 6\) must be even"),
        ({"axes_dim": (8, 8)}, "must be three widths"),
        ({"num_heads": 0}, r"`num_heads` \(0\) must be 1 or more"),
        ({"num_double_blocks": -1}, r"`num_double_blocks` \(-1\) must be 0 or more"),
        ({"num_double_blocks": 0, "num_single_blocks": 0}, "must be 1 or more; give blocks"),
        ({"rope_theta": 0.5}, r"`rope_theta` \(0.5\) must exceed 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SIZES["tiny"], **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recompute_single_blocks": -2}, r"`recompute_single_blocks` \(-2\) must be 0 or more"),
        ({"cp_comm_type": "ring"}, r"`cp_comm_type` \(ring\) must be p2p, all_gather or a2a"),
        ({"double_block_cost": 0.0}, r"`double_block_cost` \(0.0\) must be a positive number"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MMDiTOptions(**change)


def test_tiny_is_that_of_the_criteria() -> None:
    tiny = SIZES["tiny"]
    assert isinstance(tiny, MMDiTSizes)
    assert (tiny.hidden_size, tiny.num_heads, tiny.axes_dim) == (64, 4, (4, 6, 6))
    assert (tiny.num_double_blocks, tiny.num_single_blocks, tiny.channels) == (2, 2, 4)
