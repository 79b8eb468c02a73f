"""The inverse of the order: the same samples as a scan of the whole run."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from megatron_ext.data import packed_order, windows
from megatron_ext.data.lookup import samples_with
from megatron_ext.data.mixture import limited
from megatron_ext.data.order import SampleOrder, Stage
from megatron_ext.data.packed_order import PackedOrder
from tests.data.test_packed_order import documents_of_circle, starts_in


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


def test_packed_samples_of_tokens_are_those_of_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sources through some epochs and mixtures; the smallest leaves at its limit of epochs.

    Blocks are of 30 samples, the last one shorter. Ranges are tokens, documents, and whole blocks.
    """
    monkeypatch.setattr(packed_order, "SAMPLES", 30)
    monkeypatch.setattr(packed_order, "BLOCKS", 3)
    seen = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        counts = (5 * 16, 29 * 16 + 7, int(rng.integers(90, 400)) * 16 + 3)
        tokens = dict(zip("abc", counts, strict=True))
        starts = {name: documents_of_circle(seed, count) for name, count in tokens.items()}
        first = Stage(0, 16, {"a": Fraction(1), "b": Fraction(3), "c": Fraction(7, 2)})
        stages = [first, Stage(211, 16, {"b": Fraction(1), "c": Fraction(1)}),
                  Stage(300, 16, first.weights)]  # fmt: skip
        known = {name: starts_in(each) for name, each in starts.items()}
        whole = PackedOrder(tokens, stages, 16, seed, known)
        order, stop, gone = limited(whole, {"a": Fraction(9)}, 1000, stops=False)
        assert isinstance(order, PackedOrder) and stop == 1000 and gone[0].name == "a"
        for turn in range(12):
            source = turn % 3
            document = int(rng.integers(0, len(starts["abc"[source]])))
            begin = int(starts["abc"[source]][document])
            begin += int(rng.integers(0, 4)) * (turn % 4 == 3)
            length = [1, 5, 40, 600][turn % 4]
            end = min(counts[source], begin + length)
            begin = min(begin, end - 1)
            found = samples_with(order, source, begin, end, stop)
            assert found == _scanned(order, source, begin, end, stop)
            assert samples_with(order, source, begin, end, 250) == [n for n in found if n < 250]
            seen += len(found)
    assert seen > 300


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


def test_blocks_without_the_tokens_are_not_packed() -> None:
    """A source of a billion tokens, read 20 times: each epoch packs the block of a document."""
    asked = []

    def starts(begin: int, end: int) -> np.ndarray:
        asked.append(end - begin)
        return np.arange(-(-begin // 700) * 700, end, 700)

    stage = Stage(0, 2048, {"a": Fraction(1)})
    order = PackedOrder({"a": 2048 * 500_000}, [stage], 2048, 1, {"a": starts})
    found = samples_with(order, 0, 700 * 10_000, 700 * 10_001, 500_000 * 20)
    read = [order.locate(number, number + 1) for number in found]
    sizes = [
        int(size)
        for pieces in read
        for begin, size in zip(pieces.begins, pieces.lengths, strict=True)
        if begin // 700 == 10_000
    ]
    assert sum(sizes) == 20 * 700 and 20 <= len(found) <= 40
    epochs = {number // 500_000 for number in found}
    assert epochs == set(range(20))
    large = [size for size in asked if size > 1]
    assert len(large) <= 4 * 20 and max(large) <= 1024 * 2048
