"""Mixtures that change: stages, ramps, a history that goes on, limits of repetition."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest

from megatron_ext.data.mixture import (
    STEPS,
    Planned,
    continued,
    limited,
    stages_of,
)
from megatron_ext.data.order import SampleOrder, Stage

SIZES = {"a": 8000, "b": 80_000, "c": 800}


def _weights(**values: int | str) -> dict[str, Fraction]:
    return {name: Fraction(value) for name, value in values.items()}


def _order(stages: Sequence[Stage], sizes: Mapping[str, int] = SIZES) -> SampleOrder:
    return SampleOrder(sizes, stages, 8, 1)


def test_stages_follow_one_another_by_samples_or_tokens() -> None:
    planned = [
        Planned(_weights(a=1), 8, samples=100),
        Planned(_weights(a=1, b=1), 4, tokens=401),
        Planned(_weights(b=1), 8),
    ]
    stages = stages_of(planned)
    assert [(stage.start, stage.seq_length) for stage in stages] == [(0, 8), (100, 4), (201, 8)]


def test_a_change_of_length_waits_for_a_whole_step() -> None:
    planned = [
        Planned(_weights(a=1), 8, samples=100),
        Planned(_weights(b=1), 8, samples=50),
        Planned(_weights(a=1), 4, samples=50),
        Planned(_weights(a=1), 8),
    ]
    assert [stage.start for stage in stages_of(planned, batch=16)] == [0, 100, 160, 224]
    assert [stage.start for stage in stages_of(planned, begin=320, batch=16)] == [0, 100, 160, 224]
    # The batch was another one before, so that steps do not begin at multiples of 16.
    assert [stage.start for stage in stages_of(planned, begin=325, batch=16)] == [0, 100, 165, 229]


@pytest.mark.parametrize("size", [12_345, 200, 100])
def test_a_ramp_follows_the_integral_of_its_shares(size: int) -> None:
    planned = [
        Planned(_weights(a=1), 8, samples=10),
        Planned(_weights(b=3, c=1), 8, samples=size, ramp=True),
        Planned(_weights(b=1), 8),
    ]
    stages = stages_of(planned)
    assert len(stages) == STEPS + 2
    order, before = _order(stages), {"a": 10, "b": 0, "c": 0}
    for stage in stages[2:]:
        done = stage.start - 10
        share = Fraction(done, size)
        rising = done * share / 2
        wanted = {"a": 10 + done - rising, "b": rising * 3 / 4, "c": rising / 4}
        used = order.tokens_used(stage.start)
        for name, count in wanted.items():
            assert abs(Fraction(used[name], 8) - count) < 1, (stage.start, name)
            assert used[name] // 8 >= before[name]
            before[name] = used[name] // 8


def test_a_run_that_goes_on_with_the_same_mixture_is_not_changed() -> None:
    plan = [Stage(0, 8, _weights(a=1, b=3)), Stage(500, 8, _weights(a=1))]
    assert continued(plan, plan, 300) == plan
    scaled = [Stage(0, 8, _weights(a="1/4", b="3/4")), Stage(500, 8, _weights(a=1))]
    assert continued(plan, scaled, 300) == plan
    assert continued(plan, plan, 500) == plan
    assert continued([], plan, 300) == plan
    named = [Stage(0, 8, _weights(a=1, b=3, c=0)), plan[1]]
    assert continued(plan, named, 300) == plan
    # A stage with the weights of the one before begins its own count in an unbroken run too.
    plan = [Stage(0, 8, _weights(a=3, b=7)), Stage(95, 8, _weights(a=3, b=7))]
    for number in (94, 95, 96):
        assert continued(plan, plan, number) == plan


def test_other_weights_count_from_where_the_run_stands() -> None:
    history = [Stage(0, 8, _weights(a=1, b=3))]
    found = continued(history, [Stage(0, 8, _weights(b=1, c=1))], 301)
    assert found == [*history, Stage(301, 8, _weights(b=1, c=1))]
    before, after = _order(history), _order(found)
    assert after.locate(0, 301).begins.tolist() == before.locate(0, 301).begins.tolist()
    used = before.counts(301)[0]
    later = after.locate(301, 701)
    of_b = later.begins[later.sources == 1]
    alone = _order([Stage(0, 8, _weights(b=1))]).locate(used[1], used[1] + len(of_b))
    assert of_b.tolist() == alone.begins.tolist()


@pytest.mark.parametrize("epochs", ["1", "5/2"])
def test_a_limit_gives_the_share_of_a_source_to_the_others(epochs: str) -> None:
    order = _order([Stage(0, 8, _weights(a=1, b=1)), Stage(4000, 8, _weights(a=1, b=1, c=1))])
    limits = {"a": Fraction(epochs)}
    after, total, exhausted = limited(order, limits, 9000, stops=False)
    assert total == 9000
    assert after.tokens_used(9000)["a"] == Fraction(epochs) * SIZES["a"]
    ((name, number),) = [(each.name, each.number) for each in exhausted]
    assert name == "a"
    assert after.locate(0, number).begins.tolist() == order.locate(0, number).begins.tolist()
    assert 0 not in after.locate(number, 9000).sources
    assert after.locate(number - 2, number + 1).sources.tolist().count(1) >= 1


def test_a_source_can_reach_its_limit_just_where_a_stage_begins() -> None:
    order = _order([Stage(0, 8, _weights(a=1, b=1)), Stage(2000, 8, _weights(a=1, c=1))])
    after, _, exhausted = limited(order, {"a": Fraction(1)}, 2050, stops=False)
    assert [each.number for each in exhausted] == [2000]
    assert set(after.locate(1990, 2000).sources.tolist()) == {0, 1}
    assert set(after.locate(2000, 2050).sources.tolist()) == {2}


def test_a_limit_can_end_the_run_and_the_last_source_always_does() -> None:
    order = _order([Stage(0, 8, _weights(a=1, b=1))])
    _, total, exhausted = limited(order, {"a": Fraction(1)}, 9000, stops=True)
    assert order.tokens_used(total)["a"] == SIZES["a"]
    assert order.tokens_used(total + 1)["a"] == SIZES["a"] + 8
    assert [each.number for each in exhausted] == [total]
    both = {"a": Fraction(1), "b": Fraction(1, 10)}
    _, total, exhausted = limited(order, both, 9000, stops=False)
    assert total == 2000 and sorted(each.name for each in exhausted) == ["a", "b"]


def test_limits_that_are_not_reached_change_nothing() -> None:
    order = _order([Stage(0, 8, _weights(a=1, b=1))])
    assert limited(order, {"a": Fraction(5)}, 900, stops=True) == (order, 900, [])


def test_a_ramp_shorter_than_its_steps_has_a_mixture_for_each_sample() -> None:
    first = Planned(_weights(a=1), 8, samples=4)
    ramp = Planned(_weights(b=1), 8, samples=10, ramp=True)
    stages = stages_of([first, ramp, Planned(_weights(b=1), 8)])
    assert [stage.start for stage in stages] == [0, *range(4, 15)]
    used = _order(stages).tokens_used(14)
    assert (used["a"], used["b"]) == (8 * 9, 8 * 5)


def test_a_limit_that_ends_with_the_run_is_not_reached() -> None:
    order = _order([Stage(0, 8, _weights(a=1, b=1))])
    assert limited(order, {"a": Fraction(1)}, 2000, stops=True) == (order, 2000, [])
    assert limited(order, {"a": Fraction(1)}, 2001, stops=True)[1] == 2000


def test_sources_of_weight_zero_cannot_take_over() -> None:
    order = _order([Stage(0, 8, _weights(a=1, b=0))])
    _, total, exhausted = limited(order, {"a": Fraction(1)}, 9000, stops=False)
    assert (total, [each.name for each in exhausted]) == (1000, ["a"])
