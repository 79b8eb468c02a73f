"""Interleaving: every source within one sample of its quota at every place."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.interleave import Interleave, error_of, numbered

PLACES = 20_000


def _weights(kind: str, count: int, seed: int) -> list[Fraction]:
    rng = np.random.default_rng(seed)
    if kind == "decimals":
        return [Fraction(int(x) + 1, 1000) for x in rng.integers(0, 900, count)]
    if kind == "token counts":
        return [Fraction(int(x)) for x in rng.integers(1, 10**12, count)]
    return [Fraction(repr(float(x))) for x in np.exp(2 * rng.normal(size=count))]


def _largest_error(weights: Sequence[Fraction], sources: Sequence[int]) -> bool:
    """Return whether all counts stay below one of their quotas, in whole numbers."""
    total = sum(weights)
    shares = [(weight / total).limit_denominator(10**40) for weight in weights]
    for source, share in enumerate(shares):
        count = 0
        top, bottom = share.numerator, share.denominator
        for place, chosen in enumerate(sources, 1):
            count += chosen == source
            if abs(count * bottom - place * top) >= bottom:
                return False
    return True


@pytest.mark.parametrize("kind", ["decimals", "token counts", "skewed"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_counts_stay_within_one_sample_of_the_exact_quota(kind: str, count: int) -> None:
    weights = _weights(kind, count, count)
    places = PLACES if count < 50 else PLACES // 5
    sources, numbers = Interleave(weights).places(0, places)
    assert _largest_error(weights, sources.tolist())
    for source in range(count):
        own = numbers[sources == source]
        assert own.tolist() == list(range(len(own)))


def test_the_error_of_counts_is_the_largest_surplus_or_lack() -> None:
    weights = [Fraction(2), Fraction(1), Fraction(1)]
    assert error_of(weights, [5, 2, 1]) == Fraction(1)
    assert error_of(weights, [8, 0, 0]) == Fraction(4), "the quotas are 4, 2 and 2"
    assert error_of(weights, [1, 3, 4]) == Fraction(3)


@pytest.mark.parametrize("kind", ["decimals", "token counts", "skewed"])
def test_any_place_is_found_as_if_all_before_it_had_been_scheduled(kind: str) -> None:
    weights = _weights(kind, 12, 5)
    sources, numbers = Interleave(weights).places(0, PLACES)
    for start in (1, 4095, 4096, 9999, PLACES - 300):
        fresh = Interleave(weights)
        found, counted = fresh.places(start, start + 300)
        assert found.tolist() == sources[start : start + 300].tolist()
        assert counted.tolist() == numbers[start : start + 300].tolist()
        assert (
            Interleave(weights).counts(start) == np.bincount(sources[:start], minlength=12).tolist()
        )
    # As a worker reads that skips what others read.
    fresh = Interleave(weights)
    for start in (0, 3000, 3100, 9000, 2000, PLACES - 300):
        assert fresh.places(start, start + 300)[0].tolist() == sources[start : start + 300].tolist()


@pytest.mark.parametrize("kind", ["decimals", "token counts", "skewed"])
def test_the_place_of_a_sample_is_where_it_was_scheduled(kind: str) -> None:
    weights = _weights(kind, 12, 6)
    sources, numbers = Interleave(weights).places(0, PLACES)
    fresh = Interleave(weights)
    for place in (0, 1, 777, 1024, 16_384, PLACES - 1):
        assert fresh.place_of(int(sources[place]), int(numbers[place])) == place


def test_counts_are_exact_at_any_distance() -> None:
    for kind in ("decimals", "token counts", "skewed"):
        weights = _weights(kind, 20, 8)
        for place in (10**9 + 7, 10**15 + 1):
            counts = Interleave(weights).counts(place)
            assert sum(counts) == place
            assert error_of(weights, counts) < 1


@pytest.mark.parametrize("kind", ["decimals", "token counts", "skewed"])
@pytest.mark.parametrize("least", [Fraction(1, 5000), Fraction(1, 10**17 + 3)])
def test_a_tiny_share_does_not_change_how_places_are_found(kind: str, least: Fraction) -> None:
    """The second share makes numbers that do not fit in 64 bits."""
    weights = _weights(kind, 6, 9)
    weights.insert(3, sum(weights) * least)
    sources, numbers = Interleave(weights).places(0, PLACES)
    mixture = Interleave(weights)
    for place in (1, 1024, 4999, 5000, 5001, 9999, 14_000, PLACES - 1):
        counted = np.bincount(sources[:place], minlength=7).tolist()
        assert Interleave(weights).counts(place) == counted
        assert mixture.counts(place) == counted, "as found from the nearest block before"
    tiny = np.flatnonzero(sources == 3)
    assert [Interleave(weights).place_of(3, number) for number in range(len(tiny))] == tiny.tolist()
    assert numbers[tiny].tolist() == list(range(len(tiny)))


def test_a_far_place_is_found_without_scheduling_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = []
    schedule = Interleave._schedule

    def spied(self: Interleave, counts: list[int], start: int, stop: int) -> Any:
        spans.append(stop - start)
        return schedule(self, counts, start, stop)

    monkeypatch.setattr(Interleave, "_schedule", spied)
    weights = _weights("skewed", 8, 3)
    mixture = Interleave([*weights, sum(weights) * Fraction(1, 10**7)])
    counts = mixture.counts(10**12 + 5)
    assert sum(counts) == 10**12 + 5 and abs(counts[-1] - 10**5) <= 1
    assert spans == [1024]


@pytest.mark.parametrize("digits", [9, 15])
def test_the_time_for_a_place_does_not_grow_with_the_smallest_share(
    digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined = []
    backlogs = Interleave._backlogs

    def spied(self: Interleave, start: int, stop: int) -> Any:
        examined.append(stop - start)
        return backlogs(self, start, stop)

    monkeypatch.setattr(Interleave, "_backlogs", spied)
    weights = _weights("skewed", 60, 4)
    mixture = Interleave([*weights, sum(weights) / 10**digits])
    place = 10 ** (digits + 2) + 10**digits // 2 + 5
    counts = mixture.counts(place)
    assert sum(counts) == place and abs(counts[-1] - 100) <= 1
    assert sum(examined) < 10**6


def test_more_sources_than_16_bits_number_are_interleaved() -> None:
    count = (1 << 16) + 500
    sources, numbers = Interleave([Fraction(1)] * count).places(count - 300, count + 200)
    assert sources.tolist() == [*range(count - 300, count), *range(200)]
    assert numbers.tolist() == [0] * 300 + [1] * 200


def test_a_source_without_weight_gets_nothing_and_a_lone_one_everything() -> None:
    sources, _ = Interleave([Fraction(0), Fraction(3), Fraction(0)]).places(10, 20)
    assert sources.tolist() == [1] * 10
    sources, _ = Interleave([Fraction(1), Fraction(0), Fraction(1)]).places(0, 1000)
    assert np.bincount(sources, minlength=3).tolist() == [500, 0, 500]


def test_samples_of_a_source_are_spread_evenly() -> None:
    """A source of one in ten comes once in each ten places."""
    sources, _ = Interleave([Fraction(9), Fraction(1)]).places(0, 1000)
    assert (sources.reshape(100, 10).sum(axis=1) == 1).all()


def test_numbers_go_on_from_given_counts() -> None:
    places = np.array([0, 1, 0, 0, 1], dtype=np.uint16)
    assert numbered(places, [10, 20]).tolist() == [10, 20, 11, 12, 21]
