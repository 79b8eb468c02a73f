"""Packed samples by number: every token once in an epoch, whoever asks, whatever the mixture."""

import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from megatron_ext.data import packed_order
from megatron_ext.data.mixture import limited
from megatron_ext.data.order import Stage
from megatron_ext.data.packed_order import PackedOrder
from megatron_ext.data.packing import DocumentStarts
from megatron_ext.data.permutation import Ints

WINDOW = 16


def _stage(start: int, **weights: int) -> Stage:
    return Stage(start, WINDOW, {name: Fraction(weight) for name, weight in weights.items()})


def documents_of_circle(seed: int, tokens: int) -> Ints:
    """Return the starts of documents of 1 to 40 tokens that fill a circle."""
    sizes = np.random.default_rng(seed).integers(1, 40, tokens)
    starts = np.cumsum(sizes) - sizes
    return starts[starts < tokens]


def starts_in(starts: Ints) -> DocumentStarts:
    """Return what finds those of some starts that lie in a range."""
    return lambda begin, end: starts[(starts >= begin) & (starts < end)]


def _order(stages: list[Stage], seed: int = 1, **tokens: int) -> PackedOrder:
    found = {name: starts_in(documents_of_circle(number, count)) for number, (name, count) in
             enumerate(tokens.items())}  # fmt: skip
    return PackedOrder(tokens, stages, WINDOW, seed, found)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack 30 samples together, and permute the samples of 3 blocks together."""
    monkeypatch.setattr(packed_order, "SAMPLES", 30)
    monkeypatch.setattr(packed_order, "BLOCKS", 3)


@pytest.mark.parametrize("windows", [1, 29, 30, 31, 90, 200, 271])
def test_an_epoch_reads_every_token_once(windows: int) -> None:
    """A source of whole windows leaves nothing to the next epoch."""
    tokens = windows * WINDOW
    order = _order([_stage(0, a=1)], a=tokens)
    for epoch in range(2):
        pieces = order.locate(epoch * windows, (epoch + 1) * windows)
        visits = np.zeros(tokens, dtype=int)
        for begin, length in zip(pieces.begins, pieces.lengths, strict=True):
            assert begin + length <= tokens
            visits[begin : begin + length] += 1
        assert (visits == 1).all()
        assert (np.bincount(pieces.rows, pieces.lengths) == WINDOW).all()
        assert pieces.columns[0] == 0 and pieces.columns.max() < WINDOW


def test_tokens_that_fill_no_window_rest_elsewhere_in_each_epoch() -> None:
    windows, tokens = 100, 100 * WINDOW + 9
    order = _order([_stage(0, a=1)], a=tokens)
    resting = []
    for epoch in range(3):
        pieces = order.locate(epoch * windows, (epoch + 1) * windows)
        covered = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(pieces.begins, pieces.lengths, strict=True)]
        )
        assert len(np.unique(covered)) == windows * WINDOW == len(covered)
        resting.append(set(range(tokens)) - set(covered.tolist()))
    assert resting[0] != resting[1] != resting[2]


def test_pieces_are_documents_and_only_the_last_of_a_sample_goes_on() -> None:
    order = _order([_stage(0, a=1)], a=5000)
    starts = {*documents_of_circle(0, 5000).tolist(), 5000}
    pieces = order.locate(0, 312)
    for row in range(312):
        own = pieces.rows == row
        ends = (pieces.begins[own] + pieces.lengths[own]).tolist()
        assert all(end in starts for end in ends[:-1])
        assert (ends[-1] not in starts) == pieces.goes_on[row]
    for begin, length in zip(pieces.begins.tolist(), pieces.lengths.tolist(), strict=True):
        assert not starts & set(range(begin + 1, begin + length))


def test_batches_of_any_size_in_any_sequence_read_the_same_samples() -> None:
    """A block is packed again where others were read in between."""
    stages = [_stage(0, a=2, b=1), _stage(150, a=1, b=3)]
    whole = _order(stages, a=4000, b=7000).locate(0, 1200)
    rng = np.random.default_rng(0)
    fresh = _order(stages, a=4000, b=7000)
    for _ in range(60):
        start = int(rng.integers(0, 1190))
        stop = int(min(1200, start + rng.integers(1, 80)))
        part, wanted = fresh.locate(start, stop), whole.between(start, stop, 0)
        for name in ("rows", "columns", "sources", "begins", "lengths"):
            assert getattr(part, name).tolist() == getattr(wanted, name).tolist()
        assert part.goes_on.tolist() == whole.goes_on[start:stop].tolist()


def test_epochs_and_seeds_have_orders_of_their_own_and_neighbours_part() -> None:
    order = _order([_stage(0, a=1)], a=600 * WINDOW)
    firsts = [order.locate(at, at + 600).begins for at in (0, 600)]
    other = _order([_stage(0, a=1)], seed=2, a=600 * WINDOW).locate(0, 600).begins
    shortest = min(map(len, [*firsts, other]))
    for one in (firsts[1], other):
        assert (firsts[0][:shortest] == one[:shortest]).mean() < 0.02
    blocks = firsts[0] // (30 * WINDOW)
    assert (blocks[1:] == blocks[:-1]).mean() < 0.7, "the samples of three blocks are mixed"


def test_a_limit_of_epochs_keeps_the_packing() -> None:
    order = _order([_stage(0, a=1, b=1)], a=1600, b=16_000)
    found, total, exhausted = limited(order, {"a": Fraction(1)}, 900, stops=False)
    assert isinstance(found, PackedOrder) and total == 900
    assert [each.name for each in exhausted] == ["a"]
    pieces = found.locate(0, 900)
    assert pieces.lengths[pieces.sources == 0].sum() == 1600


def test_counts_of_cut_documents_are_those_of_the_samples_themselves() -> None:
    order = _order([_stage(0, a=1)], a=3000 * WINDOW)
    starts, windows = documents_of_circle(0, 3000 * WINDOW), 3000
    cuts = order.cuts(0, 1000)
    pieces = order.locate(0, windows)
    own = np.searchsorted(starts, pieces.begins, side="right") - 1
    cut = int((np.bincount(own) > 1).sum())
    sizes = np.diff(starts, append=3000 * WINDOW)
    # The circle is cut at another token than 0, so the counts may differ by one document.
    assert abs(cuts.documents - len(starts)) <= 1
    assert abs(cuts.longer - (sizes > WINDOW).sum()) <= 100, "those that a block's end cuts"
    assert abs(cuts.packed - cut) <= 1
    places = (starts - _shift(order)) % (3000 * WINDOW)
    crosses = places // WINDOW != (places + sizes - 1) // WINDOW
    assert abs(cuts.concatenated - int(crosses.sum())) <= 1
    assert cuts.packed < 0.8 * cuts.concatenated


def _shift(order: PackedOrder) -> int:
    """Return the first token of the first epoch's windows."""
    return int(order.first_tokens(0, np.array([0]))[0])


def test_a_trillion_tokens_take_as_little_time_and_memory_as_a_million(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Documents of 700 tokens; nothing is built before the first sample."""
    monkeypatch.undo()
    tokens = 10**12

    def starts(begin: int, end: int) -> Ints:
        return np.arange(-(-begin // 700) * 700, end, 700)

    stage = Stage(0, 2048, {"a": Fraction(1)})
    tracemalloc.start()
    started = time.perf_counter()
    order = PackedOrder({"a": tokens}, [stage], 2048, 1, {"a": starts})
    pieces = order.locate(4 * 10**8, 4 * 10**8 + 1)
    assert time.perf_counter() - started < 5
    assert pieces.lengths.sum() == 2048
    for at in range(0, 12_000, 512):
        order.locate(at, at + 512)
    assert tracemalloc.get_traced_memory()[0] < 4e6
    tracemalloc.stop()


def test_samples_are_those_of_earlier_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was begun by an earlier version goes on in its order."""
    monkeypatch.undo()

    def starts(begin: int, end: int) -> Ints:
        return np.arange(-(-begin // 700) * 700, end, 700)

    found = []
    for window, first in ((2048, 0), (16_384, 0), (16_384, 2999), (16_384, 3000), (65_536, 0)):
        stage = Stage(0, window, {"a": Fraction(1)})
        order = PackedOrder({"a": 16_384 * 3000}, [stage], window, 3, {"a": starts})
        found.append((order.block_samples, int(order.locate(first, first + 1).begins[0])))
    assert found == [
        (1024, 40_078_500),
        (256, 39_591_300),
        (256, 29_439_900),
        (256, 27_606_600),
        (128, 35_760_200),
    ]


def test_documents_that_begin_before_the_counted_blocks_are_not_counted() -> None:
    """The whole circle is one document, which begins at token 0 and is cut wherever it is read."""
    whole = {"a": starts_in(np.array([0]))}
    order = PackedOrder({"a": 90 * WINDOW}, [_stage(0, a=1)], WINDOW, 1, whole)
    assert 0 < _shift(order) < 90 * WINDOW
    cuts = order.cuts(0, 3)
    assert (cuts.documents, cuts.longer, cuts.packed, cuts.concatenated) == (1, 1, 1, 1)
    # Documents that are exactly as long as a sample are not longer.
    exact = {"a": starts_in(np.arange(0, 90 * WINDOW, WINDOW))}
    order = PackedOrder({"a": 90 * WINDOW}, [_stage(0, a=1)], WINDOW, 1, exact)
    assert _shift(order) % WINDOW
    cuts = order.cuts(0, 3)
    assert (cuts.documents, cuts.longer, cuts.concatenated) == (90, 0, 90)
