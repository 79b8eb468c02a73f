"""The inverse of the order: the same samples as a scan of the whole run."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from megatron_ext.data import windows
from megatron_ext.data.lookup import samples_with
from megatron_ext.data.order import SampleOrder, Stage


def _order(lengths: Sequence[int], window: int, seed: int) -> tuple[SampleOrder, int]:
    """Return an order of three sources whose lengths and weights change, and its samples."""
    rng = np.random.default_rng(seed)
    tokens = {name: int(rng.integers(window, 40 * window)) for name in "abc"}
    stages, at = [], 0
    for length in lengths:
        weights = {name: Fraction(int(rng.integers(0, 5))) for name in "abc"}
        stages.append(Stage(at, length, {**weights, "a": Fraction(2)}))
        at += int(rng.integers(1, 200))
    return SampleOrder(tokens, stages, window, seed), at + 100


def _scanned(order: SampleOrder, source: int, begin: int, end: int, stop: int) -> list[int]:
    pieces, found = order.locate(0, stop), []
    for row, own, first, length in zip(
        pieces.rows, pieces.sources, pieces.begins, pieces.lengths, strict=True
    ):
        read = {int(x) for x in (first + np.arange(length)) % order.sources[own].tokens}
        if own == source and read & set(range(begin, end)):
            found.append(int(row))
    return sorted(set(found))


@pytest.mark.parametrize(
    "lengths", [(8,), (8, 16, 8), (8, 2, 4, 8, 1), (2, 16, 4)], ids=lambda x: "-".join(map(str, x))
)
def test_samples_of_tokens_are_those_of_a_scan(
    lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of one token, across the end of the split's windows, and of many windows."""
    monkeypatch.setattr(windows, "GROUP", 5)
    seen = 0
    for seed in range(4):
        order, stop = _order(lengths, 8, seed)
        rng = np.random.default_rng(seed)
        for _ in range(12):
            source = int(rng.integers(0, 3))
            tokens = order.sources[source].tokens
            begin = int(rng.integers(0, tokens))
            end = min(tokens, begin + int(rng.integers(1, 1 + [1, 5, 60][seed % 3])))
            found = samples_with(order, source, begin, end, stop)
            assert found == _scanned(order, source, begin, end, stop)
            assert samples_with(order, source, begin, end, 30) == [n for n in found if n < 30]
            seen += len(found)
    assert seen > 100


def test_ten_million_samples_are_not_gone_through() -> None:
    """A document is met once in each epoch, wherever it lies; the run has a thousand of them."""
    stages = [Stage(0, 8, {"a": Fraction(1), "b": Fraction(1, 3)}), Stage(5_000_000, 8, {"a": 1})]
    order = SampleOrder({"a": 8 * 10_000, "b": 9_000}, stages, 8, 3)
    found = samples_with(order, 0, 4_000, 4_001, 10_000_000)
    epochs = order.taken(0, 10_000_000)
    assert sum(x.end - x.first for x in epochs if x.source == 0) // 10_000 == len(found) == 875
    for number in found[::97]:
        begin = int(order.locate(number, number + 1).begins[0])
        assert (4_000 - begin) % 80_000 < 8
