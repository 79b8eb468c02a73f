"""Names of layouts."""

from __future__ import annotations

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.inspect.parity import parse_layout, split_layouts


@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [
        ("dp1", 1, ""),
        ("tp2sp", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("pp2vpp3", 2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3"),
        ("cp2a2adp2", 4, "--context-parallel-size 2 --cp-comm-type a2a"),
        ("ep4", 4, "--expert-model-parallel-size 4"),
        ("ep2pp2", 4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        ("ep2tp2dp2", 4, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2"),
        ("mbs4", 1, "--micro-batch-size 4"),
        ("pp4zbh1", 4, "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1"),
        ("pp2[--bf16 --lr 1]", 2, "--pipeline-model-parallel-size 2 --bf16 --lr 1"),
    ],
)
def test_a_name_gives_ranks_and_flags(name: str, ranks: int, flags: str) -> None:
    layout = parse_layout(name)
    assert (layout.name, layout.ranks, list(layout.flags)) == (name, ranks, flags.split())


def test_commas_in_brackets_do_not_split() -> None:
    names = [layout.name for layout in split_layouts("tp2,pp2[--x a,b],cp2")]
    assert names == ["tp2", "pp2[--x a,b]", "cp2"]


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ConfigError, match="has `tp2xp3`, whose part `xp3` is not known; join"):
        parse_layout("tp2xp3")
