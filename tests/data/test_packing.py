"""Best-fit packing of a block: no token lost, few documents cut, as plain Python packs them."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.indexed import read_index
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.packing import IndexedDocuments, PackedBlock, best_fit, pack_block

Sample = list[tuple[int, int]]


def _fitted(sizes: list[int], capacity: int, count: int) -> list[int]:
    """Pack by best-fit decreasing, looking at every bin for every item."""
    room, found = [capacity] * count, [-1] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fitting = [number for number in range(count) if room[number] >= sizes[item]]
        if fitting:
            found[item] = min(fitting, key=lambda number: (room[number], number))
            room[found[item]] -= sizes[item]
    return found


def _packed(starts: list[int], end: int, length: int, ends_document: bool) -> list[Sample]:
    """Return the pieces (first token, tokens) of each sample, from plain Python."""
    samples: list[Sample] = []
    rests: Sample = []
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        while stop - start >= length:
            samples.append([(start, length)])
            start += length
        if start < stop:
            rests.append((start, stop - start))
    count = (end - starts[0]) // length - len(samples)
    sizes = [size for _, size in rests]
    bins = _fitted(sizes, length, count)
    own: list[Sample] = [
        [rest for rest, number in zip(rests, bins, strict=True) if number == each]
        for each in range(count)
    ]
    open_rest = rests[-1] if rests and not ends_document and sum(rests[-1]) == end else None
    loose = [rest for rest, number in zip(rests, bins, strict=True) if number < 0]
    loose.sort(key=lambda rest: (rest == open_rest, -rest[1], rest[0]))
    gaps = [length - sum(size for _, size in sample) for sample in own]
    for number in sorted(range(count), key=lambda i: (open_rest in own[i], -gaps[i], i)):
        while gaps[number]:
            begin, size = loose.pop(0)
            taken = min(size, gaps[number])
            own[number].append((begin, taken))
            gaps[number] -= taken
            if taken < size:
                loose.insert(0, (begin + taken, size - taken))
    assert not loose
    return samples + own


def _samples(block: PackedBlock) -> list[Sample]:
    pieces = list(zip(block.begins.tolist(), block.lengths.tolist(), strict=True))
    firsts = block.firsts.tolist()
    return [pieces[a:b] for a, b in zip(firsts, firsts[1:], strict=False)]


def _starts(seed: int) -> tuple[np.ndarray, int, int]:
    """Return starts of documents of random lengths, the end of the block and a sample's length."""
    rng = np.random.default_rng(seed)
    length, samples = int(rng.integers(2, 40)), int(rng.integers(1, 60))
    scale = float(rng.choice([0.1, 0.5, 1.5]))
    sizes = np.maximum(1, rng.lognormal(np.log(length * scale), 1, 4000)).astype(int)
    end = length * samples
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return starts[starts < end], end, length


@pytest.mark.parametrize("seed", range(20))
def test_items_go_where_plain_python_puts_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 31, 200)
    count = int(rng.integers(0, 150))
    assert best_fit(sizes, 30, count).tolist() == _fitted(sizes.tolist(), 30, count)


@pytest.mark.parametrize("seed", range(60))
def test_a_block_is_packed_as_plain_python_packs_it(seed: int) -> None:
    starts, end, length = _starts(seed)
    ends_document = bool(seed % 2)
    block = pack_block(starts, end, length, ends_document=ends_document)
    packed = _samples(block)
    wanted = _packed(starts.tolist(), end, length, ends_document)
    assert sorted(map(sorted, packed)) == sorted(map(sorted, wanted))
    visits = np.zeros(end, dtype=int)
    for sample in packed:
        assert sum(size for _, size in sample) == length
        for begin, size in sample:
            visits[begin : begin + size] += 1
    assert (visits == 1).all()


@pytest.mark.parametrize("seed", range(60))
def test_only_the_last_piece_of_a_sample_may_be_cut_at_its_end(seed: int) -> None:
    starts, end, length = _starts(seed)
    ends_document = bool(seed % 2)
    block = pack_block(starts, end, length, ends_document=ends_document)
    boundaries = {*starts.tolist()} | ({end} if ends_document else set())
    for sample, goes_on in zip(_samples(block), block.goes_on, strict=True):
        ends = [begin + size for begin, size in sample]
        assert all(each in boundaries for each in ends[:-1])
        assert (ends[-1] not in boundaries) == goes_on


def test_documents_that_fit_are_whole_and_concatenation_would_cut_them() -> None:
    """Documents of 30, 60 and 70 tokens in samples of 100: cutting every 100 cuts most of them."""
    sizes = np.tile([70, 60, 30, 40], 50)
    starts = np.cumsum(sizes) - sizes
    block = pack_block(starts, 10_000, 100, ends_document=True)
    assert sorted(block.lengths.tolist()) == sorted(sizes.tolist())
    assert not block.goes_on.any()
    cut = starts // 100 != (starts + sizes - 1) // 100
    assert cut.sum() == 50


def test_documents_of_a_file_are_found_in_any_part_of_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 9, 300)
    with IndexedWriter(str(tmp_path / "docs"), np.dtype(np.uint16)) as writer:
        for size in sizes.tolist():
            writer.add_document(np.zeros(size, dtype=np.uint16), [size])
    starts = np.cumsum(sizes) - sizes
    first = int(starts[40])
    documents = IndexedDocuments(partial(read_index, tmp_path / "docs"), first)
    total = int(sizes.sum())
    for begin, end in ((0, 50), (0, 1), (17, 18), (200, 500), (0, total - first), (30, 30)):
        wanted = {int(x) - first for x in starts if begin <= x - first < end and x < total}
        assert documents(begin, end).tolist() == sorted(wanted)


def test_a_document_that_goes_on_after_whole_samples_is_told_apart_from_those_before() -> None:
    block = pack_block(np.array([0, 3, 4]), 12, 4, ends_document=False)
    assert _samples(block) == [[(4, 4)], [(8, 4)], [(0, 3), (3, 1)]]
    assert block.goes_on.tolist() == [True, True, False]
    ended = pack_block(np.array([0, 3, 4]), 12, 4, ends_document=True)
    assert ended.goes_on.tolist() == [True, False, False]
