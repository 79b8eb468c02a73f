"""A step's schedule is simulated with few micro-batches, and costs what the whole one costs."""

import random

import pytest

from megatron_ext.config.parallel import PAIRED_SCHEDULES
from megatron_ext.planning.memory import moments, peak_of
from megatron_ext.planning.pipeline import Schedule
from megatron_ext.planning.stages import LayerBytes
from megatron_ext.schedules.plan import Durations, Kind
from megatron_ext.schedules.price import price


@pytest.mark.parametrize("seed", range(24))
def test_the_short_step_has_the_time_and_the_memory_of_the_whole_one(seed: int) -> None:
    draw = random.Random(seed)
    names = ["no-pipelining", "1f1b", "interleaved", "interleaved", "zb-h1", "dualpipe-v"]
    name = draw.choice(names)
    size = 1 if name == "no-pipelining" else draw.choice([2, 3, 4])
    chunks = {"interleaved": draw.choice([2, 3, 4]), "dualpipe-v": 2}.get(name, 1)
    group = size + draw.randrange(3) if name == "interleaved" and seed % 2 else None
    pairs = name in PAIRED_SCHEDULES and seed % 3 == 0
    schedule = Schedule(name, size, draw.randrange(6 * size, 12 * size), chunks, group, pairs)
    times = draw.uniform(0.5, 1), draw.uniform(0.5, 1), draw.uniform(0, 1)
    durations = Durations(*times, hidden=draw.uniform(0, 1))
    latency = draw.choice([0, 0.01, 0.3]) * durations.forward
    whole = schedule.plan()
    cost = price(whole, durations, latency)
    short = schedule.time(durations, latency)
    assert short.makespan == pytest.approx(cost.makespan)
    assert short.bubble_share == pytest.approx(cost.bubble_share, abs=1e-9)
    for rank in range(size):
        counted = sum(action.kind is Kind.PAIR for action in whole.ranks[rank])
        assert schedule.num_pairs(rank) == counted
    costs = [LayerBytes(draw.randrange(1, 20), draw.randrange(5)) for _ in range(size * chunks)]
    for rank in range(size):
        owed = [2] * size * chunks
        held = peak_of(moments(whole, rank), costs, deferred=owed, boundary=3)
        assert peak_of(moments(schedule.short(), rank), costs, deferred=owed, boundary=3) == held


def test_a_long_step_is_not_simulated_whole() -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 4)):
        schedule = Schedule(name, 8, 100_001, chunks, None)
        assert schedule.simulated < 50
        assert (schedule.num_microbatches - schedule.simulated) % schedule.period == 0
        work = 100_001 * 3 * chunks
        assert schedule.time().makespan == pytest.approx(work, rel=1e-3)
