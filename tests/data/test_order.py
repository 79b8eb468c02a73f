"""The order of samples: every token once in an epoch, whatever the lengths and mixtures."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megatron_ext.data import windows
from megatron_ext.data.order import SampleOrder, Stage, check_recorded
from megatron_ext.errors import DataError


def _stage(start: int, length: int, **weights: int) -> Stage:
    return Stage(start, length, {name: Fraction(weight) for name, weight in weights.items()})


def _visits(order: SampleOrder, starts: Sequence[int]) -> tuple[list[np.ndarray], int]:
    """Return how often each token of each source is read up to the last start, and padding."""
    visits = [np.zeros(source.tokens, dtype=int) for source in order.sources]
    padding = 0
    for start, stop in zip(starts, starts[1:], strict=False):
        pieces = order.locate(start, stop)
        padding += (stop - start) * order.seq_length(start) - int(pieces.lengths.sum())
        for source, begin, length in zip(
            pieces.sources, pieces.begins, pieces.lengths, strict=True
        ):
            np.add.at(visits[source], (begin + np.arange(length)) % len(visits[source]), 1)
    return visits, padding


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order() -> None:
    order = SampleOrder({"a": 8 * 500 + 3}, [_stage(0, 8, a=1)], 8, 1)
    first, second = order.locate(0, 500).begins, order.locate(500, 1000).begins
    for begins in (first, second):
        covered = (begins[:, None] + np.arange(8)).ravel() % (8 * 500 + 3)
        assert len(np.unique(covered)) == 8 * 500
    assert first[0] % 8 != second[0] % 8, "each epoch cuts the text at other places"
    assert (first == second).sum() < 10


def test_batches_of_any_size_read_the_same_samples() -> None:
    order = SampleOrder(
        {"a": 4000, "b": 700}, [_stage(0, 8, a=2, b=1), _stage(300, 8, a=1, b=1)], 8, 1
    )
    whole = order.locate(0, 9000)
    for sizes in ((1, 7), (4096, 13), (5000,)):
        fresh = SampleOrder({"a": 4000, "b": 700}, order.stages, 8, 1)
        at, turn = 0, 0
        while at < 9000:
            stop = min(at + sizes[turn % len(sizes)], 9000)
            part = fresh.locate(at, stop)
            assert part.begins.tolist() == whole.begins[at:stop].tolist()
            assert part.sources.tolist() == whole.sources[at:stop].tolist()
            at, turn = stop, turn + 1
            if sizes == (1, 7) and turn > 200:
                break


@pytest.mark.parametrize("group", [3, 16, 4096])
@pytest.mark.parametrize("seed", range(8))
def test_changes_of_length_and_mixture_lose_and_repeat_no_token(
    seed: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any changes all tokens of a source have been read equally often, or once more.

    The sources hold whole windows, so that no token rests between two epochs.
    """
    monkeypatch.setattr(windows, "GROUP", group)
    rng = np.random.default_rng(seed)
    window = int(rng.choice([16, 32]))
    tokens = {name: window * int(rng.integers(2, 200)) for name in "abcd"}
    stages, at = [], 0
    for _ in range(int(rng.integers(2, 9))):
        weights = {name: int(rng.integers(0, 4)) for name in "abcd"}
        weights["a"] += not any(weights.values())
        stages.append(_stage(at, int(rng.choice([4, 8, window, 2 * window])), **weights))
        at += int(rng.integers(1, 400))
    order = SampleOrder(tokens, stages, window, seed)
    visits, padding = _visits(order, [*(stage.start for stage in stages), at])
    read = sum(int(each.sum()) for each in visits)
    assert read + padding == sum(order.tokens_used(at).values())
    assert padding < len(tokens) * len(stages) * 2 * window
    assert all(each.max() - each.min() <= 1 for each in visits)


def test_an_epoch_of_short_samples_reads_every_token_once() -> None:
    """Windows of 64 tokens in samples of 16: four parts each, none of them beside another."""
    count = 300
    order = SampleOrder({"a": 64 * count}, [_stage(0, 16, a=1)], 64, 1)
    visits, padding = _visits(order, [0, 4 * count])
    assert padding == 0 and (visits[0] == 1).all()
    begins = order.locate(0, 4 * count).begins
    # In a random order of 1200 parts about one follows its neighbour.
    assert (np.diff(begins) == 16).sum() < 8


def test_longer_samples_join_what_is_left_over_and_then_whole_windows() -> None:
    order = SampleOrder({"a": 64 * 5000}, [_stage(0, 16, a=1), _stage(10, 64, a=1)], 64, 1)
    left = 4096 * 4 - 10
    joined = -(-left * 16 // 64)
    pieces = order.locate(10, 10 + joined + 5)
    assert (pieces.lengths[pieces.rows < joined] == 16).all()
    assert (pieces.lengths[pieces.rows >= joined] == 64).all()
    visits, padding = _visits(order, [0, 10, 10 + joined + 904])
    assert padding == 32 and (visits[0] == 1).all()


def test_a_source_that_rests_goes_on_where_it_stood() -> None:
    always = SampleOrder({"a": 8000, "b": 8000}, [_stage(0, 8, a=1)], 8, 1)
    stages = [_stage(0, 8, a=1), _stage(30, 8, b=1), _stage(50, 8, a=1)]
    resting = SampleOrder({"a": 8000, "b": 8000}, stages, 8, 1)
    assert resting.locate(50, 80).begins.tolist() == always.locate(30, 60).begins.tolist()
    # While a source rests, a change of length that is undone before it returns does not touch it.
    always = SampleOrder({"a": 8000, "b": 8000}, [_stage(0, 4, a=1)], 8, 1)
    stages = [_stage(0, 4, a=1), _stage(30, 8, b=1), _stage(50, 4, a=1)]
    resting = SampleOrder({"a": 8000, "b": 8000}, stages, 8, 1)
    # A new phase would have another order after the first 2000 parts of windows.
    assert resting.locate(50, 5050).begins.tolist() == always.locate(30, 5030).begins.tolist()


def test_sources_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        SampleOrder({name: 8000}, [_stage(0, 8, **{name: 1})], 8, seed).locate(0, 500).begins
        for name, seed in (("a", 1), ("b", 1), ("a", 2))
    ]
    assert all((orders[0] == other).sum() < 10 for other in orders[1:])
    moved = SampleOrder({"s3://bucket/web/a": 8000}, [Stage(0, 8, {"s3://bucket/web/a": 1})], 8, 1)
    assert moved.locate(0, 500).begins.tolist() == orders[0].tolist(), "the folder does not count"


def test_the_order_takes_little_memory_and_time_for_a_trillion_tokens() -> None:
    order = SampleOrder({"a": 10**12, "b": 10**11}, [_stage(0, 4096, a=10, b=1)], 4096, 1)
    pieces = order.locate(2 * 10**8, 2 * 10**8 + 8)
    assert (pieces.begins < 10**12).all()
    assert sum(order.tokens_used(10**9).values()) == 4096 * 10**9


def test_samples_are_those_of_earlier_versions() -> None:
    """A run that was begun by an earlier version goes on in its order."""
    stages = [_stage(0, 64, a=2, b=1), _stage(5000, 16, a=1, b=1)]
    order = SampleOrder({"a": 64 * 5000 + 7, "b": 64 * 9000}, stages, 64, 3)
    found = [int(order.locate(n, n + 1).begins[0]) for n in (0, 1, 4999, 5000, 7000, 50_000)]
    assert found == [111_563, 133_771, 304_523, 186_539, 267_899, 156_214]


RECORDED = SampleOrder({"a": 80, "b": 8, "c": 3}, [_stage(0, 8, a=1), _stage(9, 4, b=1)], 8, 1)


def _changed(**values: Any) -> dict[str, Any]:
    return {**RECORDED.to_dict(), **values}


def _stages(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    own = RECORDED.to_dict()["stages"]
    return [{**stage, **change} for stage, change in zip(own, changes, strict=True)]


@pytest.mark.parametrize(
    "changed",
    [
        {"stages": [*_stages({}, {}), {**_stages({}, {})[1], "start": 8}]},
        {"stages": _stages({"start": 10}, {})},
        {"stages": _stages({"start": 1}, {})},
        {"stages": []},
        {"stages": _stages({"weights": {"a": "0"}}, {"weights": {"b": 0}})},
        {"stages": _stages({}, {"weights": {"b": "1", "c": "1/2"}})},
        {"stages": _stages({}, {"weights": {"b": "-1"}})},
        {"stages": _stages({}, {"weights": {"b": "1/0"}})},
        {"stages": _stages({}, {"weights": {"d": "1"}})},
        {"stages": _stages({}, {"weights": {}})},
        {"stages": _stages({}, {"seq_length": 0})},
        {"stages": _stages({}, {"seq_length": 2.0})},
        {"tokens": {"a": 80, "b": 7}},
        {"window": 0},
        {"window": True},
        {"seed": 1.5},
        {"seed": True},
    ],
)
def test_a_damaged_record_of_an_order_is_refused(changed: dict[str, Any]) -> None:
    check_recorded(_changed(), "progress.json")
    check_recorded(_changed(stages=_stages({}, {"weights": {"b": "1", "c": "0"}})), "progress.json")
    with pytest.raises(DataError, match=r"^progress.json holds a damaged order of samples \("):
        check_recorded(_changed(**changed), "progress.json")
