"""A simulated run with many changes: the ledger and the tokens themselves tell the same."""

import itertools
from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_ext.data import packed_order, windows
from megatron_ext.data.indexed import read_index
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.mixture import continued
from megatron_ext.data.order import SampleOrder, Stage
from megatron_ext.data.packed_order import PackedOrder
from megatron_ext.data.packing import IndexedDocuments
from megatron_ext.data.token_spans import open_span
from megatron_ext.errors import ConfigError
from megatron_ext.extras.ledger.counts import check_of, compare, holes, merged, shared, uses
from megatron_ext.extras.ledger.ledger import Ledger
from megatron_ext.extras.ledger.step_record import RecordWriter, Steps
from megatron_ext.programs.ledger import main as tool
from megatron_ext.text.data.direct import DirectDataset, Marks

WINDOW = 16
MARKS = Marks(eod=10**6, pad=-1, vocab_size=10**7, eod_mask_loss=False, reset_position_ids=False)


def _dataset(prefix: Path, windows: int, rng: Any) -> np.ndarray:
    """Write documents whose tokens count up from 1; return the first token of each.

    Some documents are of two sequences, which packing takes for two documents.
    """
    edges = {0, *rng.integers(1, windows * WINDOW, windows).tolist()}
    starts = np.array(sorted(edges))
    ends = np.append(starts[1:], windows * WINDOW)
    with IndexedWriter(str(prefix), np.dtype(np.int32)) as writer:
        for begin, end in zip(starts.tolist(), ends.tolist(), strict=True):
            size = end - begin
            sequences = [size] if size % 3 else [1, size - 1]
            writer.add_document(np.arange(begin + 1, end + 1), sequences)
    return starts + 1


def _packed(sizes: dict[str, int], stages: list[Stage]) -> PackedOrder:
    documents = {name: IndexedDocuments(partial(read_index, name), 0) for name in sizes}
    return PackedOrder(sizes, stages, WINDOW, 5, documents)


class Simulated:
    """Goes through the steps of a run, which begins again and again with changes."""

    def __init__(self, folder: Path, seed: int, *, packs: bool) -> None:
        self.rng, self.packs = np.random.default_rng(seed), packs
        self.save, self.starts = folder / "save", {}
        for name in "abc":
            windows = int(self.rng.integers(8, 30))
            self.starts[str(folder / name)] = _dataset(folder / name, windows, self.rng)
        self.spans = [open_span(name, 0, None) for name in self.starts]
        self.tokens: dict[int, list[tuple[str, int]]] = {}
        self.states: list[tuple[int, int, list[Stage]]] = [(0, 0, [])]
        self.lost = 0

    def begin(self, generation: int) -> None:
        """Go on from a state that was saved, mostly the last, with other flags for some steps."""
        rng = self.rng
        back = int(rng.integers(0, 3)) % len(self.states)
        del self.states[len(self.states) - back :]
        at, sample, stages = self.states[-1]
        self.lost += max(self.tokens, default=0) - at
        self.tokens = {step: read for step, read in self.tokens.items() if step <= at}
        names = rng.permutation(list(self.starts))[: rng.integers(1, 4)].tolist()
        weights = {name: Fraction(int(rng.integers(1, 9)), 10) for name in names}
        length = WINDOW if self.packs else int(rng.choice([4, 8, 16, 32]))
        stages = continued(stages, [Stage(0, length, weights)], sample)
        sizes = {span.name: span.tokens for span in self.spans}
        order = SampleOrder(sizes, stages, WINDOW, 5)
        if self.packs:
            order = _packed(sizes, stages)
        writer = RecordWriter(self.save)
        writer.start(at, sample, None, None, time=0.0, generation=generation)
        writer.order({**order.to_dict(), "first_tokens": dict.fromkeys(sizes, 0)})
        batch = int(rng.integers(1, 9))
        writer.steps(Steps(at, sample, batch, at, at))
        dataset = DirectDataset(order, dict(enumerate(self.spans)), MARKS, 10**6)
        for _ in range(int(rng.integers(1, 6))):
            writer.count(at, at + 1)
            self.tokens[at + 1] = self._read(dataset, sample, sample + batch)
            at, sample = at + 1, sample + batch
            writer.count(at, at)
        writer.close()
        self.states.append((at, sample, stages))

    def _read(self, dataset: DirectDataset, first: int, end: int) -> list[tuple[str, int]]:
        """Read a step in micro-batches of any size; return each token with its source."""
        cuts = sorted({first, end, *self.rng.integers(first, end + 1, 2).tolist()})
        found = []
        for begin, stop in itertools.pairwise(cuts):
            tokens = dataset.batch(begin, stop)["tokens"].numpy()
            pieces = dataset.order.locate(begin, stop)
            for row, column, source, length in zip(
                pieces.rows, pieces.columns, pieces.sources, pieces.lengths, strict=True
            ):
                own = tokens[row, column : column + length].tolist()
                found += [(self.spans[source].name, token) for token in own]
        return found


@pytest.mark.parametrize(("seed", "packs"), [(0, False), (1, False), (7, True)])
def test_fifty_changes_repeat_and_miss_nothing(
    seed: int, packs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them follow a crash. Weights, sources, lengths, batches and micro-batches change.

    Each token is its own place in its source, so that the tokens alone tell what was read. Packed
    samples keep their length.
    """
    monkeypatch.setattr(windows, "GROUP", 5)
    monkeypatch.setattr(packed_order, "SAMPLES", 6)
    monkeypatch.setattr(packed_order, "BLOCKS", 2)
    run = Simulated(tmp_path, seed, packs=packs)
    for generation in range(50):
        run.begin(generation)
    assert run.lost > 10
    ledger = Ledger(run.save)
    assert check_of(ledger) == (0, 0)
    assert sum(each.done - each.iteration for each in ledger.history.lost) == run.lost
    visits = Counter(token for read in run.tokens.values() for token in read)
    for span in run.spans:
        times = [visits[span.name, token] for token in range(1, span.tokens + 1)]
        assert max(times) - min(times) <= 1, "every token comes once in each epoch"
    assert sum(use.counted for use in uses(ledger)) == run.states[-1][1]
    for step, read in run.tokens.items():
        steps, first, end = ledger.step(step)
        order = ledger.order_of(steps)
        rows, found = ledger.rows(order, first, end), Counter[tuple[str, int]]()
        for source, document, length in zip(
            rows.sources, rows.documents, rows.lengths, strict=True
        ):
            found[order.sources[source].name, int(document)] += int(length)
        wanted = Counter(
            (name, int(np.searchsorted(run.starts[name], token, side="right")) - 1)
            for name, token in read
        )
        assert found == wanted, step
    assert sum(_reads(ledger, run, name, at) for name in run.starts for at in (0, 3)) > 8


def _reads(ledger: Ledger, run: Simulated, name: str, document: int) -> int:
    """Compare when a document was read with a count of its tokens; return in how many steps."""
    first, end = run.starts[name][document : document + 2].tolist()
    wanted = {
        step: count
        for step, read in run.tokens.items()
        if (count := Counter(t for source, t in read if source == name and first <= t < end))
    }
    found: dict[Any, Counter[int]] = {}
    for each in ledger.reads_of(name, document, with_lost=False):
        found.setdefault(each.step, Counter()).update(range(first + each.begin, first + each.end))
    assert found == wanted
    return len(wanted)


def test_samples_that_a_record_has_twice_or_never_are_counted(tmp_path: Path) -> None:
    order = SampleOrder({"a": 160}, [Stage(0, 16, {"a": Fraction(1)})], WINDOW, 5)
    for name, sample, wanted in (("twice", 8, (4, 0)), ("never", 15, (0, 3))):
        writer = RecordWriter(tmp_path / name)
        writer.start(0, 0, None, None, time=0.0, generation=0)
        writer.order({**order.to_dict(), "first_tokens": {"a": 0}})
        writer.steps(Steps(0, 0, 4, 3, 3))
        writer.steps(Steps(3, sample, 4, 5, 5))
        assert check_of(Ledger(tmp_path / name)) == wanted


def test_an_order_of_a_later_version_is_refused(tmp_path: Path) -> None:
    """It would otherwise be taken for an order without what is new."""
    order = SampleOrder({"a": 160}, [Stage(0, 16, {"a": Fraction(1)})], WINDOW, 5)
    writer = RecordWriter(tmp_path)
    writer.start(0, 0, None, None, time=0.0, generation=0)
    writer.order({**order.to_dict(), "shuffled": True})
    writer.steps(Steps(0, 0, 4, 3, 3))
    with pytest.raises(ConfigError, match="has an order with `shuffled`, which this version does"):
        uses(Ledger(tmp_path))
    writer.order({**order.to_dict(), "packing": "next_fit"})
    writer.steps(Steps(3, 12, 4, 5, 5))
    with pytest.raises(ConfigError, match="with `packing: next_fit`, which this version does not"):
        Ledger(tmp_path).step(5)


def test_packed_samples_are_not_matched_with_windows(tmp_path: Path) -> None:
    """Equal numbers are other tokens there. A branch of a packed run has the same samples."""
    _dataset(tmp_path / "a", 10, np.random.default_rng(0))
    sizes, name = {str(tmp_path / "a"): 160}, str(tmp_path / "a")
    stages = [Stage(0, 16, {name: Fraction(1)})]
    orders = {"plain": SampleOrder(sizes, stages, WINDOW, 5), "packed": _packed(sizes, stages)}
    for folder, order in orders.items():
        writer = RecordWriter(tmp_path / folder)
        writer.start(0, 0, None, None, time=0.0, generation=0)
        writer.order({**order.to_dict(), "first_tokens": {name: 0}})
        writer.steps(Steps(0, 0, 4, 5, 5))
    plain, packed = (Ledger(tmp_path / folder) for folder in orders)
    with pytest.raises(ConfigError, match=r"order of their own \(seed, tokens, packing or length"):
        compare(plain, packed)
    assert [(row.both, row.first) for row in compare(packed, packed)[1]] == [(20, 20)]
    # Samples of 8 tokens are others if windows have 8 or 16, and others than samples of 16.
    for window, folder in ((16, "parts"), (8, "windows")):
        order = SampleOrder(sizes, [Stage(0, 8, {name: Fraction(1)})], window, 5)
        writer = RecordWriter(tmp_path / folder)
        writer.start(0, 0, None, None, time=0.0, generation=0)
        writer.order({**order.to_dict(), "first_tokens": {name: 0}})
        writer.steps(Steps(0, 0, 4, 5, 5))
    parts, halves = (Ledger(tmp_path / folder) for folder in ("parts", "windows"))
    for first, second in ((plain, halves), (parts, halves)):
        with pytest.raises(ConfigError, match="both runs read it in an order of their own"):
            compare(first, second)
    assert tool([str(packed.folder), "--export", str(tmp_path / "rows.parquet")]) == 0
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert sum(row["length"] for row in rows) == 20 * WINDOW


def test_a_branch_may_change_the_length_of_its_samples(tmp_path: Path) -> None:
    """The first run goes on in the order from before the branch, the second in a new one."""
    name = str(tmp_path / "a")
    _dataset(tmp_path / "a", 20, np.random.default_rng(0))
    sizes, weights = {name: 320}, {name: Fraction(1)}
    stages = [Stage(0, 16, weights)]
    halves = continued(stages, [Stage(0, 8, weights)], 12)
    first = {"first_tokens": {name: 0}}
    writer = RecordWriter(tmp_path / "first")
    writer.start(0, 0, None, None, time=0.0, generation=0)
    writer.order({**SampleOrder(sizes, stages, WINDOW, 5).to_dict(), **first})
    writer.steps(Steps(0, 0, 4, 5, 5))
    branch = RecordWriter(tmp_path / "second")
    branch.start(3, 12, tmp_path / "first", None, time=0.0, generation=0)
    branch.order({**SampleOrder(sizes, halves, WINDOW, 5).to_dict(), **first})
    branch.steps(Steps(3, 12, 4, 6, 6))
    step, (row,) = compare(Ledger(tmp_path / "first"), Ledger(tmp_path / "second"))
    assert (step, row.before, row.first, row.second, row.both) == (3, 12, 8, 12, 0)
    assert (row.repeated, row.lost) == (0, 0)


def test_ranges_are_merged_shared_and_have_holes() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        drawn = [sorted(rng.integers(0, 30, 2).tolist()) for _ in range(8)]
        first, second = ([(a, b + 1) for a, b in part] for part in (drawn[:4], drawn[4:]))
        one, two = ({n for a, b in part for n in range(a, b)} for part in (first, second))
        assert {n for a, b in merged(first) for n in range(a, b)} == one
        assert shared(first, second) == len(one & two)
        assert holes(first) == len(set(range(max(one))) - one)
    assert holes([]) == 0


def test_data_that_has_moved_is_one_source(tmp_path: Path) -> None:
    """The documents of a moved dataset are looked up where it lies now."""
    for number, folder in enumerate(("old", "new")):
        (tmp_path / folder).mkdir()
        _dataset(tmp_path / folder / "a", 10, np.random.default_rng(0))
        name = str(tmp_path / folder / "a")
        order = SampleOrder({name: 160}, [Stage(0, 16, {name: Fraction(1)})], WINDOW, 5)
        writer = RecordWriter(tmp_path)
        writer.start(5 * number, 10 * number, None, None, time=0.0, generation=number)
        writer.order({**order.to_dict(), "first_tokens": {name: 0}})
        writer.steps(Steps(5 * number, 10 * number, 2, 5 * number + 5, 5 * number + 5))
    (tmp_path / "old" / "a.idx").unlink()
    ledger = Ledger(tmp_path)
    assert check_of(ledger) == (0, 0) and ledger.sources == [name]
    assert [(use.source, use.counted) for use in uses(ledger)] == [(name, 20)]
    reads = ledger.reads_of(name, 0, with_lost=False)
    assert {read.step <= 5 for read in reads if read.step is not None} == {True, False}


def test_sources_that_share_name_and_length_are_counted_apart(tmp_path: Path) -> None:
    """The folders tell the corpora apart, as where all files have one name."""
    for folder in ("web", "code"):
        (tmp_path / folder).mkdir()
        _dataset(tmp_path / folder / "text", 10, np.random.default_rng(0))
    names = [str(tmp_path / folder / "text") for folder in ("web", "code")]
    weights = dict(zip(names, map(Fraction, (3, 1)), strict=True))
    order = SampleOrder(dict.fromkeys(names, 160), [Stage(0, 16, weights)], WINDOW, 5)
    writer = RecordWriter(tmp_path)
    writer.start(0, 0, None, None, time=0.0, generation=0)
    writer.order({**order.to_dict(), "first_tokens": dict.fromkeys(names, 0)})
    writer.steps(Steps(0, 0, 4, 10, 10))
    assert check_of(Ledger(tmp_path)) == (0, 0)
    _, rows = compare(Ledger(tmp_path), Ledger(tmp_path))
    assert {row.source: row.first for row in rows} == {names[0]: 30, names[1]: 10}
