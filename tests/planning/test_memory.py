"""Buffers of parameters, and the walk through a schedule that finds the peak."""

from __future__ import annotations

from megatron_ext.planning.memory import walk
from megatron_ext.planning.stages import LayerBytes
from megatron_ext.planning.state import Weight, buckets
from megatron_ext.schedules.orders import build_plan

PLAN = build_plan("1f1b", pipeline_size=2, num_microbatches=4)
TENS = [LayerBytes(10, 0), LayerBytes(10, 0)]


def test_buckets_follow_the_alignment_of_the_distributed_optimizer() -> None:
    weights = [Weight("a", 100), Weight("b", 10), Weight("c", 200)]
    (plain,) = buckets(weights, distributed=False, replicas=2, bucket_size=None)
    assert (plain.start, plain.end) == (0, 310)
    (shared,) = buckets(weights, distributed=True, replicas=3, bucket_size=None)
    assert shared.spans == [(0, 200), (256, 266), (320, 420)]
    assert shared.end == 768  # a multiple of 3 and 128
    parts = buckets(weights, distributed=True, replicas=2, bucket_size=150)
    assert [(part.start, part.end) for part in parts] == [(0, 256), (256, 512)]


def test_a_copy_of_the_embedding_has_a_bucket_of_its_own() -> None:
    weights = [Weight("a", 100), Weight("e", 64, shared=True)]
    alone = buckets(weights, distributed=True, replicas=2, bucket_size=None)
    assert [part.spans for part in alone] == [[(0, 64)], [(128, 228)]]


def test_a_walk_holds_what_the_schedule_has_in_flight() -> None:
    costs = [LayerBytes(10, 3), LayerBytes(7, 2)]
    assert walk(PLAN, 0, costs) == (20, 3, 2)
    assert walk(PLAN, 1, costs) == (7, 2, 1)


def test_a_walk_holds_what_has_arrived() -> None:
    without, buffers = walk(PLAN, 1, TENS), walk(PLAN, 1, TENS, boundary=3)
    assert buffers[0] in (without[0] + 3, without[0] + 6)


def test_a_zero_bubble_walk_holds_what_weight_gradients_need() -> None:
    plan = build_plan("zb-h1", pipeline_size=2, num_microbatches=4)
    waiting = walk(plan, 1, TENS, deferred=[4, 4])
    assert waiting[0] == 14  # one whole, one whose weight gradient waits
    assert walk(plan, 1, TENS, deferred=[0, 0])[0] == 10
