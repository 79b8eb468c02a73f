"""The planned memory of a GPT against real ranks: state exactly, the peak within a tenth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.planning.memory import memory
from megatron_ext.planning.state import rank_state
from megatron_ext.text.cost.network import GptNetwork, with_recomputation
from megatron_ext.text.cost.sizes import stages
from tests.planning.measure import (
    TOLERANCE,
    check_peak,
    check_state,
    configuration,
    measure,
)
from tests.text.cost.layouts import LAYOUTS, MORE, PEAKS, QUICK, QUICK_PEAKS, flags_of


def _network(flags: Sequence[str]) -> GptNetwork:
    return GptNetwork.of(configuration(flags))


def _marked(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """Return the names, those that are not quick marked as slow."""
    return [pytest.param(x, marks=() if x in quick else pytest.mark.slow) for x in names]


@pytest.mark.parametrize("name", _marked([*LAYOUTS, *PEAKS], [*QUICK, *QUICK_PEAKS]))
def test_state_exactly_and_peak_within_a_tenth(name: str, tmp_path: Path) -> None:
    ranks, network = measure(flags_of(name), tmp_path), _network(flags_of(name))
    check_state(network, ranks)
    check_peak(network, ranks)


@pytest.mark.parametrize("name", _marked(MORE, QUICK))
def test_parameters_and_state_are_exact_in_further_layouts(name: str, tmp_path: Path) -> None:
    check_state(_network(flags_of(name)), measure(flags_of(name), tmp_path))


RECOMPUTED = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "selective": "--recompute-granularity selective",
    "mlp": "--recompute-granularity selective --recompute-modules core_attn mlp",
}


@pytest.mark.parametrize("mode", _marked(RECOMPUTED, ["full"]))
def test_peak_with_recomputation(mode: str, tmp_path: Path) -> None:
    flags = [*flags_of("dp2"), *RECOMPUTED[mode].split()]
    planned = memory(_network(flags))[0]
    for rank in measure(flags, tmp_path):
        assert planned.activations + planned.transient == pytest.approx(rank.peak, rel=TOLERANCE)


def test_shares_of_all_replicas_make_the_whole() -> None:
    network = _network(flags_of("dp2"))
    (rank,) = memory(network)
    (weights,) = rank.weights
    held = partial(rank_state, network.config, network.sizes, 0, rank.weights)
    counters = sum(held(replica=i).optimizer for i in range(2)) - 8 * rank.state.count
    assert counters % 4 == 0
    assert len(weights) * 4 <= counters <= (len(weights) + 1) * 4


@pytest.mark.parametrize("name", ["pp2", "pp2vpp2", "zbv", "uneven", "layout", "mtp1 pp2"])
def test_stages_hold_every_layer_once(name: str) -> None:
    held = [layer for stage in stages(configuration(flags_of(name))) for layer in stage.layers]
    assert held == [0, 1, 2, 3]


def test_recomputation_never_takes_more() -> None:
    config = configuration(flags_of("pp2"))
    peaks = [
        [rank.activations for rank in memory(GptNetwork.of(with_recomputation(config, mode)))]
        for mode in ("none", "selective", "full")
    ]
    for none, selective, full in zip(*peaks, strict=True):
        assert none >= selective > full
