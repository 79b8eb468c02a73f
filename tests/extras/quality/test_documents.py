"""Documents of several datasets are read whole and in order, in blocks of any size."""

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.extras.quality import documents as module
from megatron_ext.extras.quality.documents import Documents
from tests.extras.quality.made import write


@pytest.fixture
def made(tmp_path: Path) -> tuple[Documents, list[tuple[str, int, list[int]]]]:
    random = np.random.default_rng(0)
    expected = []
    for name, dtype in (("a", "uint16"), ("empty", "uint16"), ("b", "int32")):
        count = 0 if name == "empty" else 40
        written = [random.integers(0, 9, random.integers(0, 12)).tolist() for _ in range(count)]
        written[-1:] = [[]] * bool(count)
        prefix = write(tmp_path / name, written, dtype)
        expected += [(prefix, number, tokens) for number, tokens in enumerate(written)]
    prefixes = [str(tmp_path / name) for name in ("a", "empty", "b")]
    return Documents(prefixes), expected


@pytest.mark.parametrize("max_tokens", [1, 20, 10_000])
def test_blocks_hold_the_documents_in_order(
    made: tuple[Documents, list[tuple[str, int, list[int]]]],
    max_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    documents, expected = made
    assert documents.lengths().tolist() == [len(tokens) for *_, tokens in expected]
    some = np.array([0, 1, 2, 5, 9, 38, 39, 40, 41, 79])
    for positions in (None, some, some[:0]):
        found = [
            (position, tokens.tolist())
            for block in documents.blocks("", positions, max_tokens)
            for position, tokens in block
        ]
        wanted = range(len(expected)) if positions is None else positions.tolist()
        assert found == [(i, expected[p][2]) for i, p in enumerate(wanted)]
        sizes = [len(block.tokens) for block in documents.blocks("", positions, max_tokens)]
        assert all(size <= max(max_tokens, 11) for size in sizes)
    assert [documents.place(p) for p in range(80)] == [each[:2] for each in expected]
    assert documents.read(41, 3).tolist() == expected[41][2][:3]


def test_a_sample_is_the_seeds_and_grows(
    made: tuple[Documents, list[tuple[str, int, list[int]]]],
) -> None:
    whole, expected = made
    prefixes = whole.prefixes

    def places(count: int, seed: int) -> list[tuple[str, int]]:
        sample = Documents(prefixes, sample=count, seed=seed)
        assert len(sample) == min(count, 80) and sample.available == 80
        read = [tokens.tolist() for block in sample.blocks("") for _, tokens in block]
        found = [sample.place(position) for position in range(len(sample))]
        texts = {each[:2]: each[2] for each in expected}
        assert read == [texts[place] for place in found]
        return found

    small, large = places(10, 3), places(30, 3)
    assert len(set(small)) == 10 and set(small) < set(large) and places(10, 3) == small
    assert places(10, 4) != small
    assert places(100, 3) == [each[:2] for each in expected]
