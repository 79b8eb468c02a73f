"""Blocks dealt to stages."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.mmdit import SIZES
from megatron_ext.video.model.mmdit.options import stage_blocks


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("double_cost", [0.7, 1.0, 2.4])
@pytest.mark.parametrize(("double", "single"), [(2, 2), (3, 5), (0, 6), (5, 0)])
def test_no_other_deal_is_better(
    double: int, single: int, double_cost: float, num_stages: int
) -> None:
    sizes = dataclasses.replace(SIZES["tiny"], num_double_blocks=double, num_single_blocks=single)
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
    sizes = SIZES["11b"]
    assert [len(s) for s in stage_blocks(sizes, 8, 1.0)] == [7, 7, 7, 7, 7, 7, 7, 8]
    assert [len(s) for s in stage_blocks(sizes, 4, 2.4)] == [9, 9, 19, 20]


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 stages, but the model only 4 blocks \(2 double"):
        stage_blocks(SIZES["tiny"], 5, 1.0)
