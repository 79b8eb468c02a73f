"""Planted duplicates are found: exact ones all of them, near ones with the stated probability."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.extras.quality import duplicates
from megatron_ext.extras.quality.documents import Documents
from megatron_ext.extras.quality.duplicates import (
    SHINGLE,
    Digests,
    bands_for,
    components,
    jaccard,
    near_leaders,
    shared,
    shingles,
)
from megatron_ext.extras.quality.measure import QualityOptions, measure
from tests.extras.quality.made import Tokens, likeness, pair, write


def test_each_copy_leads_to_the_first_document_with_its_tokens(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    # Short documents of few ids are often the same, across datasets of different types too.
    texts = [random.integers(0, 3, random.integers(0, 5)).tolist() for _ in range(400)]
    prefixes = [write(tmp_path / "a", texts[:250]), write(tmp_path / "b", texts[250:], "int32")]
    documents = Documents(prefixes)
    digests = Digests(len(documents), documents.common_dtype)
    for block in documents.blocks("", max_tokens=50):
        digests.add(block)
    first: dict[tuple[int, ...], int] = {}
    expected = [first.setdefault(tuple(t), i) if t else i for i, t in enumerate(texts)]
    assert digests.leaders(documents.lengths()).tolist() == expected
    assert 50 < len(set(expected)) < 250


def test_the_planted_number_of_copies_could_go(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    texts = [random.integers(0, 60_000, 20).tolist() for _ in range(100)]
    copies = [texts[7]] * 5 + [texts[8]] * 2
    prefixes = [write(tmp_path / "a", texts), write(tmp_path / "b", [[], *copies])]
    found = measure(prefixes, None, QualityOptions())[0]
    assert (found.exact.groups, found.exact.documents, found.exact.tokens) == (2, 7, 140)
    assert (found.documents, found.tokens, found.empty) == (108, 2140, 1)
    largest = found.exact.largest[0]
    assert (largest.count, largest.tokens) == (6, 100)
    places = [(place.dataset, place.document) for place in largest.places]
    assert places == [(prefixes[0], 7), *((prefixes[1], number) for number in range(1, 6))]
    assert largest.text == " ".join(map(str, texts[7][:16]))


def test_shingles_are_the_runs_of_tokens_within_documents() -> None:
    random = np.random.default_rng(3)
    texts = [random.integers(-2, 2, n).tolist() for n in (5, 9, 300, 6)]
    edges = np.cumsum([0, *map(len, texts)])
    hashes, starts = shingles(np.concatenate(texts).astype(np.int32), edges)
    seen: dict[tuple[int, ...], int] = {}
    for i, text in enumerate(texts):
        runs = [tuple(text[k : k + SHINGLE]) for k in range(len(text) - SHINGLE + 1)]
        own = hashes[starts[i] : starts[i + 1]].tolist()
        assert len(own) == len(runs)
        for run, value in zip(runs, own, strict=True):
            assert seen.setdefault(run, value) == value
    assert len(set(seen.values())) == len(seen) > 200
    one, other = (np.unique(hashes[starts[i] : starts[i + 1]]) for i in (1, 2))
    assert jaccard(one, other) == pytest.approx(likeness(texts[1], texts[2], SHINGLE), abs=0)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9, 1.0])
def test_bands_find_nearly_all_at_the_threshold(threshold: float) -> None:
    bands, rows = bands_for(threshold)
    assert shared(threshold, bands, rows) >= 0.99
    assert bands * rows <= 128
    assert shared(threshold, 128 // (rows + 1), rows + 1) < 0.99 or rows == 128


def test_components_are_those_of_a_search() -> None:
    random = np.random.default_rng(4)
    for count, edges in ((1, 0), (50, 20), (200, 150), (300, 299)):
        left, right = random.integers(0, count, (2, edges))
        if edges == 299:  # one long chain in a random order
            order = random.permutation(count)
            left, right = order[:-1], order[1:]
        expected = list(range(count))
        for _ in range(count):
            for a, b in zip(left.tolist(), right.tolist(), strict=True):
                expected[a] = expected[b] = min(expected[a], expected[b])
        assert components(count, left, right).tolist() == expected


def _pairs(seed: int, count: int, common: int) -> tuple[list[Tokens], float]:
    """Return pairs of documents of 100 tokens, one after the other, and their likeness."""
    random = np.random.default_rng(seed)
    pairs = [pair(random, 100, common) for _ in range(count)]
    return [text for both in pairs for text in both], likeness(*pairs[0], SHINGLE)


def test_pairs_share_a_band_as_often_as_the_formula_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of 600 pairs lies within four standard deviations of the stated probability."""
    pytest.importorskip("rensa", reason="near duplicates need rensa")
    monkeypatch.setattr(duplicates, "bands_for", lambda threshold: (4, 8))
    texts, similarity = _pairs(5, 600, 90)
    assert similarity == 86 / 106
    documents = Documents([write(tmp_path / "d", texts)])
    leaders = near_leaders(documents, np.arange(1200), 0.8, seed=11)
    found = float((leaders[1::2] == np.arange(0, 1200, 2)).mean())
    stated = shared(similarity, 4, 8)
    assert abs(found - stated) < 4 * (stated * (1 - stated) / 600) ** 0.5
    assert set(leaders.tolist()) >= set(range(0, 1200, 2)), "no pair is joined with another one"


def test_near_duplicates_are_those_above_the_threshold(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="near duplicates need rensa")
    near, above = _pairs(6, 100, 90)
    other, below = _pairs(7, 100, 88)
    assert below < 0.8 <= above
    third = [*near[0][:95], 1, 2, 3, 4, 5]
    texts = [*near, *other, third, near[1], [1, 2, 3], [1, 2, 3, 4]]
    prefixes = [write(tmp_path / "a", texts[:150]), write(tmp_path / "b", texts[150:])]
    found, _ = measure(prefixes, None, QualityOptions(near_duplicates=0.8))
    assert found.near is not None
    leaders = found.near.leaders.tolist()
    joined = sum(leaders[i] == i - 1 for i in range(1, 200, 2))
    assert joined >= 97, "a pair at the threshold is missed with a probability of 0.2%"
    assert leaders[200:400] == list(range(200, 400))
    assert leaders[400:] == [0, 0, 402, 403]
    assert found.exact.documents == 1 and found.near.documents == joined + 2
    assert found.near.largest[0].count == 4


def test_what_is_compared_of_a_long_document_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rensa", reason="near duplicates need rensa")
    monkeypatch.setattr(duplicates, "MAX_TOKENS", 50)
    one, other = pair(np.random.default_rng(8), 1 << 20, 50)
    documents = Documents([write(tmp_path / "d", [one, other], "int32")])
    assert near_leaders(documents, np.arange(2), 0.99, seed=0).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"near_duplicates": 8.0},
            "`--near-duplicates` (8) must be a Jaccard similarity from 0.3 to 1; use 0.8.",
        ),
        (
            {"sample_documents": 0},
            "`--sample-documents` (0) must be at least 1; leave it out for the default.",
        ),
        (
            {"span_tokens": -3},
            "`--span-tokens` (-3) must be at least 1; leave it out for the default.",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        QualityOptions(**options)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("package", "options", "flag"),
    [
        ("rensa", {"near_duplicates": 0.8}, "`--near-duplicates`"),
        ("pydivsufsort", {"span_tokens": 5}, "`--span-tokens` (5)"),
    ],
)
def test_a_measure_without_its_library_is_refused(
    package: str, options: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:
        QualityOptions(**options)
    assert str(caught.value) == (
        f"{flag} needs the package {package}, which is not installed; run `pip install {package}`, "
        "or leave the flag out."
    )
