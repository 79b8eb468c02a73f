"""Plans of 2,000 random shapes are complete, in order, free of deadlock and within memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.orders import SCHEDULES, build_plan
from megatron_ext.schedules.plan import (
    Action,
    CyclicOrder,
    Durations,
    Kind,
    Plan,
    price,
    timeline,
    with_messages,
)
from tests.schedules.proof import errors

NUM_PLANS = 2000


def random_plan(generator: random.Random) -> tuple[Plan, int]:
    """Return a plan, and the size of its groups of micro-batches."""
    schedule = generator.choice(SCHEDULES)
    size = 1 if schedule == "no-pipelining" else generator.randint(1, 8)
    chunks = {"interleaved": generator.randint(2, 4), "zb-v": 2}.get(schedule, 1)
    group = size + generator.choice((0, 0, 1, 3)) if schedule == "interleaved" else size
    plan = build_plan(
        schedule,
        pipeline_size=size,
        num_microbatches=generator.randint(1, 32),
        num_chunks=chunks,
        group_size=group,
        forward_only=generator.random() < 0.15,
        durations=Durations(*(generator.choice((0.5, 1.0, 1.3, 2.0)) for _ in range(3))),
    )
    return plan, group


def activation_limit(plan: Plan, rank: int, group: int) -> int:
    """Return how many stage activations a rank may hold, by the papers."""
    size, chunks = plan.placement.pipeline_size, plan.placement.num_chunks
    if not any(action.kind is not Kind.FORWARD for action in plan.ranks[0] if action.peer is None):
        return 1
    if plan.schedule == "interleaved":
        # Left-over micro-batches join the last group, which is then smaller than two groups.
        rest = plan.num_microbatches % group
        largest = group + rest if rest < size and plan.num_microbatches > group else group
        return (size - rank - 1) * 2 + (chunks - 1) * largest + 1
    if plan.schedule in ("zb-h1", "zb-v"):
        return size * chunks
    return size - rank


def test_random_plans_are_complete_and_free_of_deadlock_and_within_memory() -> None:
    generator = random.Random(3)
    for _ in range(NUM_PLANS):
        plan, group = random_plan(generator)
        case = (plan.schedule, plan.placement, plan.num_microbatches, group)
        for capacity in (0, generator.randint(1, 3), None):
            assert errors(plan, capacity=capacity) == [], case
        for rank, peak in enumerate(price(plan).peak_activations):
            assert peak <= activation_limit(plan, rank, group), (case, rank)


def changed(plan: Plan, rank: int, actions: list[Action]) -> Plan:
    ranks = list(plan.ranks)
    ranks[rank] = tuple(actions)
    return replace(plan, ranks=tuple(ranks))


@pytest.fixture
def plan() -> Plan:
    return build_plan("1f1b", pipeline_size=2, num_microbatches=3)


def test_the_proof_finds_a_lost_computation(plan: Plan) -> None:
    actions = [a for a in plan.ranks[1] if (a.kind, a.microbatch) != (Kind.BACKWARD, 2)]
    assert "happens [1, 1, 0] times" in " ".join(errors(changed(plan, 1, actions)))


def test_the_proof_finds_computations_out_of_order(plan: Plan) -> None:
    order = list(plan.ranks[0])
    first, second = (i for i, a in enumerate(order) if a.kind is Kind.FORWARD and a.microbatch < 2)
    order[first], order[second] = order[second], order[first]
    assert "out of order" in " ".join(errors(changed(plan, 0, order)))


def test_the_proof_finds_swapped_messages(plan: Plan) -> None:
    order = list(plan.ranks[1])
    first, second = (
        i for i, a in enumerate(order) if a.kind is Kind.RECEIVE_INPUT and a.microbatch < 2
    )
    order[first], order[second] = order[second], order[first]
    assert "do not match" in " ".join(errors(changed(plan, 1, order)))


def test_the_proof_finds_a_deadlock_that_only_blocking_channels_have(plan: Plan) -> None:
    """Both ranks send first, as a naive 1F1B does in its steady state."""
    order = list(plan.ranks[1])
    receive = next(
        i for i, a in enumerate(order) if a.kind is Kind.RECEIVE_INPUT and a.microbatch == 1
    )
    late = order.pop(receive)
    use = next(i for i, a in enumerate(order) if a.kind is Kind.FORWARD and a.microbatch == 1)
    broken = changed(plan, 1, [*order[:use], late, *order[use:]])
    assert errors(broken, capacity=None) == []
    assert "stuck" in " ".join(errors(broken, capacity=0))


def test_orders_that_wait_in_a_circle_are_refused() -> None:
    placement = Placement(2)
    backward_first = [Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]
    other = [Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 1)]
    with pytest.raises(CyclicOrder, match="rank 0 waits at B0 of stage 0"):
        timeline([backward_first, other], placement)
    with pytest.raises(CyclicOrder):
        with_messages([backward_first, other], placement)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_stage_is_placed_once(size: int) -> None:
    for placement in (Placement(size), Placement(size, 3), Placement(size, 2, v_shape=True)):
        stages = range(placement.num_stages)
        places = [(placement.rank_of(stage), placement.chunk_of(stage)) for stage in stages]
        assert len(set(places)) == placement.num_stages
        assert [placement.stage_of(*place) for place in places] == list(stages)


@pytest.mark.parametrize(
    ("schedule", "arguments", "sentence"),
    [
        ("gpipe", {}, "The schedule `gpipe` must be one of no-pipelining, 1f1b, "),
        ("zb-v", {"num_chunks": 1}, "The schedule `zb-v` needs 2 chunks on each rank, not 1."),
        ("1f1b", {"num_chunks": 2}, "The schedule `1f1b` needs 1 chunks on each rank, not 2."),
        ("no-pipelining", {}, "The schedule `no-pipelining` is for 1 rank, not 4."),
        (
            "interleaved",
            {"num_chunks": 2, "group_size": 3},
            r"A group of micro-batches \(3\) must be at least as large as the pipeline; use 4.",
        ),
    ],
)
def test_shapes_that_a_schedule_cannot_have(
    schedule: str, arguments: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_plan(schedule, pipeline_size=4, num_microbatches=8, **arguments)  # type: ignore[arg-type]
