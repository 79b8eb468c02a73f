"""State exactly, and the peak of a step within a tenth, against real ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.planning.memory import memory, step_plan, walk
from megatron_ext.planning.stages import LayerBytes
from megatron_ext.planning.state import Weight, buckets, chunk_state, rank_state
from megatron_ext.text.cost.network import GptNetwork, with_recomputation
from megatron_ext.text.cost.sizes import Sizes, stages
from tests.planning.layouts import LAYOUTS, MORE, PEAKS, QUICK, QUICK_PEAKS, flags_of
from tests.planning.measure import KINDS, Measured, configuration, measure

TOLERANCE = 0.10


def _check_weights_and_state(name: str, ranks: list[Measured]) -> None:
    config = configuration(flags_of(name))
    sizes, planned = Sizes.of(config), memory(GptNetwork.of(config))
    for rank in ranks:
        mine = planned[rank.place["pp"]]
        for weights, real in zip(mine.weights, rank.weights, strict=True):
            assert [[weight.name, weight.numel] for weight in weights] == real
        state = rank_state(
            config,
            sizes,
            mine.rank,
            mine.weights,
            replica=rank.place["dp_cp"],
            expert_replica=rank.place["expt_dp"],
        )
        assert {kind: getattr(state, kind) for kind in KINDS} == rank.state


def _marked(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """Those that are not quick, marked as slow."""
    return [pytest.param(x, marks=() if x in quick else pytest.mark.slow) for x in names]


@pytest.mark.parametrize("name", _marked([*LAYOUTS, *PEAKS], [*QUICK, *QUICK_PEAKS]))
def test_state_exactly_and_peak_within_a_tenth(name: str, tmp_path: Path) -> None:
    ranks = measure(flags_of(name), tmp_path)
    _check_weights_and_state(name, ranks)
    planned = memory(GptNetwork.of(configuration(flags_of(name))))
    for rank in ranks:
        mine = planned[rank.place["pp"]]
        held = sum(rank.state[kind] for kind in KINDS[1:])
        moving = mine.fp8_weights + mine.activations + mine.transient
        assert moving == pytest.approx(rank.peak, rel=TOLERANCE)
        assert mine.total == pytest.approx(held + rank.peak, rel=TOLERANCE)


def test_there_are_eight_layouts_of_plain_training() -> None:
    assert len(LAYOUTS) >= 8


@pytest.mark.parametrize("name", _marked(MORE, QUICK))
def test_parameters_and_state_are_exact_in_further_layouts(name: str, tmp_path: Path) -> None:
    _check_weights_and_state(name, measure(flags_of(name), tmp_path))


RECOMPUTED = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "selective": "--recompute-granularity selective",
    "mlp": "--recompute-granularity selective --recompute-modules core_attn mlp",
}


@pytest.mark.parametrize("mode", _marked(RECOMPUTED, ["full"]))
def test_peak_with_recomputation(mode: str, tmp_path: Path) -> None:
    flags = [*flags_of("dp2"), *RECOMPUTED[mode].split()]
    planned = memory(GptNetwork.of(configuration(flags)))[0]
    for rank in measure(flags, tmp_path):
        assert planned.activations + planned.transient == pytest.approx(rank.peak, rel=TOLERANCE)


def test_buckets_follow_the_alignment_of_the_distributed_optimizer() -> None:
    weights = [Weight("a", 100), Weight("b", 10), Weight("c", 200)]
    (plain,) = buckets(weights, distributed=False, replicas=2, bucket_size=None)
    assert (plain.start, plain.end) == (0, 310)
    (shared,) = buckets(weights, distributed=True, replicas=3, bucket_size=None)
    assert shared.spans == [(0, 200), (256, 266), (320, 420)]
    assert shared.end == 768  # a multiple of 3 and 128
    parts = buckets(weights, distributed=True, replicas=2, bucket_size=150)
    assert [(part.start, part.end) for part in parts] == [(0, 256), (256, 512)]
    alone = buckets([Weight("a", 100), Weight("e", 64, shared=True)], distributed=True,
                    replicas=2, bucket_size=None)  # fmt: skip
    assert [part.spans for part in alone] == [[(0, 64)], [(128, 228)]]


def test_shares_of_all_replicas_make_the_whole() -> None:
    config = configuration(flags_of("dp2"))
    sizes = Sizes.of(config)
    (rank,) = memory(GptNetwork.of(config))
    states = [chunk_state(config, sizes, rank.weights[0], replica=index) for index in range(2)]
    pieces = sum(state.optimizer for state in states) - 8 * rank.state.count
    assert pieces % 4 == 0
    assert len(rank.weights[0]) * 4 <= pieces <= (len(rank.weights[0]) + 1) * 4


def test_a_walk_holds_what_the_schedule_has_in_flight() -> None:
    config = configuration(flags_of("pp2"))
    plan = step_plan(config)
    assert walk(plan, 0, [LayerBytes(10, 3), LayerBytes(7, 2)]) == (20, 3, 2)
    assert walk(plan, 1, [LayerBytes(10, 3), LayerBytes(7, 2)]) == (7, 2, 1)


def test_a_walk_holds_what_has_arrived() -> None:
    config = configuration(flags_of("pp2"))
    plan, costs = step_plan(config), [LayerBytes(10, 0), LayerBytes(10, 0)]
    without, buffers = walk(plan, 1, costs), walk(plan, 1, costs, boundary=3)
    assert buffers[0] in (without[0] + 3, without[0] + 6)


def test_a_zero_bubble_walk_holds_what_weight_gradients_need() -> None:
    config = configuration([*flags_of("pp2"), "--pipeline-schedule", "zb-h1"])
    plan = step_plan(config)
    costs = [LayerBytes(10, 0), LayerBytes(10, 0)]
    waiting = walk(plan, 1, costs, deferred=[4, 4])
    assert waiting[0] == 14  # one whole, one whose weight gradient waits
    assert walk(plan, 1, costs, deferred=[0, 0])[0] == 10


def test_stages_hold_every_layer_once() -> None:
    for name in ("pp2", "pp2vpp2", "zbv", "uneven", "layout", "mtp1 pp2"):
        held = [layer for stage in stages(configuration(flags_of(name))) for layer in stage.layers]
        assert held == [0, 1, 2, 3]


def test_recomputation_never_takes_more() -> None:
    config = configuration(flags_of("pp2"))
    peaks = {
        mode: [rank.activations for rank in memory(GptNetwork.of(with_recomputation(config, mode)))]
        for mode in ("none", "selective", "full")
    }
    for none, selective, full in zip(*peaks.values(), strict=True):
        assert none >= selective > full
